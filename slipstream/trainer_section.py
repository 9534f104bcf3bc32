"""The trainer's section of a run's configuration, from which `slipstream.config.AsyncGRPOConfig` takes its defaults."""

from typing import Literal

from pydantic import Field, model_validator

from slipstream.config_rules import Impossible, contradictions
from slipstream.config_section import MOST_SECONDS, Section


class TrainerSection(Section):
    """The algorithm and the optimizer. Names and defaults are those of `AsyncGRPOConfig`."""

    # --- duration and optimizer
    max_steps: int = Field(-1, title="Steps", ge=-1, description="Optimizer steps; -1: the number of epochs decides.")
    num_train_epochs: float = Field(3.0, title="Epochs", gt=0, description="Passes over the prompts.")
    learning_rate: float = Field(1e-6, title="Learning rate", gt=0, description="Peak learning rate of AdamW.")
    lr_scheduler_type: Literal[
        "constant",
        "constant_with_warmup",
        "cosine",
        "cosine_with_restarts",
        "inverse_sqrt",
        "linear",
        "polynomial",
    ] = Field(
        "constant",
        title="Learning rate schedule",
        description="Name of a transformers schedule. One that decays needs an explicit number of steps.",
    )
    warmup_steps: int = Field(0, title="Warm-up", ge=0, description="Steps of linear warm-up.")
    weight_decay: float = Field(0.0, title="Weight decay", ge=0, description="AdamW's decoupled weight decay.")
    adam_beta1: float = Field(0.9, title="Adam beta 1", ge=0, lt=1, description="Decay of the first moment.")
    adam_beta2: float = Field(0.999, title="Adam beta 2", ge=0, lt=1, description="Decay of the second moment.")
    max_grad_norm: float = Field(
        1.0, title="Gradient clipping", ge=0, description="Largest gradient norm; 0: no clipping."
    )
    gradient_accumulation_steps: int = Field(
        1, title="Accumulation", ge=1, description="Micro-batches per optimizer step; each is one row per process."
    )
    bf16: bool | None = Field(
        None, title="bfloat16 mixed precision", description="Empty: on where a GPU is, off on CPU."
    )
    fp16: bool = Field(False, title="float16 mixed precision", description="Use float16 autocast.")
    gradient_checkpointing: bool = Field(
        True, title="Gradient checkpointing", description="Recompute activations in the backward pass to save memory."
    )
    seed: int = Field(42, title="Seed", ge=0, description="Seed of prompt order, sampling and initialisation.")

    # --- generation
    num_generations: int = Field(8, title="Generations per prompt", ge=2, description="Rollouts in a group.")
    max_completion_length: int = Field(
        2048, title="Completion length", ge=1, description="Most tokens that one request may generate."
    )
    temperature: float = Field(
        1.0, title="Temperature", ge=0.01, description="Sampling temperature. Below 0.01 the ratio does not exist."
    )
    top_p: float = Field(1.0, title="Top-p", gt=0, le=1, description="Nucleus sampling; 1: off.")
    top_k: int = Field(0, title="Top-k", ge=0, description="Sample among the k likeliest tokens; 0: off.")
    min_p: float | None = Field(
        None, title="Min-p", ge=0, le=1, description="Least probability relative to the likeliest token; empty: off."
    )

    # --- asynchrony
    max_staleness: int = Field(
        4,
        title="Staleness bound",
        ge=0,
        description="Weight updates that a sample may lag behind before it is dropped.",
    )
    weight_sync_steps: int = Field(
        1, title="Steps between weight syncs", ge=1, description="Optimizer steps between deliveries to the server."
    )
    token_budget: int | None = Field(
        None,
        title="Token budget",
        ge=1,
        description="Most tokens in a row (one process's part of a micro-batch). "
        "Empty: the server's maximum sequence length.",
    )
    max_concurrent_rollouts: int = Field(
        512, title="Concurrent rollouts", ge=1, description="Most rollouts in flight at once."
    )
    rollout_worker_timeout: float = Field(
        300.0,
        title="Rollout worker timeout",
        gt=0,
        le=MOST_SECONDS,
        description="Seconds without a heartbeat until it counts as hung.",
    )
    rollout_worker_restarts: int = Field(
        3,
        title="Rollout worker restarts",
        ge=0,
        description="How often a rollout process that died or hung is started again without a new group in between, "
        "before the learner fails.",
    )
    reward_timeout: float = Field(
        300.0,
        title="Reward timeout",
        gt=0,
        le=MOST_SECONDS,
        description="Seconds for one call of a reward function; one that takes longer ends the run.",
    )
    vllm_server_timeout: float = Field(
        1800.0,
        title="Server timeout",
        gt=0,
        le=MOST_SECONDS,
        description="Seconds for one call to the server, start-up included, and least seconds without any server "
        "until the learner fails; while a supervisor may start one again it waits longer than recovery.heartbeat_timeout, "
        "recovery.backoff_max, recovery.max_idle_gpu_minutes and server.startup_timeout together.",
    )

    # --- loss
    epsilon: float = Field(0.2, title="Epsilon", gt=0, lt=1, description="Lower clip of the ratio.")
    epsilon_high: float | None = Field(
        None, title="Upper epsilon", gt=0, description="Upper clip of the ratio; empty: the same as epsilon."
    )
    score_centering: bool = Field(
        True,
        title="Score centering",
        description="Subtract the score's expectation under the sampler (arXiv 2609.20807).",
    )
    vllm_importance_sampling_clip_min: float = Field(
        0.5, title="Smallest ratio", ge=0, le=1, description="Tokens with a smaller importance ratio are masked."
    )
    vllm_importance_sampling_clip_max: float = Field(
        5.0, title="Largest ratio", ge=1, description="Tokens with a larger importance ratio are masked."
    )
    router_aux_loss_coef: float | None = Field(
        None,
        title="Router loss",
        ge=0,
        description="Weight of the load-balancing loss of a mixture of experts; empty: the model's own, 0: off.",
    )
    num_sampler_logprobs: int = Field(
        8,
        title="Sampler log-probabilities",
        ge=0,
        description="Likeliest tokens per position used for score centering, which needs at least 1.",
    )

    # --- logging and checkpoints
    logging_steps: int = Field(1, title="Logging interval", ge=1, description="Optimizer steps between log lines.")
    save_steps: int = Field(500, title="Checkpoint interval", ge=1, description="Optimizer steps between checkpoints.")
    save_total_limit: int | None = Field(
        None, title="Checkpoints kept", ge=1, description="Older complete checkpoints are deleted; empty: keep all."
    )
    eval_steps: int | None = Field(
        None,
        title="Evaluation interval",
        ge=1,
        description="Optimizer steps between evaluations; empty: only before the first and after the last step.",
    )
    report_to: list[str] = Field(
        default_factory=list,
        title="Report to",
        examples=[["tensorboard"]],
        description="Integrations that get the metrics too: tensorboard, wandb, trackio (`pip install "
        "'slipstream-rl[tracking]'` where the learner runs), or others of transformers. Their files lie in the run's "
        "folder, and resumed attempts go on in the same curves. A key like WANDB_API_KEY reaches jobs only where the "
        "cluster profile's keep_environment names it.",
    )
    log_completions: bool = Field(
        False, title="Log completions", description="Print sample completions, and write them to the records."
    )
    num_completions_to_print: int | None = Field(
        None,
        title="Completions printed",
        ge=1,
        description="How many to print when completions are logged; empty: all.",
    )
    record_samples: bool = Field(
        False,
        title="Record samples",
        description="Write every group of samples to samples.pickle of the records, so that the training can be replayed.",
    )

    @model_validator(mode="after")
    def _possible(self) -> "TrainerSection":
        if problems := contradictions({name: getattr(self, name) for name in type(self).model_fields}):
            raise Impossible(problems)
        return self
