"""`AsyncGRPOConfig`: transformers' `TrainingArguments` with the fields and defaults of asynchronous GRPO.

The algorithm's defaults are those of `slipstream.run_config.TrainerSection`, and stand only there.
"""

import dataclasses
import math
import os
import typing
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import transformers
from annotated_types import Ge, Gt, Le, Lt
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from slipstream import inherited_arguments as inherited
from slipstream.config_rules import Impossible, Problem, contradictions, remarks
from slipstream.run_config import ModelSection
from slipstream.tracking import report_problems
from slipstream.trainer_section import TrainerSection

# fields whose bounds are others than those of a configuration file: fractions, and all that transformers takes
_WIDER = ("logging_steps", "save_steps", "eval_steps", "lr_scheduler_type", "report_to")
_FRACTIONS = ("warmup_steps",)  # whole numbers in a configuration file; here a part of max_steps, too
_ENDLESS = ("max_grad_norm", "epsilon_high", "vllm_importance_sampling_clip_max")  # infinity is "no upper bound"
_BOUNDS: dict[type, tuple[str, str, Any]] = {
    Ge: ("ge", "at least", lambda value, bound: value >= bound),
    Gt: ("gt", "above", lambda value, bound: value > bound),
    Le: ("le", "at most", lambda value, bound: value <= bound),
    Lt: ("lt", "below", lambda value, bound: value < bound),
}


def _default(name: str, section: type = TrainerSection) -> Any:
    return section.model_fields[name].default  # type: ignore[attr-defined]


def _help(name: str, section: type = TrainerSection) -> dict[str, str]:
    return {"help": section.model_fields[name].description}  # type: ignore[attr-defined]


def _field(name: str, section: type = TrainerSection) -> Any:
    return field(default=_default(name, section), metadata=_help(name, section))


@dataclass
class AsyncGRPOConfig(TrainingArguments):
    """Configuration of `AsyncGRPOTrainer`.

    All fields of `TrainingArguments`, some with other defaults, and those below. Raises ValueError on combinations that
    cannot work, naming the field and the way out.
    """

    # other defaults than TrainingArguments
    learning_rate: float = _field("learning_rate")
    lr_scheduler_type: str = _field("lr_scheduler_type")
    logging_steps: float = _field("logging_steps")
    gradient_checkpointing: bool = _field("gradient_checkpointing")
    bf16: bool | None = _field("bf16")  # type: ignore[assignment]  # None until __post_init__
    ignore_data_skip: bool = field(
        default=True, metadata={"help": "Always true: a live rollout queue cannot be replayed by skipping batches."}
    )
    report_to: str | list[str] | None = field(default="none", metadata={"help": "Integrations to log to."})
    optim: OptimizerNames | str = field(default="adamw_torch_fused", metadata={"help": "The optimizer."})

    # the model
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments of from_pretrained when the model is given by name."}
    )
    dtype: str = _field("dtype", ModelSection)
    trust_remote_code: bool = _field("trust_remote_code", ModelSection)
    router_aux_loss_coef: float | None = _field("router_aux_loss_coef")

    # generation
    num_generations: int = _field("num_generations")
    max_completion_length: int = _field("max_completion_length")
    temperature: float = _field("temperature")
    top_p: float = _field("top_p")
    top_k: int = _field("top_k")
    min_p: float | None = _field("min_p")
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Additional keyword arguments of apply_chat_template."}
    )
    max_tool_calling_iterations: int | None = field(
        default=None, metadata={"help": "Most tool-calling turns of a rollout; None: no limit."}
    )

    # the server
    vllm_server_base_url: str = field(
        default="http://localhost:8000", metadata={"help": "Base URL of the vLLM server that generates."}
    )
    vllm_server_timeout: float = _field("vllm_server_timeout")
    vllm_server_token_file: str | None = field(
        default=None, metadata={"help": "File with the token that the server asks for; None: it asks for none."}
    )

    # the loss
    epsilon: float = _field("epsilon")
    epsilon_high: float | None = _field("epsilon_high")
    score_centering: bool = _field("score_centering")
    vllm_importance_sampling_clip_min: float = _field("vllm_importance_sampling_clip_min")
    vllm_importance_sampling_clip_max: float = _field("vllm_importance_sampling_clip_max")
    num_sampler_logprobs: int = _field("num_sampler_logprobs")

    # the asynchronous pipeline
    token_budget: int | None = _field("token_budget")
    max_concurrent_rollouts: int = _field("max_concurrent_rollouts")
    max_staleness: int = _field("max_staleness")
    weight_sync_steps: int = _field("weight_sync_steps")
    rollout_worker_timeout: float = _field("rollout_worker_timeout")
    rollout_worker_restarts: int = _field("rollout_worker_restarts")
    reward_timeout: float = _field("reward_timeout")

    # logging
    log_completions: bool = _field("log_completions")
    num_completions_to_print: int | None = _field("num_completions_to_print")
    record_samples: bool = _field("record_samples")

    # where a run folder is
    run_dir: str | None = field(default=None, metadata={"help": "The run folder; None outside a run."})
    attempt: int = field(default=1, metadata={"help": "Attempt of the run, counted from 1."})
    server_patience: float | None = field(
        default=None,
        metadata={"help": "Most seconds without any server in a run; None: as vllm_server_timeout."},
    )

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [  # type: ignore[misc]
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "chat_template_kwargs",
    ]

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = not self.fp16
        if self.output_dir is None:
            self.output_dir = "trainer_output"
        self._check()
        # transformers 5.2x renamed the field; the specification's name keeps working, without its warning
        renamed = any(f.name == "activation_checkpointing" for f in dataclasses.fields(TrainingArguments))
        if renamed and self.activation_checkpointing is None:
            self.activation_checkpointing = self.gradient_checkpointing
            self.activation_checkpointing_kwargs = (
                self.activation_checkpointing_kwargs or self.gradient_checkpointing_kwargs
            )
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False
        super().__post_init__()
        if self.epsilon_high is None:
            self.epsilon_high = self.epsilon
        _refuse(
            [
                *inherited.read_problems(self.accelerator_config, self.fsdp_config),
                *inherited.device_problems(self.__dict__.get("_n_gpu", 0)),
            ]
        )

    def _check(self) -> None:
        """Refuse what cannot work, and warn about what has no effect; before transformers changes any value."""
        values = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        default = {f.name: _plain(f.default) for f in dataclasses.fields(self)}
        problems = [
            *inherited.version_problems(transformers.__version__),
            *_own_problems(values),
            *_bound_problems(values),
            *inherited.problems(values),
            *inherited.launch_problems(os.environ),
            *_report_problems(values["report_to"]),
        ]
        faulty = {key for key, _, _ in problems}
        comparable = {key: default[key] if key in faulty else value for key, value in values.items()}
        problems += [p for p in contradictions(comparable) if p[0] not in faulty]
        _refuse(problems)
        for key, value, message in [*remarks(values, default), *inherited.remarks(values, default)]:
            warnings.warn(f"{key} = {value!r}: {message}", stacklevel=4)


