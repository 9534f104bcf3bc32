"""Reduction of a logging window."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.metrics.window import Window, kind_of

NAMES = ["a/x_count", "a/x_max", "a/min_x", "a/x_mean", "reward"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sample/dropped_stale_count", "sum"),
        ("tools/search/call_count", "sum"),
        ("rollout/vllm_retry_count", "sum"),
        ("sample/staleness_max", "max"),
        ("completions/max_length", "max"),
        ("completions/min_terminated_length", "min"),
        ("clip_ratio/high_max", "max"),
        ("sampling/importance_sampling_ratio/min", "min"),
        ("sampling/importance_sampling_ratio/max", "max"),
        ("sample/staleness_mean", "mean"),
        ("completions/mean_length", "mean"),
        ("reward", "mean"),
        ("entropy", "mean"),
        ("batch/masked_token_frac", "mean"),
        ("rewards/max_of_two/mean", "mean"),  # only the last part counts
        ("rewards/count_words/group_std", "mean"),
        ("a/accounting", "mean"),  # a word, not a part of one
        ("a/maximum", "mean"),
    ],
)
def test_the_name_says_how(name, kind):
    assert kind_of(name) == kind


def test_one_window_by_hand():
    window = Window()
    window.add_all(
        [("x_count", 2, 1), ("x_count", 3, 7), ("y_max", 1, 1), ("y_max", -4, 1), ("y_min", 1, 1), ("y_min", -4, 1)]
    )
    window.add_all([("tokens_per_s", 100, 1.0), ("tokens_per_s", 10, 9.0)])  # 190 tokens in 10 s
    assert window.reduce() == {"x_count": 5, "y_max": 1, "y_min": -4, "tokens_per_s": 19}
    assert window.reduce() == {}


def test_nan_and_weightless_observations_are_none():
    window = Window()
    window.add("m", math.nan)
    window.add("m", 5.0, 0)
    assert window.reduce() == {}
    window.add("m", 1.0)
    window.add("m", math.nan)
    assert window.reduce() == {"m": 1.0}


observations = st.lists(st.tuples(st.sampled_from(NAMES), st.floats(-1e6, 1e6), st.floats(0.1, 100)), max_size=25)


@settings(max_examples=60, deadline=None)
@given(observations, st.integers(1, 4))
def test_merging_processes_is_one_window(found, processes):
    single = Window()
    single.add_all(found)
    merged = Window()
    for k in range(processes):
        part = Window()
        part.add_all(found[k::processes])
        merged.merge(part.state())
    assert merged.reduce() == pytest.approx(single.reduce(), rel=1e-9, abs=1e-6)
