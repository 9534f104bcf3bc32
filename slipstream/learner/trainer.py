"""`AsyncGRPOTrainer`: transformers' `Trainer`, fed by a live queue of rollouts."""

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.memory import clear_device_cache
from transformers import AutoTokenizer, PreTrainedModel, Trainer, TrainerCallback

from slipstream.algorithm.loss import LossSettings, token_loss
from slipstream.config import AsyncGRPOConfig
from slipstream.data import fingerprint
from slipstream.learner import checkpoint as ckpt
from slipstream.learner.adapter import add_adapter, check_adapter
from slipstream.learner.duration import Duration, num_prompts, plan_duration, realign
from slipstream.learner.forward import to_tensors, token_terms
from slipstream.learner.handover import Handover
from slipstream.learner.hooks import Hooks, Steps
from slipstream.learner.leave import LeaveRequested, Leaving, leave_watch
from slipstream.learner.live import LivePipeline
from slipstream.learner.narrator import Narrator
from slipstream.learner.observe import row_observations
from slipstream.learner.pipeline import Pipeline
from slipstream.learner.plan import Share, StepPlan
from slipstream.learner.preparation import (
    as_dict,
    check_dataset,
    check_evaluation,
    check_rewards,
    eos_ids,
    load_model,
    warn_dropout,
)
from slipstream.learner.reattach import Delivering
from slipstream.learner.reporter import Reporter
from slipstream.learner.router_loss import router_loss
from slipstream.learner.saving import Saving, read_window
from slipstream.learner.speed import SpeedMeter, device_peak, synchronize
from slipstream.learner.sync import PolicySync
from slipstream.learner.timeouts import HANDOVER_TIMEOUT_S
from slipstream.learner.trackers import track
from slipstream.learner.window_log import WindowLog
from slipstream.metrics.verdict import Limits
from slipstream.metrics.window import Window
from slipstream.rollout.loop import AsyncRolloutLoop
from slipstream.rollout.main_module import stop_here_in_rollout_process
from slipstream.rollout.scoring import unique_names

# rank 0 watches the rollout process; the other ranks only wait for rank 0
WAIT_FOR_ROLLOUTS = timedelta(seconds=HANDOVER_TIMEOUT_S)


