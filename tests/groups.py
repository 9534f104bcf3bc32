"""Groups of rollouts for tests."""

from typing import Any

import numpy as np

from slipstream.rollout.sequences import build_sequences
from slipstream.rollout.types import Rollout, RolloutGroup, TurnRecord


def make_rollout(prompt: list[int], *outputs: list[int], version: int = 0, **changes: Any) -> Rollout:
    """A rollout of one turn per output, each appended to what went before."""
    turns, held = [], list(prompt)
    for output in outputs:
        turns.append(TurnRecord(list(held), output, [-0.5] * len(output), output_versions=[version] * len(output)))
        held += output
    return Rollout([{"role": "assistant", "content": str(outputs)}], [i for o in outputs for i in o], turns, **changes)


def make_group(
    count: int = 0,
    rollouts: list[Rollout | None] | None = None,
    rewards: list[float] | None = None,
    **changes: Any,
) -> RolloutGroup:
    """A group of `count` empty rollouts, or of those given."""
    members = rollouts if rollouts is not None else [None] * count
    count = len(members)
    fields: dict[str, Any] = {
        "prompts": [[{"role": "user", "content": "?"}]] * count,
        "reward_kwargs": {},
        "completions": [r.completion if r else [] for r in members],
        "completions_ids": [r.completion_ids if r else [] for r in members],
        "completions_sequences": [build_sequences(r.turns) if r else [] for r in members],
        "tool_call_counts": [0] * count,
        "tool_failure_counts": [0] * count,
        "model_version": 0,
        "group_id": 17,
        "row_index": 3,
        "env_rewards": [None] * count,
        "rollout_rewards": [None] * count,
        "rewards": None if rewards is None else np.array(rewards, dtype=float),
    }
    return RolloutGroup(**(fields | changes))
