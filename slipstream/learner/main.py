"""One rank of the learner, started by torchrun: from a run folder to a trained model.

torchrun … -m slipstream.learner.main RUN_DIR --attempt N
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.learner.failure import constructing, record_failure
from slipstream.learner.leader import read_config
from slipstream.learner.leave import left_reason
from slipstream.learner.patience import server_patience_s
from slipstream.learner.timeouts import collective_timeout
from slipstream.process import Heartbeat, die_with_parent, importing, job_incarnation
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder
from slipstream.tracking import PROJECT, environment_of
from slipstream.trainer_section import TrainerSection

# fields of the trainer section that AsyncGRPOConfig does not take under the same name
_OWN = {"bf16", "eval_steps"}

ENDPOINT_LOOK_S = 0.2


def wait_for_endpoint(run: RunFolder, attempt: int, timeout_s: float) -> dict[str, Any]:
    """The endpoint of the server that counts for this attempt, once it is published.

    Where a supervisor leads there is no limit: it has the deadlines, and the leader hears it when it gives the nodes back.
    Raises TimeoutError.
    """
    supervised = bool(run.assignment())
    end = time.monotonic() + timeout_s
    while supervised or time.monotonic() < end or run.assignment():
        endpoint = run.endpoint(attempt)
        if endpoint is not None:
            return endpoint
        time.sleep(ENDPOINT_LOOK_S)
    raise TimeoutError(f"no server for attempt {attempt} within {timeout_s:g} s: see {run.log_file('server', attempt)}")


def trainer_arguments(
    config: RunConfig, run: RunFolder, attempt: int, endpoint: dict[str, Any], has_gpu: bool
) -> dict[str, Any]:
    """Keyword arguments of `AsyncGRPOConfig` for one attempt of a run."""
    section = config.trainer
    patience_s = server_patience_s(config, supervised=bool(run.assignment()))
    arguments: dict[str, Any] = {
        name: getattr(section, name) for name in TrainerSection.model_fields if name not in _OWN
    }
    arguments.update(
        output_dir=str(run.output(attempt)),
        run_dir=str(run.path),
        attempt=attempt,
        bf16=(has_gpu and not section.fp16) if section.bf16 is None else section.bf16,
        use_cpu=not has_gpu,
        ddp_backend="nccl" if has_gpu else "gloo",
        ddp_timeout=collective_timeout(config, patience_s),
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
        model_init_kwargs={"revision": config.model.revision} if config.model.revision else None,
        train_sampling_strategy="random" if config.data.shuffle else "sequential",
        eval_strategy="no" if section.eval_steps is None or config.data.eval_source is None else "steps",
        eval_steps=section.eval_steps,
        save_strategy="steps",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        vllm_server_base_url=endpoint["url"],
        server_patience=patience_s,
        vllm_server_token_file=str(run.token_file) if endpoint.get("authenticated") else None,
    )
    if section.report_to:
        arguments["run_name"] = run.run_id
    if "trackio" in section.report_to:
        arguments["project"] = PROJECT
    return arguments


def adapter_config(config: RunConfig) -> Any:
    """The LoRA configuration of a run, or None where all weights are trained."""
    section = config.learner
    if not section.use_lora:
        return None
    from peft import LoraConfig

    modules = section.lora_target_modules
    targets = modules[0] if modules == ["all-linear"] else modules
    return LoraConfig(r=section.lora_rank, lora_alpha=section.lora_alpha, target_modules=targets, task_type="CAUSAL_LM")


def on_gpu(gpus: int, available: bool) -> bool:
    """Whether this rank trains on a GPU. Raises RuntimeError where one was asked for and none is there."""
    if gpus > 0 and not available:
        raise RuntimeError(
            f"learner.gpus = {gpus}, but torch sees no GPU on this node: check the allocation and torch's build, or set "
            "learner.gpus = 0 to train on CPU"
        )
    return gpus > 0


def train(run: RunFolder, config: RunConfig, attempt: int, reporter: Any) -> dict[str, Any] | None:
    """Build the trainer of this rank and train; what `result.json` says, or None where it was told to leave before."""
    with importing():
        import torch
        from datasets.utils import logging as datasets_logging
        from transformers.trainer_callback import PrinterCallback
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        datasets_logging.disable_progress_bar()

        from slipstream.config import AsyncGRPOConfig
        from slipstream.data import held_out_data, training_data
        from slipstream.learner.trainer import AsyncGRPOTrainer
        from slipstream.rewards.resolve import resolve_reward

    with constructing():
        rewards = [resolve_reward(name, config.reward.paths) for name in config.reward.functions]
        dataset, held_out = training_data(config.data), held_out_data(config.data)
    reporter.phase("waiting for the server")
    endpoint = wait_for_endpoint(run, attempt, config.server.startup_timeout + 60)
    reporter.phase("loading the model")
    has_gpu = on_gpu(config.learner.gpus, torch.cuda.is_available())
    with constructing():
        args = AsyncGRPOConfig(**trainer_arguments(config, run, attempt, endpoint, has_gpu))
        trainer = AsyncGRPOTrainer(
            config.model.name,
            rewards,
            args,
            dataset,
            peft_config=adapter_config(config),
            eval_dataset=held_out,
            reporter=reporter,
        )
    trainer.remove_callback(PrinterCallback)
    checkpoint = run.fence(attempt).get("checkpoint")
    begun = time.monotonic()
    trainer.train(resume_from_checkpoint=str(run.path / checkpoint) if checkpoint else None)
    if trainer.left is not None:
        reporter.left(trainer.state.global_step, left_reason(trainer.state.global_step, trainer.left))
        return None
    reporter.phase("saving", step=trainer.state.global_step)
    trainer.save_final(run.output(attempt) / "final")
    return {
        "steps": trainer.state.global_step,
        "seconds": time.monotonic() - begun,
        "evaluations": trainer.evaluations,
        "model": str(run.output(attempt) / "final"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="slipstream.learner.main", description="One rank of the learner.")
    parser.add_argument("run_dir", help="the run folder")
    parser.add_argument("--attempt", type=int, required=True, help="number of the attempt")
    arguments = parser.parse_args(argv)
    die_with_parent()
    run = RunFolder.open(Path(arguments.run_dir))
    config = read_config(run)
    rank = int(os.environ.get("RANK", "0"))
    with importing():
        from slipstream.learner.reporter import Reporter

    if config.trainer.report_to:
        run.trackers.mkdir(mode=0o700, exist_ok=True)
        for name, value in environment_of(run.trackers, run.run_id).items():
            os.environ.setdefault(name, value)
    heartbeat = Heartbeat(run, f"learner-{rank}" if rank else "learner", arguments.attempt, job_incarnation()).start()
    heartbeat.update(phase="loading", step=0, max_steps=config.trainer.max_steps)
    reporter = Reporter(None if rank else run, arguments.attempt, heartbeat)
    try:
        with importing():
            from slipstream.learner.rank_check import check_ranks

        reporter.phase("checking the ranks")
        check_ranks(config.learner.gpus)
        result = train(run, config, arguments.attempt, reporter)
    except BaseException as error:
        record_failure(run, arguments.attempt, rank, error)
        raise
    if result is not None:
        reporter.result(result)
    heartbeat.stop(phase="left" if result is None else "finished")
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