class AsyncGRPOTrainer(WindowLog, Saving, Leaving, Delivering, Trainer):
    """Trains with asynchronous GRPO: a vLLM server generates while this process trains.

    Args:
        model: hub id or folder, or a loaded model.
        reward_funcs: one or several callables; they run in the rollout process, so each must be picklable.
        args: the configuration.
        train_dataset: rows with a conversational `prompt`; other columns reach the rewards.
        processing_class: the tokenizer; None loads the model's.
        peft_config: a LoRA configuration: its adapter is trained, and delivered merged with the base weights.
        eval_dataset: held-out rows for `evaluate`.
        reporter: where records go; None outside a run: metrics.jsonl then lies in `output_dir`.

    Raises:
        ValueError, TypeError: what cannot work, naming the argument and the way out.
    """

    loop_cls: type[AsyncRolloutLoop] = AsyncRolloutLoop
    args: AsyncGRPOConfig
    duration: Duration
    model: Any
    processing_class: Any
    train_dataset: Any
    eval_dataset: Any
    optimizer: Any

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Callable[..., Any] | list[Callable[..., Any]] | None = None,
        args: AsyncGRPOConfig | None = None,
        train_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        environment_factory: Any = None,
        *,
        eval_dataset: Any = None,
        reporter: Reporter | None = None,
    ) -> None:
        stop_here_in_rollout_process()
        args = args if args is not None else AsyncGRPOConfig()
        alone = callable(reward_funcs) or isinstance(reward_funcs, str)
        self.reward_funcs: list[Any] = [reward_funcs] if alone else list(reward_funcs or [])  # type: ignore[arg-type]
        check_dataset(train_dataset)
        check_evaluation(eval_dataset, args)
        planned = plan_duration(args.max_steps, args.num_train_epochs, num_prompts(train_dataset))
        check_rewards(self.reward_funcs)
        if peft_config is not None:
            check_adapter(peft_config)
        for name, value in (("tools", tools), ("environment_factory", environment_factory)):
            if value:
                raise ValueError(f"{name} is not supported yet: leave it out")
        loaded, name = load_model(model, args)
        if processing_class is None:
            processing_class = AutoTokenizer.from_pretrained(
                name,
                trust_remote_code=args.trust_remote_code,
                revision=as_dict(args.model_init_kwargs).get("revision"),
            )
        if not getattr(processing_class, "chat_template", None):
            raise ValueError(
                f"the tokenizer of {name!r} has no chat template, so a conversational prompt cannot be rendered: set "
                "tokenizer.chat_template, or use the instruct variant of the model"
            )
        if processing_class.pad_token is None:
            processing_class.pad_token = processing_class.eos_token
        if peft_config is not None:
            loaded = add_adapter(loaded, peft_config, args)
        self.model_name = name
        self.reporter = reporter or Reporter()
        self._window = Window()
        self._pipeline: Pipeline | None = None
        self._sync = PolicySync(None, "", args.attempt, None, 0)
        self._resumed: tuple[ckpt.RolloutState, Path] | None = None
        self._plan: StepPlan | None = None
        self._ended = False
        self._narrator = Narrator(Limits(args.max_staleness, args.max_concurrent_rollouts, args.num_generations))
        self._last_sign = time.monotonic()
        self.completions = []
        self._optimizer_begun = self._step_begun = time.monotonic()
        self._forward_s = self._forward_backward_s = 0.0
        self.evaluations: list[dict[str, float]] = []
        # transformers refuses an iterable dataset without max_steps
        max_steps, args.max_steps = args.max_steps, planned.max_steps
        try:
            super().__init__(
                model=loaded,
                args=args,
                data_collator=_identity,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                callbacks=callbacks,
                optimizers=optimizers,
            )
        finally:
            args.max_steps = max_steps
        self._trackers = track(self.callback_handler.callbacks, list(args.report_to or ()), self._tracker_failed)
        if reporter is None and self._is_main:
            self.reporter = Reporter(folder=Path(str(args.output_dir)))
        self.add_callback(Hooks(self))
        self.model.config.use_cache = False
        warn_dropout(self.model)
        self._objects = (
            dist.new_group(backend="gloo", timeout=WAIT_FOR_ROLLOUTS) if self.accelerator.num_processes > 1 else None
        )
        self._handover = Handover(self._objects)
        self._router = router_loss(self.model, args.router_aux_loss_coef)
        peak, ranks = device_peak(args, self.model.dtype), self.accelerator.num_processes
        self._speed = SpeedMeter(self.model.config, peft_config is None, peak, ranks)
        self._settings = LossSettings(
            args.score_centering,
            args.vllm_importance_sampling_clip_min,
            args.vllm_importance_sampling_clip_max,
            args.epsilon,
            args.epsilon if args.epsilon_high is None else args.epsilon_high,
        )

    @property
    def eos_token_ids(self) -> list[int]:
        """EOS: the generation config's list and the tokenizer's."""
        return eos_ids(self.model, self.processing_class)

    # ---- training

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; with `resume_from_checkpoint` (a path, or True for the newest complete one) continue.

        Raises CheckpointError on an incomplete checkpoint or one of another dataset, NothingTrained, RolloutWorkerError,
        TransferError, and ValueError on a `num_train_epochs` without meaning.
        """
        config = self.args
        if resume_from_checkpoint is None:
            resume_from_checkpoint = config.resume_from_checkpoint
        if resume_from_checkpoint is True:
            found = ckpt.complete_checkpoints(Path(str(config.output_dir)))
            if not found:
                raise ckpt.CheckpointError(f"no complete checkpoint in {config.output_dir}: start without resuming")
            resume_from_checkpoint = str(found[-1][1])
        self._resumed = self._read_state(Path(resume_from_checkpoint)) if resume_from_checkpoint else None
        self._saved_step = self._resumed[0].step if self._resumed else -1  # never written over, should no step follow
        epoch_based = config.max_steps <= 0
        self.duration = plan_duration(config.max_steps, config.num_train_epochs, self.num_prompts)
        config.max_steps = self.duration.max_steps
        self._ended, self.left = False, None
        try:
            if self._is_main:
                self._leave = leave_watch(config.run_dir)
                self._pipeline = self.make_pipeline(self.duration.end, self._resumed)
                if self._resumed:  # what its steps since the last log have measured
                    self._window.merge(read_window(self._resumed[1]))
            output = super().train(resume_from_checkpoint or None, *args, **kwargs)
            if self._pipeline is not None and self._ended:
                self._pipeline.ledger.data_ended()
            self._save_last()
            if self.left is not None:
                return output
            evaluated = self.evaluations[-1]["step"] if self.evaluations else -1
            if self.eval_dataset is not None and evaluated != self.state.global_step:
                self.evaluate()  # the end of the data comes unannounced
            return output
        finally:
            if epoch_based:
                config.max_steps = -1
            for tracker in self._trackers:
                tracker.finish()
            self._close_pipeline()

    def make_pipeline(self, end: int | None, resumed: tuple[ckpt.RolloutState, Path] | None) -> Pipeline:
        """Rank 0's pipeline; a replayer of recorded samples takes the live one's place by overriding this."""
        return LivePipeline(self, end, resumed)

    @property
    def num_prompts(self) -> int | None:
        """Prompts in the training data; None for an iterable dataset."""
        return num_prompts(self.train_dataset)

    @property
    def data_fingerprint(self) -> str:
        """Identity of the training data; all iterable datasets have the same."""
        return "iterable" if self.num_prompts is None else fingerprint(self.train_dataset)

    @property
    def _order(self) -> tuple[bool, int]:
        """Whether prompts are shuffled, and by which seed."""
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return self.args.train_sampling_strategy == "random", seed

    def _start_pipeline(self) -> None:
        """The model is loaded, prepared and (on resume) restored: deliver it, then let generation begin."""
        version = self._resumed[0].model_version if self._resumed else 0
        if self._resumed is not None:
            realign(self.lr_scheduler, self.optimizer)
        if self._pipeline is not None:
            self._sync = self._pipeline.make_sync(version)
            self._pipeline.start(version, self.state.global_step)
        else:
            self._sync = PolicySync(None, "", self.args.attempt, None, version)
        if self._objects is not None:
            self._sync.orders = self._handover
        self.reporter.phase("delivering weights", step=self.state.global_step, max_steps=self.duration.known_steps)
        self._sync.connect()
        self._deliver()
        if self._pipeline is not None:
            self._pipeline.open()
        if self.eval_dataset is not None and self._resumed is None and not self.args.eval_on_start:
            self.evaluate()
        self._step_begun = self._last_sign = time.monotonic()

    def get_train_dataloader(self) -> Any:
        return Steps(self)

    def _next_step(self) -> Share | None:
        """This rank's micro-batches of the next optimizer step; None when the run is over. Blocks until they are there."""
        step = self.state.global_step
        if self._ended or self.left is not None or step >= self.args.max_steps:
            return None
        if self._pipeline is None:
            self.reporter.phase("waiting for rank 0", step=step)
            share, leaves = self._handover.receive(self._deliver)
            self.left = "" if leaves else None
        else:
            self.reporter.phase("waiting for rollouts", step=step)
            share = self._handover.send(self._plan_step(self._pipeline, step), self.left is not None)
        if share is not None:
            self.reporter.phase("training", step=step)
        self._ended = share is None and self.left is None
        self._forward_s = self._forward_backward_s = 0.0
        return share

    def _syncs_after(self, step: int) -> bool:
        """Whether the policy is delivered at the end of this optimizer step, counted from 1."""
        return step % self.args.weight_sync_steps == 0

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], None]:
        batches: list[Any] = []
        for batch in epoch_iterator:
            batches.append(batch)
            if len(batches) == num_batches:
                break
        if not batches:
            self.control.should_epoch_stop = self.control.should_training_stop = True
        return batches, None

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of one row; transformers' own scaling must not come on top of ours."""
        begun = time.monotonic()
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        synchronize(self.args.device)
        self._forward_s += time.monotonic() - begun
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        self.accelerator.backward(loss)
        synchronize(self.args.device)
        self._forward_backward_s += time.monotonic() - begun
        self.reporter.advance()
        return loss.detach()

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Counted from the step's plan: what a rank gets does not say what the others forward."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """This rank's part of a micro-batch's loss, scaled so that averaging over ranks and adding over micro-batches
        gives: the mean over micro-batches of (sum over tokens / tokens over all ranks), and of the mean router loss of
        the rows that hold samples."""
        row = inputs["row"]
        with self._router.recorded() if self._router else contextlib.nullcontext():
            terms, entropy = token_terms(model, to_tensors(row, self.args.device), self.args.temperature)
        total = token_loss(terms, self._settings).sum()
        loss = total * (self.accelerator.num_processes / (inputs["num_tokens"] * inputs["num_micro_batches"]))
        if self._router is not None and row.num_samples:
            router = self._router.value(row.num_tokens)
            share = self.accelerator.num_processes / (inputs["num_rows"] * inputs["num_micro_batches"])
            loss = loss + self._router.coefficient * share * router
            self._window.add("aux_loss", router.item())
        if row.num_terms:
            self._window.add_all(row_observations(row, terms, entropy, self._settings))
        return (loss, terms) if return_outputs else loss

    def _finish_step(self) -> None:
        """The optimizer has stepped: settle the step's prompts, and deliver the new policy."""
        add = self._window.add
        synchronize(self.args.device)
        add("perf/fwd_s", self._forward_s)
        add("perf/fwd_bwd_s", self._forward_backward_s)
        add("perf/optimizer_s", time.monotonic() - self._optimizer_begun)
        if self._pipeline is not None and self._plan is not None:
            self._pipeline.feed.step_finished(self._plan)
            # kept in the trainer's state, so that a resumed run counts on
            self.state.num_input_tokens_seen += self._plan.num_forwarded
        if self._syncs_after(self.state.global_step):
            self._deliver_next_version()
        now = time.monotonic()
        seconds = now - self._step_begun
        add("perf/step_s", seconds)
        if self._plan is not None:
            self._window.add_all(self._speed.observe(self._plan, self._forward_backward_s, seconds))
        self._step_begun = self._last_sign = now
        self.reporter.advance(step=self.state.global_step, max_steps=self.duration.known_steps)

    # ---- evaluation

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Mean reward of one rollout per held-out prompt with the policy on the server; logged as `eval/*`.

        Returns `{"eval_reward": …}` on every rank; nothing where rank 0 was told to leave meanwhile.
        """
        if self.eval_dataset is None:
            raise ValueError("evaluate needs an eval_dataset")
        box: list[Any] = [None]
        self.reporter.phase("evaluating", step=self.state.global_step)
        if self._pipeline is not None:
            with contextlib.suppress(LeaveRequested):  # the next step is where all ranks leave
                box = [{}]
                box = [self._pipeline.evaluate(len(self.evaluations) + 1)]
        self._handover.agree(self._deliver)
        if self._objects is not None:
            dist.broadcast_object_list(box, src=0, group=self._objects)
        if box[0] is None:
            raise RuntimeError("evaluate runs during train(): the rollout process does it")
        if not box[0]:
            return {}
        metrics = {f"eval_{name}": value for name, value in box[0].items()}
        self.log({f"eval/{name}": value for name, value in box[0].items()})
        self.evaluations.append({"step": self.state.global_step, **box[0]})
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @property
    def reward_names(self) -> list[str]:
        return unique_names(self.reward_funcs)

    def _close_pipeline(self) -> None:
        self._sync.close()
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None


def _identity(batch: Any) -> Any:
    return batch
