"""Metrics of a finished group. Pure: the group in, observations (name, value, weight) out."""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.algorithm.advantages import carries_signal
from slipstream.rollout.types import Observation, Rollout, RolloutGroup


def trained_length(rollout: Rollout) -> int:
    """Tokens that the model generated, without those of tools."""
    return sum(len(turn.output_ids) if turn.output_mask is None else sum(turn.output_mask) for turn in rollout.turns)


def terminated(rollout: Rollout, eos_token_ids: Sequence[int]) -> bool:
    """Whether the last turn ends with an EOS token."""
    return (
        bool(rollout.turns) and bool(rollout.turns[-1].output_ids) and rollout.turns[-1].output_ids[-1] in eos_token_ids
    )


def duplicates(rollouts: Sequence[Rollout]) -> int:
    """Rollouts that repeat an earlier one of their group token by token, over all turns."""
    seen: set[tuple[tuple[int, ...], ...]] = set()
    repeated = 0
    for rollout in rollouts:
        key = tuple(tuple(turn.output_ids) for turn in rollout.turns)
        repeated += key in seen
        seen.add(key)
    return repeated


def turn_changes(rollout: Rollout) -> list[tuple[bool, int]]:
    """For each change of turn: whether its prompt left the tokens held so far (a fork), and how many of those it rendered
    anew."""
    found: list[tuple[bool, int]] = []
    for before, after in itertools.pairwise(rollout.turns):
        held = [*before.prompt_ids, *before.output_ids]
        shared = next((i for i, (a, b) in enumerate(zip(held, after.prompt_ids, strict=False)) if a != b), None)
        kept = min(len(held), len(after.prompt_ids)) if shared is None else shared
        found.append((kept < len(held), len(held) - kept))
    return found


def fork_observations(rollouts: Sequence[Rollout]) -> list[Observation]:
    """`rollout/fork_frac` and `rollout/drift_tokens_*` over all changes of turn; nothing where there was none."""
    changes = [change for rollout in rollouts for change in turn_changes(rollout)]
    if not changes:
        return []
    drifts = [drift for _, drift in changes]
    return [
        ("rollout/fork_frac", sum(forked for forked, _ in changes) / len(changes), len(changes)),
        ("rollout/drift_tokens_mean", sum(drifts) / len(changes), len(changes)),
        ("rollout/drift_tokens_max", max(drifts), 1),
    ]


def length_observations(rollouts: Sequence[Rollout], eos_token_ids: Sequence[int]) -> list[Observation]:
    """`completions/*` of the rollouts that have any token."""
    found: list[Observation] = []
    lengths = [trained_length(rollout) for rollout in rollouts]
    ended = [terminated(rollout, eos_token_ids) for rollout in rollouts]
    finished = [length for length, end in zip(lengths, ended, strict=True) if end]
    for prefix, values in (("", lengths), ("terminated_", finished)):
        if values:
            found.append((f"completions/mean_{prefix}length", float(np.mean(values)), len(values)))
            found.append((f"completions/min_{prefix}length", min(values), 1))
            found.append((f"completions/max_{prefix}length", max(values), 1))
    if rollouts:
        found.append(("completions/clipped_ratio", 1 - sum(ended) / len(ended), len(ended)))
        found.append(("completions/duplicate_frac", duplicates(rollouts) / len(rollouts), len(rollouts)))
    return found


def reward_observations(rewards: NDArray[np.float64]) -> list[Observation]:
    """`reward`, `reward_dropped`, `frac_reward_zero_std` of one group; `(num_generations,)`, NaN where unscored."""
    scored = rewards[~np.isnan(rewards)]
    kept = carries_signal(rewards)
    found: list[Observation] = [("frac_reward_zero_std", 0.0 if kept else 1.0, 1)]
    if len(scored):
        found.append(("reward", float(scored.mean()), len(scored)))
        found += [("reward_seen_min", float(scored.min()), 1), ("reward_seen_max", float(scored.max()), 1)]
        if not kept:
            found.append(("reward_dropped", float(scored.mean()), 1))
    return found


def group_observations(
    group: RolloutGroup, rollouts: Sequence[Rollout | None], eos_token_ids: Sequence[int]
) -> list[Observation]:
    """Everything that is measured on a scored group, whether it is trained or not."""
    assert group.rewards is not None
    present = [rollout for rollout in rollouts if rollout is not None]
    found = [*reward_observations(group.rewards), *length_observations(present, eos_token_ids)]
    if present:
        turns = [len(rollout.turns) for rollout in present]
        made = sum(len(sequences) for sequences in group.completions_sequences)
        found.append(("rollout/turns_mean", float(np.mean(turns)), len(turns)))
        found.append(("rollout/turns_max", max(turns), 1))
        found.append(("rollout/samples_per_rollout", made / len(present), len(present)))
        found += fork_observations(present)
    return found
