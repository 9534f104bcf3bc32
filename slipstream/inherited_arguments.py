"""What becomes of each field of transformers' `TrainingArguments`: none is silently ignored.

The table knows every field of the pinned release; a test compares the two. Standard library only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.config_rules import Problem

OLDEST = (5, 2)  # release of transformers
Treatment = Literal["honoured", "limited", "refused", "warned", "irrelevant"]


@dataclass(frozen=True)
class Argument:
    """The treatment of one field.

    Attributes:
        treatment: "honoured": does what transformers says; "limited": for some values, others are refused; "refused":
            every value but those that change nothing; "warned": accepted without effect; "irrelevant": no effect here
            or anywhere in the trainer.
        why: the reason; for what is refused or warned about with the way out.
        accepted: whether a value is accepted without a word.
    """

    treatment: Treatment
    why: str
    accepted: Callable[[Any], bool] = lambda value: True


def _honoured(why: str = "") -> Argument:
    return Argument("honoured", why)


def _limited(accepted: tuple[Any, ...] | Callable[[Any], bool], why: str) -> Argument:
    return Argument("limited", why, accepted if callable(accepted) else accepted.__contains__)


def _refused(why: str, *accepted: Any) -> Argument:
    return Argument("refused", why, (accepted or (False, None)).__contains__)


def _warned(default: Any, why: str) -> Argument:
    return Argument("warned", why, (default,).__contains__)


def _irrelevant(why: str) -> Argument:
    return Argument("irrelevant", why)


_LOADER = "there is no data loader: the rollout process feeds training; leave it out"
_GENERATED = "evaluation generates on the server and reports rewards, it has no batches or predictions; leave it out"
_BEST = (
    "which checkpoint is best is not judged while training: evaluations are logged as eval/reward and kept in "
    "trainer.evaluations; load the checkpoint of the step you want"
)
_HUB = "by transformers"
_NOT_A_LOSS = "the loss is a policy gradient, not a cross-entropy; leave it out"
_COMPILED = (
    "the output layer is exchanged for the forward pass, which a compiled graph would not see; leave it out (attention "
    "kernels are compiled anyway)"
)


def _is_own_schedule(value: Any) -> bool:
    return value not in ("reduce_lr_on_plateau", "greedy")


def _is_ordinary_optimizer(value: Any) -> bool:
    return not str(value).endswith("layerwise") and value not in ("lomo", "adalomo")


def _is_data_parallel(value: Any) -> bool:
    return all((getattr(value, name, None) or 1) == 1 for name in ("cp_size", "sp_size", "tp_size"))


def _is_fsdp2(value: Any) -> bool:
    config = value if isinstance(value, dict) else {}
    config = {key.removeprefix("fsdp_"): v for key, v in config.items()}
    return int(config.get("version", 2)) == 2 and not config.get("xla")


ARGUMENTS: dict[str, Argument] = {
    "output_dir": _honoured(),
    # duration
    "per_device_train_batch_size": _warned(
        8, "is not used: a row holds as many samples as fit into token_budget; set token_budget and leave it out"
    ),
    "num_train_epochs": _honoured("passes over the prompts, counted by settled prompts"),
    "max_steps": _honoured(),
    # optimizer
    "learning_rate": _honoured(),
    "lr_scheduler_type": _limited(
        _is_own_schedule,
        "follows an evaluation loss, which asynchronous GRPO does not have: use another schedule, for example cosine with "
        "max_steps",
    ),
    "lr_scheduler_kwargs": _honoured(),
    "warmup_steps": _honoured(),
    "optim": _limited(
        _is_ordinary_optimizer,
        "updates weights during the backward pass, before gradients are accumulated and clipped; use another optimizer, for "
        "example adamw_torch_fused",
    ),
    "optim_args": _honoured(),
    "weight_decay": _honoured(),
    "adam_beta1": _honoured(),
    "adam_beta2": _honoured(),
    "adam_epsilon": _honoured(),
    "optim_target_modules": _honoured("by the galore and apollo optimizers"),
    "gradient_accumulation_steps": _honoured("micro-batches of a step; each is one row per process"),
    "average_tokens_across_devices": _refused("the loss is always over the tokens of all ranks; leave it out", True),
    "max_grad_norm": _honoured(),
    "label_smoothing_factor": _refused(_NOT_A_LOSS, 0),
    # precision and memory
    "bf16": _honoured(),
    "fp16": _honoured(),
    "bf16_full_eval": _refused(_GENERATED),
    "fp16_full_eval": _refused(_GENERATED),
    "tf32": _honoured(),
    "activation_checkpointing": _honoured("the newer name of gradient_checkpointing"),
    "activation_checkpointing_kwargs": _honoured(),
    "gradient_checkpointing": _honoured(),
    "gradient_checkpointing_kwargs": _honoured(),
    "torch_compile": _refused(_COMPILED),
    "torch_compile_backend": _refused(_COMPILED),
    "torch_compile_mode": _refused(_COMPILED),
    "use_liger_kernel": _refused("the loss is our own and already chunked; set it to False"),
    "liger_kernel_config": _refused("use_liger_kernel is not supported; leave it out"),
    "use_cache": _refused("training never generates; set it to False"),
    "neftune_noise_alpha": _refused(
        "noise in the embeddings makes the ratio of trainer to sampler differ from 1 even for fresh samples; leave it out"
    ),
    "torch_empty_cache_steps": _honoured(),
    "auto_find_batch_size": _refused(
        "there is no batch size to find: rows are bounded by token_budget; set it to False and lower token_budget"
    ),
    # logging
    "logging_strategy": _limited(
        ("steps",),
        "metrics, verdicts and records come by windows of steps, and how many an epoch has is not known; use "
        'logging_strategy="steps" and raise logging_steps for fewer lines',
    ),
    "logging_steps": _honoured(),
    "logging_first_step": _honoured(),
    "log_on_each_node": _honoured(),
    "logging_nan_inf_filter": _honoured(),
    "include_num_input_tokens_seen": _honoured("counts forwarded tokens over all ranks; a row has no padding"),
    "log_level": _honoured(),
    "log_level_replica": _honoured(),
    "disable_tqdm": _honoured(),
    "report_to": _honoured(),
    "run_name": _honoured("by the integrations of report_to"),
    "project": _honoured("by trackio"),
    "trackio_space_id": _honoured("by trackio"),
    "trackio_bucket_id": _honoured("by trackio"),
    "trackio_static_space_id": _honoured("by trackio"),
    # evaluation
    "eval_strategy": _limited(
        ("no", "steps"),
        'how many steps an epoch has is not known: use eval_strategy="steps" with eval_steps, or "no" to evaluate before and '
        "after training",
    ),
    "eval_steps": _honoured(),
    "eval_delay": _honoured(),
    "per_device_eval_batch_size": _warned(
        8, "is not used: held-out prompts are generated on the server, as many at once as it takes; leave it out"
    ),
    "prediction_loss_only": _refused(_GENERATED),
    "eval_on_start": _honoured(),
    "eval_do_concat_batches": _refused(_GENERATED, True),
    "eval_use_gather_object": _refused(_GENERATED),
    "eval_accumulation_steps": _refused(_GENERATED),
    "include_for_metrics": _refused(_GENERATED, []),
    "batch_eval_metrics": _refused(_GENERATED),
    # checkpoints
    "save_only_model": _refused(
        "a checkpoint without optimizer cannot be resumed; set it to False, and use trainer.save_model for the weights alone"
    ),
    "save_strategy": _limited(
        ("no", "steps"),
        f'use save_strategy="steps" with save_steps: how many steps an epoch has is not known, and {_BEST}',
    ),
    "save_steps": _honoured(),
    "save_on_each_node": _refused("checkpoints are sealed once, on storage that every node sees; set it to False"),
    "save_total_limit": _honoured(),
    "enable_jit_checkpoint": _refused(
        "a checkpoint between two steps would split groups, and ranks would not save at the same one; set it to False and "
        "lower save_steps"
    ),
    "load_best_model_at_end": _refused(_BEST),
    "metric_for_best_model": _refused(_BEST),
    "greater_is_better": Argument("refused", _BEST, lambda value: value is None),
    "ignore_data_skip": _refused(
        "a live rollout queue cannot be replayed by skipping batches; the position is in rollout_state.json; set it to True",
        True,
    ),
    "restore_callback_states_from_checkpoint": _honoured(),
    "resume_from_checkpoint": _honoured("where train() is not given another one"),
    # hub
    "push_to_hub": _honoured(_HUB),
    "hub_token": _honoured(_HUB),
    "hub_private_repo": _honoured(_HUB),
    "hub_model_id": _honoured(_HUB),
    "hub_strategy": _limited(
        ("end", "every_save"),
        'uploads a checkpoint before it is sealed, which could not be resumed from: use "every_save" or "end"',
    ),
    "hub_always_push": _honoured(_HUB),
    "hub_revision": _honoured(_HUB),
    # randomness
    "full_determinism": _honoured(),
    "seed": _honoured(),
    "data_seed": _honoured("the seed of the order of prompts"),
    # devices and processes
    "use_cpu": _honoured(),
    "accelerator_config": _honoured("what there is beside data loading; the rest of its keys is refused"),
    "parallelism_config": _limited(
        _is_data_parallel,
        "cp_size, sp_size and tp_size above 1 (context, sequence and tensor parallelism) are not supported; use data "
        "parallel ranks, sharded with fsdp where the model is large",
    ),
    "ddp_find_unused_parameters": _honoured(),
    "ddp_bucket_cap_mb": _honoured(),
    "ddp_broadcast_buffers": _honoured(),
    "ddp_static_graph": _honoured(),
    "ddp_backend": _honoured(),
    "ddp_timeout": _honoured("for collectives of the gradient; waiting for rollouts has a time-out of its own"),
    "fsdp": _honoured(),
    "fsdp_config": _limited(_is_fsdp2, "only FSDP2 is supported: set version to 2 and xla to false, or leave them out"),
    "deepspeed": _refused("DeepSpeed is not supported; use fsdp (FSDP2)"),
    "local_rank": _irrelevant("torchrun's environment says the rank"),
    # data
    "dataloader_drop_last": _refused(_LOADER),
    "dataloader_num_workers": _refused(_LOADER, 0),
    "dataloader_pin_memory": _irrelevant("rows are made in the training process and moved as they are used"),
    "dataloader_persistent_workers": _refused(_LOADER),
    "dataloader_prefetch_factor": _refused(_LOADER),
    "dataloader_multiprocessing_context": _refused(_LOADER),
    "dataloader_in_order": _refused(_LOADER, True),
    "remove_unused_columns": _irrelevant("every column of the data reaches the rewards; the model sees only tokens"),
    "label_names": _refused(_NOT_A_LOSS),
    "train_sampling_strategy": _limited(
        ("random", "sequential"), "prompts are visited 'random' or 'sequential': completions have no length in advance"
    ),
    "length_column_name": _refused("prompts are not grouped by length; leave it out", "length"),
    # the rest
    "debug": _limited(
        lambda value: "tpu" not in str(value), "there is no TPU support: leave it out, or use underflow_overflow"
    ),
    "skip_memory_metrics": _honoured(),
    "do_train": _irrelevant("a flag for scripts; no trainer reads it"),
    "do_eval": _irrelevant("a flag for scripts; no trainer reads it"),
    "do_predict": _irrelevant("a flag for scripts; no trainer reads it"),
}

_ACCELERATOR_DEFAULTS = {
    "split_batches": False,
    "dispatch_batches": None,
    "even_batches": True,
    "use_seedable_sampler": True,
    "non_blocking": False,
}
_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
_NOT_ADAM = ("sgd", "adagrad", "adafactor", "rmsprop", "schedule_free_sgd")
_TARGETS = ("galore", "apollo")  # optimizers that take optim_target_modules
_IGNORES_ARGS = ("adamw_torch", "adamw_torch_fused", "adafactor")


def problems(v: Mapping[str, Any]) -> list[Problem]:
    """What must be refused among the values `v` of all fields, enumerations as their plain values."""
    found = [
        (key, v[key], argument.why)
        for key, argument in ARGUMENTS.items()
        if key in v and argument.treatment in ("limited", "refused") and not argument.accepted(v[key])
    ]
    for key, useless, why in _useless(v):
        if useless:
            found.append((key, v[key], why))
    return found


def _useless(v: Mapping[str, Any]) -> list[tuple[str, bool, str]]:
    """(key, whether it is set but would do nothing, the way out)."""
    reporters = v["report_to"] if isinstance(v["report_to"], list) else [v["report_to"]]
    trackio = "trackio" in reporters or "all" in reporters
    checkpointing = v["gradient_checkpointing"] and v.get("activation_checkpointing") is not False
    old, new = v["gradient_checkpointing_kwargs"], v.get("activation_checkpointing_kwargs")
    saved, evaluated = v["save_strategy"] != "no", v["eval_strategy"] != "no"
    optimizer = str(v["optim"])
    found = [
        ("save_steps", not saved and v["save_steps"] != 500, 'needs save_strategy="steps", or leave it out'),
        (
            "save_steps",
            saved and v["save_steps"] <= 0,
            'would never save: set it to at least 1, or set save_strategy="no"',
        ),
        ("save_total_limit", not saved and v["save_total_limit"] is not None, "needs save_strategy: nothing is saved"),
        ("eval_steps", not evaluated and v["eval_steps"] is not None, 'needs eval_strategy="steps", or leave it out'),
        ("eval_steps", (v["eval_steps"] or 0) < 0, "must be at least 1"),
        ("eval_delay", not evaluated and v["eval_delay"] != 0, 'needs eval_strategy="steps", or leave it out'),
        ("logging_steps", v["logging_steps"] <= 0, "must be at least 1"),
        (
            "lr_scheduler_kwargs",
            bool(v["lr_scheduler_kwargs"]) and v["lr_scheduler_type"] in ("constant", "constant_with_warmup"),
            f"lr_scheduler_type = {v['lr_scheduler_type']} takes none: leave it out, or set another schedule",
        ),
        (
            "optim_target_modules",
            bool(v["optim_target_modules"]) and not optimizer.startswith(_TARGETS),
            f"optim = {optimizer} takes none: leave it out, or use a galore or apollo optimizer",
        ),
        (
            "optim_args",
            bool(v["optim_args"]) and optimizer in _IGNORES_ARGS,
            f"optim = {optimizer} takes none: set adam_beta1, adam_beta2, adam_epsilon and weight_decay instead",
        ),
        (
            "gradient_checkpointing_kwargs",
            bool(old) and not checkpointing,
            "needs gradient_checkpointing=True, or leave it out",
        ),
        (
            "activation_checkpointing_kwargs",
            bool(new) and not checkpointing,
            "needs gradient_checkpointing=True, or leave it out",
        ),
        (
            "gradient_checkpointing_kwargs",
            old is not None and new is not None and old != new,
            f"differs from activation_checkpointing_kwargs = {new!r}, its newer name: set one of them",
        ),
        (
            "fsdp_config",
            bool(v["fsdp_config"]) and not v["fsdp"] and _is_fsdp2(v["fsdp_config"]),
            "needs fsdp=True, or leave it out",
        ),
        (
            "hub_strategy",
            v["hub_strategy"] == "end" and not v["push_to_hub"],
            "needs push_to_hub=True, or leave it out",
        ),
        ("hub_always_push", v["hub_always_push"] and not v["push_to_hub"], "needs push_to_hub=True, or leave it out"),
        (
            "hub_always_push",
            v["hub_always_push"] and v["push_to_hub"] and not saved,
            'needs save_strategy="steps": it is about pushes of checkpoints',
        ),
    ]
    for key, default in (
        ("project", "huggingface"),
        ("trackio_space_id", None),
        ("trackio_bucket_id", None),
        ("trackio_static_space_id", None),
    ):
        found.append(
            (key, not trackio and v.get(key, default) != default, 'needs report_to="trackio", or leave it out')
        )
    return found


def read_problems(accelerator_config: Any, fsdp_config: Any) -> list[Problem]:
    """What must be refused in configurations that may have been given as files, once transformers has read them."""
    found: list[Problem] = []
    if not _is_fsdp2(fsdp_config):
        found.append(("fsdp_config", fsdp_config, ARGUMENTS["fsdp_config"].why))
    for key, default in _ACCELERATOR_DEFAULTS.items():
        value = getattr(accelerator_config, key, default)
        if value != default:
            found.append((f"accelerator_config.{key}", value, _LOADER))
    for key, value in (getattr(accelerator_config, "gradient_accumulation_kwargs", None) or {}).items():
        if key != "sync_each_batch" and (key, value) != ("num_steps", 1):
            message = "use gradient_accumulation_steps; only sync_each_batch may be set here"
            found.append((f"accelerator_config.gradient_accumulation_kwargs.{key}", value, message))
    return found


def remarks(v: Mapping[str, Any], default: Mapping[str, Any]) -> list[Problem]:
    """What is accepted, but has no effect or not the one that it seems to have."""
    found = [
        (key, v[key], argument.why)
        for key, argument in ARGUMENTS.items()
        if key in v and argument.treatment == "warned" and not argument.accepted(v[key])
    ]
    if str(v["optim"]).startswith(_NOT_ADAM):
        for key in _ADAM:
            if v[key] != default[key]:
                found.append((key, v[key], f"is not used by optim = {v['optim']}; leave it out, or use an Adam"))
    if v["run_name"] is not None and v["report_to"] in ("none", [], ["none"], None):
        found.append(("run_name", v["run_name"], "is not used without an integration in report_to"))
    return found


def device_problems(gpus: int) -> list[Problem]:
    """What must be refused where this one process would train on so many `gpus`."""
    if gpus <= 1:
        return []
    message = (
        "GPUs in one process would be used by DataParallel, which splits a packed row: start one process per GPU with "
        f"torchrun --nproc-per-node {gpus} your_script.py, or show it one GPU with CUDA_VISIBLE_DEVICES=0"
    )
    return [("n_gpu", gpus, message)]


def version_problems(version: str) -> list[Problem]:
    """What is wrong with the installed `version` of transformers."""
    if tuple(int(part) for part in version.split(".")[:2]) >= OLDEST:
        return []
    return [("transformers", version, f"is too old: pip install -U 'transformers>={'.'.join(map(str, OLDEST))}'")]


def launch_problems(environment: Mapping[str, str]) -> list[Problem]:
    """What must be refused in how accelerate's launcher started the process."""
    key = "ACCELERATE_USE_DEEPSPEED"
    value = environment.get(key, "false")
    on = value.lower() in ("1", "true", "yes", "y", "t", "on")
    return [(key, value, ARGUMENTS["deepspeed"].why)] if on else []
