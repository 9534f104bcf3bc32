"""The feed: what it publishes and when, what it drops, what it holds."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.learner.feed import SampleFeed
from slipstream.learner.ledger import Ledger
from slipstream.metrics.window import Window
from slipstream.rollout.setup import Position
from slipstream.rollout.types import OVERSIZE, STALE, TRAINED
from tests.samples import make_result, make_sample


class Listed:
    """Groups from a list; records what is published."""

    def __init__(self, groups):
        self.groups = deque(groups)
        self.published = []

    num_samples = 0

    def take(self):
        return self.groups.popleft() if self.groups else None

    def publish(self, total):
        self.published.append(total)

    def step_awaited(self):
        """A list waits for nothing."""

    def step_planned(self):
        self.published.append("planned")


def group(number, *lengths, version=0):
    samples = [make_sample([1], [2 + number] * (length - 1), number=number, version=version) for length in lengths]
    for sample in samples:
        sample.cost = len(sample)
    return make_result(number, samples, 100)


def feed_of(groups, budget=10, max_staleness=1, **options):
    source, lines, warned = Listed(groups), [], []
    ledger = Ledger(100, Position(), lines.append)
    window = Window()
    feed = SampleFeed(
        source,
        ledger,
        window,
        **({"ranks": 1, "accumulation": 1} | options),
        token_budget=budget,
        max_staleness=max_staleness,
        warn=warned.append,
    )
    return feed, source, lines, warned, window


def test_tokens_of_a_step_are_given_back_as_it_begins():
    feed, source, *_ = feed_of([group(0, 8), group(1, 9)], max_staleness=2)
    feed.open()
    plan = feed.next_step(0)
    feed.step_finished(plan)
    assert source.published == [20, 20, "planned", 8 + 2 * 8], "two full rows; then what was used, and twice that"


def test_without_staleness_they_are_given_back_with_the_next_policy():
    feed, source, *_ = feed_of([group(0, 8), group(1, 9, version=1)], max_staleness=0)
    feed.open()
    feed.step_finished(feed.next_step(0))
    assert source.published == [10, 10, "planned"]
    feed.next_step(1)
    assert source.published[3] == 8 + 8


def test_a_group_that_does_not_fit_any_more_comes_first_in_the_next_step():
    feed, _, lines, *_ = feed_of([group(0, 6), group(1, 6), group(2, 4)])
    plans = []
    while (plan := feed.next_step(0)) is not None:
        feed.step_finished(plan)
        plans.append([s.number for s in plan.samples])
    assert plans == [[0], [1, 2]]
    assert [(line["number"], line["step"]) for line in lines] == [(0, 1), (1, 2), (2, 2)]


def test_the_last_step_has_fewer_micro_batches():
    feed, *_ = feed_of([group(0, 6), group(1, 6), group(2, 6)], accumulation=2)
    assert len(feed.next_step(0).micro_batches) == 2
    assert len(feed.next_step(0).micro_batches) == 1
    assert feed.next_step(0) is None


def test_an_idle_rank_gets_a_row_without_terms():
    feed, *_ = feed_of([group(0, 6)], ranks=2)
    (batch,) = feed.next_step(0).micro_batches
    assert sorted(row.num_terms for row in batch.rows) == [0, 5]
    assert batch.num_tokens == 5


def test_too_old_samples_are_dropped_at_the_moment_of_planning():
    feed, source, lines, _, window = feed_of([group(0, 4, version=3), group(1, 4, version=4)], max_staleness=1)
    plan = feed.next_step(5)
    assert [s.number for s in plan.samples] == [1]
    assert lines[0]["outcomes"] == {STALE: 1}
    assert source.published[1] == 4 + 10, "given back at once"
    found = window.reduce()
    assert (found["sample/dropped_stale_count"], found["sample/staleness_max"]) == (1, 1)


def test_a_sample_longer_than_a_row_is_dropped_with_one_warning():
    feed, _, lines, warned, window = feed_of([group(0, 11, 4), group(1, 12)])
    plan = feed.next_step(0)
    feed.step_finished(plan)
    assert [len(s) for s in plan.samples] == [4]
    assert len(warned) == 1
    assert "11 tokens" in warned[0]
    assert "token_budget = 10" in warned[0]
    assert [line["outcomes"] for line in lines] == [{OVERSIZE: 1}, {OVERSIZE: 1, TRAINED: 1}]
    assert window.reduce()["batch/dropped_oversize_count"] == 2


def test_what_a_checkpoint_held_back_comes_first():
    feed, *_ = feed_of([group(5, 3)], budget=4)
    rest = group(2, 3).samples + group(1, 3).samples
    feed._ledger.restore(rest)
    feed.hold(rest)
    assert [s.number for s in feed.held_of({1})] == [1]
    plans = []
    while (plan := feed.next_step(0)) is not None:
        feed.step_finished(plan)
        plans += [s.number for s in plan.samples]
    assert plans == [2, 1, 5]


def test_an_unscored_sample_does_not_hide_the_reward_of_the_others():
    result = group(0, 3, 4)
    result.samples[0].reward, result.samples[1].reward = float("nan"), 0.5
    feed, *_, window = feed_of([result])
    feed.next_step(0)
    assert window.reduce()["reward_kept"] == pytest.approx(0.5)


# ---- what is measured


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=7), min_size=1, max_size=6), st.integers(1, 3))
def test_the_share_of_untrained_tokens_is_of_what_is_forwarded(forest, prompt):
    """Samples that share tokens train one forwarded token several times: it is still one."""
    samples = [make_sample(ids[: min(prompt, len(ids) - 1)], ids[min(prompt, len(ids) - 1) :]) for ids in forest]
    for sample in samples:
        sample.cost = len(sample)
    feed, *_, window = feed_of([make_result(0, samples, 100)], budget=100)
    feed.next_step(0)
    values = window.reduce()
    # by paths: a forwarded token is a path with the token after it, and a leaf for each sample
    forwarded = {tuple(ids[: i + 2]) for ids in forest for i in range(len(ids) - 1)}
    training = {
        tuple(sample.input_ids[: i + 1].tolist())
        for sample in samples
        for i in range(1, len(sample))
        if sample.trained[i]
    }
    tokens = len(forwarded) + len(forest)
    assert values["batch/forwarded_tokens_per_step"] == tokens
    assert values["batch/masked_token_frac"] == pytest.approx(1 - len(training) / tokens)
    assert 0 <= values["batch/masked_token_frac"] < 1


def test_the_wait_for_the_end_belongs_to_no_step():
    feed, *_, window = feed_of([group(0, 8)])
    assert feed.next_step(0) is not None
    window.reduce()
    assert feed.next_step(1) is None
    assert "perf/rollout_wait_s" not in window.reduce()
