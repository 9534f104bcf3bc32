"""What becomes of a scored group: samples to train and reasons for the rest. Pure."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.algorithm.advantages import carries_signal
from slipstream.packing.sample import Sample
from slipstream.rollout import types as t
from slipstream.rollout.types import Rollout, RolloutGroup


def reward_spread(values: NDArray[np.float64]) -> float:
    """Standard deviation of one function's rewards in a group, NaN where it scored nothing."""
    return math.nan if np.isnan(values).all() else float(np.nanstd(values))


def split_group(
    group: RolloutGroup,
    rollouts: Sequence[Rollout | None],
    advantages: NDArray[np.float64],
    by_function: NDArray[np.float64],
    names: Sequence[str],
) -> tuple[list[Sample], Counter[str]]:
    """The samples of a group to train, filled in, and how many were dropped for which reason.

    Args:
        group: with `rewards` set; `group_id` is the prompt's number.
        rollouts: None for one that failed.
        advantages: `(num_generations,)`.
        by_function: `(functions, num_generations)` rewards, NaN where unscored; `names` are the functions'.
    """
    assert group.rewards is not None
    rewards = group.rewards
    scored = rewards[~np.isnan(rewards)]
    kept = carries_signal(rewards)
    spread = {name: reward_spread(values) for name, values in zip(names, by_function, strict=True)}
    samples: list[Sample] = []
    dropped: Counter[str] = Counter()
    for i, rollout in enumerate(rollouts):
        if rollout is None:
            dropped[t.FAILED] += 1
        elif not kept:
            dropped[t.ZERO_STD if len(scored) >= 2 else t.UNSCORED] += 1
        elif not group.completions_sequences[i]:
            dropped[t.EMPTY_COMPLETION] += 1
        else:
            for sample in group.completions_sequences[i]:
                if sample.oldest_version < 0:
                    dropped[t.FOREIGN] += 1
                    continue
                sample.advantage = 0.0 if math.isnan(rewards[i]) else float(advantages[i])
                sample.number = group.group_id
                sample.rollout_id = rollout.rollout_id
                sample.reward = float(rewards[i])
                sample.group_std = float(scored.std())
                sample.rewards_by_name = {
                    name: (float(by_function[k, i]), spread[name]) for k, name in enumerate(names)
                }
                samples.append(sample)
    return samples, dropped


def completions_table(
    group: RolloutGroup, rollouts: Sequence[Rollout | None], advantages: NDArray[np.float64]
) -> list[dict[str, Any]]:
    """One row per rollout for the completions log."""
    assert group.rewards is not None
    return [
        {
            "prompt_number": group.group_id,
            "rollout_id": rollout.rollout_id,
            "version": group.model_version,
            "prompt": group.prompts[i],
            "completion": rollout.completion,
            "reward": None if math.isnan(group.rewards[i]) else float(group.rewards[i]),
            "advantage": float(advantages[i]),
        }
        for i, rollout in enumerate(rollouts)
        if rollout is not None
    ]
