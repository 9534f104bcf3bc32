"""Advantages of a group by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.algorithm.advantages import STD_EPSILON, carries_signal, group_advantages

NAN = math.nan


def test_population_deviation_by_hand():
    # mean 2.5, squared deviations 2.25 + 0.25 + 0.25 + 2.25 = 5, over 4 (not 3): 1.25
    found = group_advantages(np.array([1.0, 2.0, 3.0, 4.0]))
    assert found == pytest.approx(np.array([-1.5, -0.5, 0.5, 1.5]) / (math.sqrt(1.25) + STD_EPSILON), rel=1e-12)


def test_an_unscored_rollout_gets_zero_and_moves_nothing():
    assert group_advantages(np.array([NAN, 0.0, 1.0, NAN])) == pytest.approx([0, -1, 1, 0], abs=1e-7)


@pytest.mark.parametrize("rewards", [[NAN, NAN], [NAN, 3.0], [2.0, 2.0, 2.0]])
def test_without_spread_all_advantages_are_zero(rewards):
    assert group_advantages(np.array(rewards)).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([0.0, 1.0], True),
        ([0.0, 0.0], False),
        ([1.0, NAN], False),
        ([NAN, NAN], False),
        ([NAN, 0.0, 1.0], True),
        ([NAN, 1.0, 1.0], False),
        ([0.1 + 0.2, 0.1 + 0.2, 0.3], True),  # not equal, however close
        ([0.7, 0.7, 0.7], False),  # equal, though the mean of three may not be 0.7
    ],
)
def test_what_carries_a_signal(rewards, kept):
    assert carries_signal(np.array(rewards)) is kept


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(-5, 5).map(float) | st.just(NAN), min_size=2, max_size=8),
    st.floats(-100, 100),
    st.floats(0.1, 10),
)
def test_shift_and_scale_of_the_rewards_do_not_matter(rewards, shift, scale):
    values = np.array(rewards)
    scored = ~np.isnan(values)
    advantages = group_advantages(values)
    assert group_advantages(values * scale + shift) == pytest.approx(advantages, abs=1e-5)
    assert (advantages[~scored] == 0).all()
    if carries_signal(values):
        assert advantages[scored].mean() == pytest.approx(0, abs=1e-9)
        assert advantages[scored].std() == pytest.approx(1, abs=1e-6)
