"""What becomes of a scored group."""

import math

import numpy as np
import pytest

from slipstream.rollout import types as t
from slipstream.rollout.outcome import completions_table, split_group
from tests.groups import make_group, make_rollout

NAN = math.nan


def split(rollouts, rewards, advantages=None, by_function=None):
    group = make_group(rollouts=rollouts, rewards=rewards)
    advantages = np.array(advantages if advantages is not None else np.arange(len(rollouts)) + 1.0)
    by_function = np.array([rewards] if by_function is None else by_function, dtype=float)
    return split_group(group, rollouts, advantages, by_function, [f"r{k}" for k in range(len(by_function))])


def four():
    return [make_rollout([1, 2], [3 + i, 9]) for i in range(4)]


def test_a_kept_group_is_filled_in():
    rollouts = four()
    by_function = [[0, 1, 0, 1], [0.5, NAN, 0.5, 0.5]]
    samples, dropped = split(rollouts, [0.5, 1, 0.5, 1.5], [-1, 0.5, -1, 1.5], by_function)
    assert not dropped
    assert [s.advantage for s in samples] == [-1, 0.5, -1, 1.5]
    assert [s.rollout_id for s in samples] == [r.rollout_id for r in rollouts]
    assert {s.number for s in samples} == {17}
    assert [s.reward for s in samples] == [0.5, 1, 0.5, 1.5]
    assert {s.group_std for s in samples} == {float(np.std([0.5, 1, 0.5, 1.5]))}
    assert samples[0].rewards_by_name == {"r0": (0, 0.5), "r1": (0.5, 0.0)}
    assert math.isnan(samples[1].rewards_by_name["r1"][0])
    assert samples[1].rewards_by_name["r1"][1] == 0.0, "the spread is over the scored ones"


def test_every_sample_of_a_forked_rollout_has_its_advantage():
    forked = make_rollout([1], [2, 3])
    forked.turns.append(make_rollout([1, 2, 8], [4]).turns[0])
    samples, dropped = split([forked, make_rollout([1], [5])], [1.0, 0.0], [0.75, -0.75])
    assert [s.advantage for s in samples] == [0.75, 0.75, -0.75]
    assert not dropped


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([1.0, 1, 1, 1], t.ZERO_STD),
        ([NAN, 2.0, 2.0, NAN], t.ZERO_STD),
        ([NAN, 1.0, NAN, NAN], t.UNSCORED),
        ([NAN] * 4, t.UNSCORED),
    ],
)
def test_a_group_without_signal_is_dropped_whatever_its_advantages(rewards, reason):
    samples, dropped = split(four(), rewards, [5.0, -5, 5, -5])
    assert samples == []
    assert dropped == {reason: 4}


def test_an_unscored_rollout_of_a_kept_group_is_trained_with_advantage_zero():
    samples, dropped = split(four(), [NAN, 0.0, 1.0, 1.0], [9.0, -1, 0.5, 0.5])
    assert [s.advantage for s in samples] == [0, -1, 0.5, 0.5]
    assert not dropped


def test_failed_empty_and_foreign_rollouts_are_counted_by_reason():
    rollouts = [None, make_rollout([1], []), make_rollout([1], [2], version=-1), make_rollout([1], [2, 3])]
    samples, dropped = split(rollouts, [NAN, 0.0, 0.0, 1.0])
    assert dropped == {t.FAILED: 1, t.EMPTY_COMPLETION: 1, t.FOREIGN: 1}
    assert [s.rollout_id for s in samples] == [rollouts[3].rollout_id]


def test_one_foreign_token_is_enough():
    """It has the lowest version, so the sample has no staleness."""
    mixed = make_rollout([1], [2, 3], version=4)
    mixed.turns[0].output_versions = [4, -1]
    _, dropped = split([mixed, make_rollout([1], [5], version=4)], [1.0, 0.0])
    assert dropped == {t.FOREIGN: 1}


def test_failures_in_a_dropped_group_stay_failures():
    _, dropped = split([None, *four()[:3]], [NAN, 1.0, 1.0, 1.0])
    assert dropped == {t.FAILED: 1, t.ZERO_STD: 3}


def test_the_table_has_a_row_for_each_rollout_that_there_is():
    rollouts = [None, *four()[:2]]
    group = make_group(rollouts=rollouts, rewards=[NAN, NAN, 1.0], model_version=6)
    rows = completions_table(group, rollouts, np.array([0.0, 0.0, 1.5]))
    assert [(r["reward"], r["advantage"], r["version"], r["prompt_number"]) for r in rows] == [
        (None, 0.0, 6, 17),
        (1.0, 1.5, 6, 17),
    ]
    assert rows[1]["completion"] == rollouts[2].completion
