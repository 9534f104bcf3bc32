"""Metrics of a finished group, by hand."""

import math

import numpy as np
import pytest

from slipstream.metrics.window import Window
from slipstream.rollout.observe import duplicates, group_observations, terminated, trained_length
from tests.groups import make_group, make_rollout

EOS = [9, 8]
NAN = math.nan


def reduced(rollouts, rewards):
    window = Window()
    window.add_all(group_observations(make_group(rollouts=rollouts, rewards=rewards), rollouts, EOS))
    return window.reduce()


def test_a_group_by_hand():
    rollouts = [
        make_rollout([1], [2, 3, 9]),
        make_rollout([1], [2, 8]),
        make_rollout([1], [2, 3, 4, 5, 6, 7]),
        make_rollout([1], [2, 8]),
    ]
    found = reduced(rollouts, [1.0, 0.0, 0.0, 0.0])
    assert found == pytest.approx(
        {
            "frac_reward_zero_std": 0,
            "reward": 0.25,
            "reward_seen_min": 0,
            "reward_seen_max": 1,
            "completions/mean_length": 13 / 4,
            "completions/min_length": 2,
            "completions/max_length": 6,
            "completions/mean_terminated_length": 7 / 3,
            "completions/min_terminated_length": 2,
            "completions/max_terminated_length": 3,
            "completions/clipped_ratio": 0.25,
            "completions/duplicate_frac": 0.25,
            "rollout/turns_mean": 1,
            "rollout/turns_max": 1,
            "rollout/samples_per_rollout": 1,
        }
    )


def test_the_reward_is_over_all_scored_completions_and_a_dropped_group_has_its_own():
    rollouts = [make_rollout([1], [2, 9]) for _ in range(3)]
    found = reduced(rollouts, [1.0, 1.0, NAN])
    assert (found["reward"], found["reward_dropped"], found["frac_reward_zero_std"]) == (1, 1, 1)
    assert "reward" not in reduced(rollouts, [NAN, NAN, NAN])


def test_an_average_is_weighted_by_completions_not_by_groups():
    window = Window()
    for rollouts, rewards in (
        ([make_rollout([1], [2, 9])] * 2, [1.0, NAN]),
        ([make_rollout([1], [2, 9])] * 2, [0.0, 0.0]),
    ):
        window.add_all(group_observations(make_group(rollouts=rollouts, rewards=rewards), rollouts, EOS))
    assert window.reduce()["reward"] == pytest.approx(1 / 3)


def test_without_an_end_there_is_no_terminated_length():
    found = reduced([make_rollout([1], [2, 3]), make_rollout([1], [9, 3])], [0.0, 1.0])
    assert found["completions/clipped_ratio"] == 1
    assert not any("terminated" in name for name in found)


def test_only_the_last_token_of_the_last_turn_ends_a_rollout():
    assert terminated(make_rollout([1], [2, 3], [4, 8]), EOS)
    assert not terminated(make_rollout([1], [2, 9], [4, 5]), EOS)
    assert not terminated(make_rollout([1], [2, 9], []), EOS)
    assert not terminated(make_rollout([1]), EOS)


def test_tool_tokens_have_no_length():
    rollout = make_rollout([1], [2, 50, 51], [3])
    rollout.turns[0].output_mask = [1, 0, 0]
    assert trained_length(rollout) == 2


def test_duplicates_are_the_same_over_all_turns():
    same = [
        make_rollout([1], [2], [3]),
        make_rollout([1], [2], [3]),
        make_rollout([1], [2, 3]),
        make_rollout([1], [2], [3]),
    ]
    assert duplicates(same) == 2


def test_failed_rollouts_are_not_measured():
    found = reduced([None, make_rollout([1], [2, 2, 9])], [NAN, 1.0])
    assert found["completions/mean_length"] == 3
    assert np.isclose(found["frac_reward_zero_std"], 1)
    assert "completions/mean_length" not in reduced([None, None], [NAN, NAN])


def test_forks_and_drift_by_hand():
    """Three changes of turn: one goes on, one leaves the held tokens at the third of five, one drops the last of two."""
    goes_on = make_rollout([1, 2], [3], [4])
    forks = make_rollout([1, 2, 3], [4, 5], [6])
    forks.turns[1].prompt_ids = [1, 2, 9, 4, 5]
    shorter = make_rollout([1], [2], [3])
    shorter.turns[1].prompt_ids = [1]
    found = reduced([goes_on, forks, shorter, make_rollout([1], [2])], [1.0, 0.0, 0.0, 0.0])
    assert found["rollout/fork_frac"] == pytest.approx(2 / 3)
    assert found["rollout/drift_tokens_mean"] == pytest.approx((0 + 3 + 1) / 3)
    assert found["rollout/drift_tokens_max"] == 3
    assert found["rollout/samples_per_rollout"] == pytest.approx(6 / 4)
