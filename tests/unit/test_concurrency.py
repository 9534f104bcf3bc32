"""The limit of rollouts in flight, poll by poll."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.rollout.concurrency import ConcurrencyCap, ServerLoad
from slipstream.rollout.loop import AsyncRolloutLoop
from slipstream.rollout.server_load import parse_load


def load(usage, waiting=0):
    return ServerLoad(usage, running=1, waiting=waiting, preemptions=0)


@pytest.mark.parametrize(
    ("limit", "group", "kv_tokens", "max_model_len", "expected"),
    [
        (512, 8, 40_960, 4096, 10),  # what fits at full length
        (512, 8, 41_000, 4096, 10),
        (512, 8, 8_192, 4096, 8),  # at least one group
        (512, 8, 10**9, 4096, 512),  # never above max_concurrent_rollouts
        (512, 8, None, 4096, 512),  # the server does not tell
        (4, 8, None, 4096, 8),  # a limit below one group
    ],
)
def test_where_it_starts(limit, group, kv_tokens, max_model_len, expected):
    assert ConcurrencyCap(limit, group, kv_tokens, max_model_len).cap == expected


def test_the_server_is_asked_every_five_seconds():
    assert AsyncRolloutLoop.server_poll_s == 5


@pytest.mark.parametrize(
    "text",
    [
        "vllm:kv_cache_usage_perc 0.",
        "vllm:kv_cache_usage_perc 1e",
        "vllm:kv_cache_usage_perc nan",
        "vllm:kv_cache_usage_perc{eng",
    ],
)
def test_metrics_cut_short_on_the_way_are_no_load_or_a_number(text):
    assert parse_load(text) in (None, ServerLoad(0.0, 0, 0, 0))


@pytest.mark.parametrize(
    ("usage", "waiting", "finished", "expected"),
    [
        (0.59, 0, 100, 125),
        (0.59, 0, 99, 100),  # not cap-many have finished
        (0.59, 1, 100, 100),  # one waits
        (0.60, 0, 100, 100),  # between the two marks
        (0.80, 0, 100, 100),
        (0.81, 0, 100, 70),
        (0.81, 5, 0, 70),
        (1.0, 0, 0, 70),
    ],
)
def test_one_poll(usage, waiting, finished, expected):
    cap = ConcurrencyCap(512, 4, 100 * 64, 64)
    cap.finished(finished)
    assert cap.observe(load(usage, waiting), 100) == expected


def test_it_grows_at_most_once_per_cap_many_finished_rollouts():
    cap = ConcurrencyCap(512, 4, 100 * 64, 64)
    cap.finished(250)
    assert cap.observe(load(0.1), 100) == 125
    assert cap.observe(load(0.1), 100) == 125
    cap.finished(124)
    assert cap.observe(load(0.1), 100) == 125
    cap.finished(1)
    assert cap.observe(load(0.1), 100) == 156


def test_a_small_cap_grows_too():
    cap = ConcurrencyCap(512, 2, 2 * 64, 64)
    cap.finished(2)
    assert cap.observe(load(0.1), 2) == 3


def test_a_further_cut_waits_for_the_first_to_take_effect():
    """Rollouts in flight go on, so usage stays high after a cut."""
    cap = ConcurrencyCap(512, 4, 100 * 64, 64)
    assert [cap.observe(load(0.95), flying) for flying in (100, 90, 71)] == [70, 70, 70]
    assert cap.observe(load(0.95), 70) == 49
    assert cap.observe(load(0.95), 60) == 49


def test_after_a_cut_cap_many_must_finish_before_it_grows():
    cap = ConcurrencyCap(512, 4, 100 * 64, 64)
    cap.finished(1000)
    assert cap.observe(load(0.9), 100) == 70
    assert cap.observe(load(0.1), 70) == 70
    cap.finished(70)
    assert cap.observe(load(0.1), 70) == 87


def test_no_answer_changes_nothing():
    cap = ConcurrencyCap(512, 4, None, 64)
    cap.finished(10_000)
    assert cap.observe(None, 512) == 512


@pytest.mark.parametrize(("in_flight", "expected"), [(0, True), (6, True), (7, False), (30, False)])
def test_a_group_starts_only_where_all_of_it_has_room(in_flight, expected):
    assert ConcurrencyCap(10, 4, None, 64).has_room(in_flight) is expected


polls = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 3), st.integers(0, 200), st.integers(0, 600), st.booleans()), max_size=40
)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300), st.integers(1, 16), st.none() | st.integers(0, 10**5), st.integers(1, 5000), polls)
def test_whatever_the_server_says(limit, group, kv_tokens, max_model_len, polls):
    """Within the bounds at all times; one rule at a time moves it, and no other."""
    cap = ConcurrencyCap(limit, group, kv_tokens, max_model_len)
    since_change = 0
    for usage, waiting, finished, in_flight, answers in polls:
        before = cap.cap
        assert group <= before <= max(limit, group)
        cap.finished(finished)
        since_change += finished
        after = cap.observe(load(usage, waiting) if answers else None, in_flight)
        assert after == cap.cap
        if after > before:
            assert answers
            assert usage < 0.6
            assert waiting == 0
            assert since_change >= before
            assert after <= max(before * 1.25, before + 1)
        if after < before:
            assert answers
            assert usage > 0.8
            assert after >= max(int(before * 0.7), group)
        if after != before:
            since_change = 0
    assert group <= cap.cap <= max(limit, group)


TEXT = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a {b} c"} 3.0
vllm:num_requests_running{engine="1",model_name="a {b} c"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 7.5e-1
vllm:num_preemptions_total{engine="0",model_name="m"} 10.0
vllm:num_preemptions_total{engine="1",model_name="m"} 2.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
"""


def test_the_fullest_engine_s_cache_and_sums_of_the_rest():
    assert parse_load(TEXT) == ServerLoad(kv_usage=0.75, running=7, waiting=1, preemptions=12)


@pytest.mark.parametrize("text", [None, "", "not found", "vllm:num_requests_running 3.0\n"])
def test_a_server_that_does_not_tell(text):
    assert parse_load(text) is None