def _plain(value: Any) -> Any:
    """An enumeration's value; anything else as it is."""
    return getattr(value, "value", value)


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise Impossible(problems)


def _own_problems(values: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with fields that a configuration file does not have."""
    found: list[Problem] = []
    turns, url = values["max_tool_calling_iterations"], str(values["vllm_server_base_url"])
    if turns is not None and (not isinstance(turns, int) or turns < 1):
        found.append(("max_tool_calling_iterations", turns, "must be at least 1, or None for no limit"))
    if not url.startswith(("http://", "https://")):
        found.append(("vllm_server_base_url", url, 'must start with http:// or https://, like "http://localhost:8000"'))
    return found


def _report_problems(names: Any) -> list[Problem]:
    """Integrations that are not known or not installed."""
    if not isinstance(names, str | list | tuple | None):
        return [("report_to", names, 'must be a name or a list of names, like ["tensorboard"], or "none"')]
    return [("report_to", names, text) for text in report_problems([names] if isinstance(names, str) else names or ())]


def _wrong_kind(name: str, value: Any, annotation: Any) -> str:
    """What a value of this annotation must be, where it is not."""
    kinds = typing.get_args(annotation) or (annotation,)
    if bool in kinds:
        return "" if isinstance(value, bool) else "true or false"
    if int in kinds and name not in _FRACTIONS:
        return "" if isinstance(value, int) and not isinstance(value, bool) else "a whole number"
    if int in kinds or float in kinds:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return "" if is_number and (math.isfinite(value) or name in _ENDLESS) else "a number that is finite"
    return ""


def _bound_problems(values: Mapping[str, Any]) -> list[Problem]:
    """Values outside the bounds that stand at the fields of the configuration file's sections."""
    found: list[Problem] = []
    for section, names in ((TrainerSection, TrainerSection.model_fields), (ModelSection, ("dtype",))):
        for name in names:
            value, info = values.get(name), section.model_fields[name]
            if name in _WIDER or (value is None and type(None) in typing.get_args(info.annotation)):
                continue
            choices = typing.get_args(info.annotation) if typing.get_origin(info.annotation) is typing.Literal else ()
            if choices:
                if value not in choices:
                    found.append((name, value, f"must be one of {', '.join(map(repr, choices))}"))
                continue
            bounds = [(*_BOUNDS[type(m)], m) for m in info.metadata if type(m) in _BOUNDS]
            if wrong := _wrong_kind(name, value, info.annotation):
                found.append((name, value, f"must be {wrong}; {info.description}"))
            elif not all(holds(value, getattr(m, attribute)) for attribute, _, holds, m in bounds):
                words = " and ".join(f"{word} {getattr(m, attribute)}" for attribute, word, _, m in bounds)
                found.append((name, value, f"must be {words}; {info.description}"))
    return found
