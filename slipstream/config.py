"""`AsyncGRPOConfig`: transformers' `TrainingArguments` with the fields and defaults of asynchronous GRPO.

The algorithm's defaults are those of `slipstream.run_config.TrainerSection`, and stand only there.
"""

import dataclasses
import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import TrainingArguments

from slipstream.run_config import ModelSection, TrainerSection


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
    optim: str = field(default="adamw_torch_fused", metadata={"help": "The optimizer."})

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
    reward_timeout: float = _field("reward_timeout")

    # logging
    log_completions: bool = _field("log_completions")
    num_completions_to_print: int | None = _field("num_completions_to_print")
    record_samples: bool = _field("record_samples")

    # where a run folder is
    run_dir: str | None = field(default=None, metadata={"help": "The run folder; None outside a run."})
    attempt: int = field(default=1, metadata={"help": "Attempt of the run, counted from 1."})

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
        # transformers 5.2x renamed the field; the specification's name keeps working, without its warning
        renamed = any(f.name == "activation_checkpointing" for f in dataclasses.fields(TrainingArguments))
        if renamed and self.activation_checkpointing is None:
            self.activation_checkpointing = self.gradient_checkpointing
        if self.ddp_find_unused_parameters is None:
            self.ddp_find_unused_parameters = False
        if self.deepspeed:  # before transformers asks for its package
            raise ValueError("deepspeed: DeepSpeed is not supported; use fsdp (FSDP2)")
        super().__post_init__()
        if self.epsilon_high is None:
            self.epsilon_high = self.epsilon
        self._check()

    def _check(self) -> None:
        def refuse(condition: bool, message: str) -> None:
            if condition:
                raise ValueError(message)

        refuse(self.num_generations < 2, f"num_generations={self.num_generations}: a group needs at least 2")
        refuse(
            self.temperature < 0.01,
            f"temperature={self.temperature}: below 0.01 vLLM clamps it and there is no importance ratio; use 0.01 or more",
        )
        refuse(not 0 < self.top_p <= 1, f"top_p={self.top_p}: it must lie in (0, 1]")
        refuse(
            (self.top_p < 1 or bool(self.min_p)) and self.top_k <= 0,
            f"top_p={self.top_p}, min_p={self.min_p}: set top_k too (for example 512), the server bounds the candidate set by it",
        )
        for name in ("max_completion_length", "max_concurrent_rollouts", "token_budget"):
            value = getattr(self, name)
            refuse(value is not None and value < 1, f"{name}={value}: it must be 1 or more")
        refuse(
            self.score_centering and self.num_sampler_logprobs < 1,
            f"num_sampler_logprobs={self.num_sampler_logprobs}: score centering needs at least 1; or set score_centering=False",
        )
        refuse(self.top_k < 0, f"top_k={self.top_k}: it must be 0 (off) or more")
        refuse(self.min_p is not None and not 0 <= self.min_p <= 1, f"min_p={self.min_p}: it must lie in [0, 1]")
        refuse(not 0 < self.epsilon < 1, f"epsilon={self.epsilon}: it must lie between 0 and 1")
        refuse(self.epsilon_high <= 0, f"epsilon_high={self.epsilon_high}: it must be above 0")  # type: ignore[operator]
        refuse(
            self.router_aux_loss_coef is not None and self.router_aux_loss_coef < 0,
            f"router_aux_loss_coef={self.router_aux_loss_coef}: it must be 0 (off) or more",
        )
        refuse(self.max_staleness < 0, f"max_staleness={self.max_staleness}: it must be 0 or more")
        refuse(self.weight_sync_steps < 1, f"weight_sync_steps={self.weight_sync_steps}: it must be 1 or more")
        refuse(
            self.vllm_importance_sampling_clip_min > self.vllm_importance_sampling_clip_max,
            f"vllm_importance_sampling_clip_min={self.vllm_importance_sampling_clip_min} is above "
            f"vllm_importance_sampling_clip_max={self.vllm_importance_sampling_clip_max}",
        )
        refuse(self.use_liger_kernel, "use_liger_kernel=True is not supported: the loss is our own; set it to False")
        refuse(
            not self.ignore_data_skip,
            "ignore_data_skip=False: a live rollout queue cannot be replayed; the position is in rollout_state.json",
        )
        refuse(
            self.auto_find_batch_size, "auto_find_batch_size=True: rows are bounded by token_budget; lower that instead"
        )
        refuse(self.label_smoothing_factor != 0, "label_smoothing_factor is not used by this loss: set it to 0")
        refuse(
            self.train_sampling_strategy not in ("random", "sequential"),
            f"train_sampling_strategy={self.train_sampling_strategy!r}: prompts are visited 'random' or 'sequential'",
        )
        parallelism = self.parallelism_config
        for name in ("cp_size", "sp_size"):
            refuse(
                parallelism is not None and getattr(parallelism, name, 1) > 1,
                f"parallelism_config.{name} > 1: context and sequence parallelism are not supported; use data parallel ranks",
            )
        schedule = str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type))
        if schedule not in ("constant", "constant_with_warmup") and self.max_steps <= 0:
            warnings.warn(
                f"lr_scheduler_type={schedule} without max_steps: the number of steps is not known in "
                "advance, so the decay would never end; set max_steps",
                stacklevel=2,
            )
