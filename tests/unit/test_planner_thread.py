"""A step is drafted on a thread while the one before is trained, and nobody can tell from what is trained or recorded."""

import pickle
import queue
import threading
import time
import traceback

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.learner.feed import SampleFeed
from slipstream.learner.ledger import Ledger, NothingTrained
from slipstream.learner.plan import StepPlan, from_bytes
from slipstream.metrics.window import Window
from slipstream.rollout.setup import Position
from slipstream.rollout.types import OVERSIZE, STALE, TRAINED, ZERO_STD
from tests.samples import make_result, make_sample

DEADLINE_S = 60.0
LENGTH = 100


def until(condition, what):
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(0.001)


class Arriving:
    """Groups that come when the test lets them; an exception among them is raised."""

    num_samples = 0

    def __init__(self, *groups):
        self.queue = queue.Queue()
        self.published = []
        self.awaited = False
        self.takers = set()
        self.takes = 0
        self.come(*groups)

    def come(self, *groups):
        for group in groups:
            self.queue.put(group)

    def take(self):
        self.takes += 1
        self.takers.add(threading.current_thread().name)
        found = self.queue.get(timeout=DEADLINE_S)
        if isinstance(found, Exception):
            raise found
        return found

    def publish(self, total):
        self.published.append(total)

    def step_awaited(self):
        self.awaited = True

    def step_planned(self):
        self.awaited = False


def group(number, *lengths, version=0, dropped=None):
    samples = [
        make_sample([1], [100 * number + i + 2] * (length - 1), number=number, version=version)
        for i, length in enumerate(lengths)
    ]
    for sample in samples:
        sample.cost = len(sample)
    return make_result(number, samples, LENGTH, dropped)


class Fed:
    """A feed and all that it writes to."""

    def __init__(self, source, budget=10, length=LENGTH, **shape):
        self.source, self.lines, self.window = source, [], Window()
        self.ledger = Ledger(length, Position(), self.lines.append)
        shape = {"ranks": 1, "accumulation": 1, "max_staleness": 1} | shape
        self.feed = SampleFeed(source, self.ledger, self.window, token_budget=budget, warn=lambda text: None, **shape)

    def numbers(self, version, following=None):
        plan = self.feed.next_step(version, following)
        return None if plan is None else [sample.number for sample in plan.samples]


@pytest.fixture
def fed():
    made = []

    def make(*groups, **options):
        made.append(Fed(Arriving(*groups), **options))
        return made[-1]

    yield make
    for one in made:
        one.source.come(None)
        one.feed.close()


def drafted(one, takes):
    """Wait until the planner is blocked in its `takes`-th take, or done with as many."""
    until(lambda: one.source.takes == takes and one.source.queue.empty(), f"{takes} takes")


def test_the_next_step_is_drafted_while_one_is_trained(fed):
    one = fed(group(0, 6), group(1, 6), group(2, 6))
    assert one.numbers(0, following=1) == [0]
    drafted(one, 3)
    assert one.source.takers == {"planner"}
    assert not one.source.awaited
    asked_before = one.source.takes
    assert one.numbers(1, following=None) == [1]
    assert one.source.takes == asked_before, "nothing was left to be taken"


def test_a_step_does_not_wait_for_samples_of_the_next(fed):
    one = fed(group(0, 6), group(1, 6))
    assert one.numbers(0, following=1) == [0]
    until(lambda: one.source.takes == 3, "the planner waits for what may never come")
    one.feed.step_finished(StepPlan([]))
    assert one.ledger.settled == 1


def test_at_most_one_step_ahead(fed):
    one = fed(*(group(number, 6) for number in range(8)))
    one.numbers(0, following=1)
    until(lambda: one.source.takes == 3, "the second step")
    assert one.feed._draft is not None
    until(lambda: one.feed._draft.done, "the second step")
    assert one.source.takes == 3


def test_nothing_is_drafted_without_staleness_or_for_a_step_that_will_not_be(fed):
    for options in ({"max_staleness": 0}, {"max_staleness": 1}):
        one = fed(group(0, 6), group(1, 6), group(2, 6), **options)
        one.numbers(0, following=1 if options["max_staleness"] == 0 else None)
        assert one.feed._draft is None
        assert one.source.takes == 2


