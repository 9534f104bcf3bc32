"""What a rollout is made of, and what the rollout process tells the trainer."""

import uuid
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.packing.sample import Sample

Message = dict[str, Any]

# Why a sample or a whole prompt was not trained. A prompt is settled once all its samples have one of these or "trained".
TRAINED = "trained"
ZERO_STD = "zero_std"
UNSCORED = "unscored"
STALE = "stale"
OVERSIZE = "oversize"
OVERSIZE_PROMPT = "oversize_prompt"
FAILED = "failed"
FILTERED = "filtered"
EMPTY_COMPLETION = "empty"
FOREIGN = "foreign_version"


@dataclass
class TurnRecord:
    """One sampling request: the prompt sent and the tokens generated.

    Attributes:
        prompt_ids: token ids of the whole prompt of this turn.
        output_ids: token ids generated, the stop token included.
        output_log_probs: the sampler's log-probability of each.
        output_mask: 1 to train on the token, 0 to keep it as context; None trains on all.
        output_sampling_mask: candidate set of each token under top-k / top-p / min-p; None is the whole vocabulary.
        output_sampler_logprobs: the sampler's likeliest tokens and their log-probabilities, for score centering.
        output_versions: policy version that produced each token; None where the server cannot tell.
        finish_reason: the server's: "stop" or "length".
    """

    prompt_ids: list[int]
    output_ids: list[int]
    output_log_probs: list[float] = field(default_factory=list)
    output_mask: list[int] | None = None
    output_sampling_mask: list[list[int]] | None = None
    output_sampler_logprobs: list[dict[int, float]] | None = None
    output_versions: list[int] | None = None
    finish_reason: str | None = None


@dataclass
class Rollout:
    """A finished rollout, as returned by `AsyncRolloutLoop.generate_one`.

    Attributes:
        completion: messages generated after the prompt.
        completion_ids: token ids of the whole completion.
        turns: the sampling requests, in order; the training sequences are built from them.
        reward: computed during generation; added to the reward functions'.
        rollout_id: identifies the rollout in records.
    """

    completion: list[Message]
    completion_ids: list[int]
    turns: list[TurnRecord]
    tool_call_count: int = 0
    tool_failure_count: int = 0
    reward: float | None = None
    rollout_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass
class RolloutGroup:
    """The `num_generations` rollouts of one prompt; each list has one entry per rollout.

    Attributes:
        model_version: policy version when the group's first rollout started.
        row_index: of the prompt in the dataset.
        rewards: `(num_generations,)`, the sum over all sources, NaN where none scored the rollout. Set before
            `compute_advantages` is called.
    """

    prompts: list[list[Message]]
    reward_kwargs: dict[str, list[Any]]
    completions: list[list[Message]]
    completions_ids: list[list[int]]
    completions_sequences: list[list[Sample]]
    tool_call_counts: list[int]
    tool_failure_counts: list[int]
    model_version: int
    group_id: int
    row_index: int
    env_rewards: list[tuple[type, float] | None]
    rollout_rewards: list[float | None]
    queued_at: float = 0.0
    rewards: np.ndarray | None = None


Observation = tuple[str, float, float]  # metric name, value, weight


@dataclass
class GroupResult:
    """Rollout process → trainer: what became of one prompt.

    Attributes:
        number: `epoch * len(dataset) + position`.
        samples: to be trained; may be empty.
        dropped: samples (or, for a prompt without any, the one prompt) by reason.
        cost: tokens that this group holds of the allowance: the cost of its samples.
        size: tokens of all that was generated for it, dropped samples too.
        observations: metrics measured on the group.
        table: rows for the completions log.
    """

    number: int
    epoch: int
    position: int
    row_index: int
    samples: list[Sample]
    dropped: dict[str, int]
    cost: int = 0
    size: int = 0
    observations: list[Observation] = field(default_factory=list)
    table: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class EndOfData:
    """Rollout process → trainer: every prompt of every epoch was handed over; nothing more will come.

    `observations`: what was measured since the loop's last report.
    """

    groups: int
    observations: list[Observation] = field(default_factory=list, compare=False)


@dataclass
class EvalResult:
    """Rollout process → trainer: the answer to an evaluation request."""

    request: int
    metrics: dict[str, float]
    table: list[dict[str, Any]] = field(default_factory=list)