def test_what_is_drafted_is_not_recorded_before_it_is_asked_for(fed):
    """The checkpoint of the step in between: nothing settled by the draft, and the samples that it took still held."""
    one = fed(group(0, 6, 6), group(1, 11), group(2, dropped={ZERO_STD: 2}), group(3, 9))
    plan = one.feed.next_step(0, following=1)
    assert [sample.number for sample in plan.samples] == [0]
    drafted(one, 4)
    until(lambda: one.feed._draft.done, "the draft")
    one.feed.step_finished(plan)
    assert one.lines == []
    assert one.ledger.position == Position()
    assert len(one.feed.held_of(one.ledger.partly_trained())) == 1
    assert "batch/dropped_oversize_count" not in {k for k, v in one.window.peek().items() if v}

    assert one.numbers(1) == [0]
    assert [(line["number"], line["step"]) for line in one.lines] == [(1, 2), (2, 2)], "in the step that asked"
    assert one.window.peek()["batch/dropped_oversize_count"] == 1
    assert one.feed.held_of({0, 3})[0].number == 3


def test_what_a_draft_drops_is_given_back_at_once_and_what_it_plans_is_not(fed):
    one = fed(group(0, 8), group(1, 9, version=-1), group(2, 9, version=1), group(3, 9, version=1), max_staleness=1)
    plan = one.feed.next_step(0, following=1)
    until(lambda: one.feed._draft.done, "the draft")
    assert one.source.published[-1] == 8 + 9 + 8, "used, dropped, and what may be outstanding"
    one.feed.step_finished(plan)
    assert one.numbers(1) == [2]
    assert one.source.published[-1] == 8 + 9 + 9 + 9


@pytest.mark.parametrize("foretold", [0, 2])
def test_a_step_of_another_version_than_foretold_is_judged_anew(fed, foretold):
    """At version 1, versions 0 and later may be trained; at 0, -1 too; at 2, only 1 and later."""
    one = fed(group(0, 6), group(1, 6, version=-1), group(2, 6), group(3, 6, version=1), group(4, 6, version=1))
    plan = one.feed.next_step(0, following=foretold)
    until(lambda: one.feed._draft.done, "the draft")
    one.feed.step_finished(plan)
    assert one.numbers(1) == [2]
    assert [line["outcomes"] for line in one.lines] == [{TRAINED: 1}, {STALE: 1}]
    assert one.window.peek()["sample/dropped_stale_count"] == 1
    assert one.source.published[-1] == 6 + 6 + 6 + 6, "two steps used, one dropped once"
    assert one.numbers(2) == [3], "what the abandoned draft took beyond the step comes next"
    one.source.come(None, None)
    assert [one.numbers(2), one.numbers(2)] == [[4], None]


def test_a_draft_that_still_waits_is_left_for_another_version(fed):
    one = fed(group(0, 6), group(1, 6))
    one.feed.step_finished(one.feed.next_step(0, following=5))
    until(lambda: one.source.takes == 3, "the draft waits for a second group")
    one.source.come(group(2, 6), None, None)
    assert one.numbers(1) == [1]
    assert one.window.peek()["sample/staleness_max"] == 1
    assert [one.numbers(1), one.numbers(1)] == [[2], None]


def test_an_error_is_raised_where_the_step_is_asked_for(fed):
    one = fed(group(0, 6), group(1, 6), ZeroDivisionError("the rollout process died"))
    plan = one.feed.next_step(0, following=1)
    until(lambda: one.feed._draft.done, "the error")
    one.feed.step_finished(plan)
    with pytest.raises(ZeroDivisionError, match="rollout process died") as caught:
        one.feed.next_step(1, following=2)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "take", "with its traceback"
    assert one.feed.waiting_since is None
    assert not one.source.awaited


def test_an_epoch_without_a_trained_sample_ends_the_waiting(fed):
    """The groups keep coming, and none fills the step: it is said while the trainer waits, not after."""
    one = fed(*(group(number, dropped={ZERO_STD: 2}) for number in range(2)), length=2)
    with pytest.raises(NothingTrained):
        one.feed.next_step(0)


def test_the_end_of_the_data_while_a_step_is_trained(fed):
    one = fed(group(0, 6), group(1, 6), group(2, 3), None, None)
    assert [one.numbers(0, 0), one.numbers(0, 0), one.numbers(0, 0)] == [[0], [1, 2], None]


class Listed(Arriving):
    def take(self):
        return None if self.queue.empty() else self.queue.get()


@st.composite
def streams(draw):
    budget = draw(st.integers(6, 30))
    groups = []
    for number in range(draw(st.integers(1, 12))):
        lengths = draw(st.lists(st.integers(2, budget + 1), max_size=4))
        version = draw(st.integers(-1, 6))
        dropped = {ZERO_STD: 1} if draw(st.booleans()) else None
        groups.append(group(number, *lengths, version=version, dropped=dropped))
    shape = {
        "budget": budget,
        "ranks": draw(st.integers(1, 3)),
        "accumulation": draw(st.integers(1, 2)),
        "max_staleness": draw(st.integers(1, 3)),
    }
    return groups, shape, draw(st.integers(1, 3)), draw(st.lists(st.booleans(), min_size=20, max_size=20))


def trained(groups, shape, sync_steps, foretold):
    """Everything that a training on these groups leaves; `foretold(step, right version)`."""
    one = Fed(Listed(*groups), **shape)
    steps, version, step = [], 0, 0
    while True:
        following = version + ((step + 1) % sync_steps == 0)
        plan = one.feed.next_step(version, foretold(step, following))
        if plan is None:
            break
        rows = [from_bytes(pickle.dumps(plan.shares[0])), *(from_bytes(share) for share in plan.shares[1:])]
        steps.append(([(s.number, len(s)) for s in plan.samples], rows))
        one.feed.step_finished(plan)
        step += 1
        version += step % sync_steps == 0
        steps.append([(s.number, len(s)) for s in one.feed.held_of(one.ledger.partly_trained())])
    one.feed.close()
    totals = [total for total in one.source.published if total is not None]
    return steps, one.lines, totals[-1], one.ledger.position


@settings(max_examples=60, deadline=None)
@given(streams())
def test_a_drafted_step_is_the_one_that_would_have_been_planned_in_line(stream):
    groups, shape, sync_steps, wrong = stream
    in_line = trained(groups, shape, sync_steps, lambda step, version: None)
    ahead = trained(groups, shape, sync_steps, lambda step, version: version)
    foretold_badly = trained(groups, shape, sync_steps, lambda step, version: version + wrong[step % 20])
    assert repr(ahead) == repr(in_line)
    assert repr(foretold_badly) == repr(in_line)


def test_the_streams_meet_every_reason():
    """What the comparison above is worth."""
    groups = [group(0, 5, 31), group(1, 5, version=-3), group(2, 5), group(3, dropped={ZERO_STD: 1})]
    _, lines, _, _ = trained(groups, {"budget": 30}, 1, lambda step, version: version)
    assert {reason for line in lines for reason in line["outcomes"]} == {TRAINED, STALE, OVERSIZE, ZERO_STD}


def test_shares_are_whole_arrays_and_little_else():
    one = Fed(Listed(*(group(number, 500, 900, 700) for number in range(40))), budget=8000, ranks=8)
    plan = one.feed.next_step(0)
    one.feed.close()
    (batch,) = plan.micro_batches
    for rank in range(1, 8):
        row = batch.rows[rank]
        arrays = [value for value in vars(row).values() if isinstance(value, np.ndarray)]
        assert len(plan.shares[rank]) < sum(array.nbytes for array in arrays) + 4096
        (found,) = from_bytes(plan.shares[rank])
        assert found["num_tokens"] == batch.num_tokens
        for name, value in vars(row).items():
            assert np.array_equal(getattr(found["row"], name), value) or value is None, name
