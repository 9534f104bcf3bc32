"""What arrives from the rollout process; the worker is a stand-in."""

import queue
import threading
import time
from types import SimpleNamespace

import pytest

from slipstream.learner.inbox import Inbox, InboxError
from slipstream.rollout.types import EndOfData, EvalResult
from slipstream.rollout.worker import RolloutWorkerError
from tests.samples import make_result, make_sample


class Worker:
    def __init__(self):
        self.rollouts = queue.Queue()
        self.trainer_waits = SimpleNamespace(value=0)
        self.allowance = SimpleNamespace(value=0)
        self.error = None
        self.checked = threading.Event()

    def check(self):
        self.checked.set()
        if self.error:
            raise self.error


@pytest.fixture
def worker():
    return Worker()


@pytest.fixture
def arrived():
    return []


@pytest.fixture
def inbox(worker, arrived):
    box = Inbox(worker, arrived.append)
    yield box
    box.close()


def result(number):
    return make_result(number, [make_sample([1], [2], number=number)] * 2, 10)


def in_thread(function):
    """The call's result, later."""
    box = queue.Queue()
    threading.Thread(target=lambda: box.put(function()), daemon=True).start()
    return box


def test_groups_in_order_then_the_end(worker, inbox, arrived):
    for message in (result(0), result(1), EndOfData(2)):
        worker.rollouts.put(message)
    assert [inbox.take().number, inbox.take().number, inbox.take(), inbox.take()] == [0, 1, None, None]
    assert [group.number for group in arrived] == [0, 1]


def becomes(condition, what):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.001)


@pytest.mark.parametrize("first", ["the planner", "the trainer"])
def test_the_rollout_process_is_told_that_the_trainer_waits_until_something_comes(worker, inbox, first):
    if first == "the trainer":
        inbox.step_awaited()
    later = in_thread(inbox.take)
    assert worker.checked.wait(30)
    if first == "the planner":
        assert worker.trainer_waits.value == 0, "a step is trained while the next is planned"
        inbox.step_awaited()
    becomes(lambda: worker.trainer_waits.value == 1, "the trainer waits, and nothing has arrived")
    worker.rollouts.put(result(3))
    assert later.get(timeout=30).number == 3
    assert worker.trainer_waits.value == 0


def test_a_trainer_that_waits_for_a_plan_of_what_is_here_lets_nothing_start(worker, inbox):
    inbox.step_awaited()
    assert worker.trainer_waits.value == 0
    worker.rollouts.put(result(0))
    assert inbox.take().number == 0
    assert worker.trainer_waits.value == 0


def test_a_planned_step_waits_for_nothing(worker, inbox):
    inbox.step_awaited()
    later = in_thread(inbox.take)
    becomes(lambda: worker.trainer_waits.value == 1, "the trainer waits")
    inbox.step_planned()
    assert worker.trainer_waits.value == 0
    worker.rollouts.put(EndOfData(0))
    assert later.get(timeout=30) is None


def test_closing_ends_a_take(worker, inbox):
    def take():
        with pytest.raises(InboxError, match="closed"):
            inbox.take()
        return True

    later = in_thread(take)
    assert worker.checked.wait(30)
    inbox.close()
    assert later.get(timeout=30)


def test_a_failure_of_the_process_ends_the_waiting(worker, inbox):
    worker.error = RolloutWorkerError("it died")
    with pytest.raises(RolloutWorkerError, match="it died"):
        inbox.take()
    with pytest.raises(RolloutWorkerError, match="it died"):
        inbox.answer("evaluate", 1)


def test_groups_that_came_before_a_failure_are_still_there(worker, inbox):
    worker.rollouts.put(result(0))
    becomes(lambda: inbox.num_samples, "a group")
    worker.error = RolloutWorkerError("it died")
    assert inbox.take().number == 0


def test_answers_find_their_request(worker, inbox):
    for message in (("state", 2, {"b": 1}), EvalResult(1, {"reward": 0.5}), ("state", 1, {"a": 1})):
        worker.rollouts.put(message)
    assert inbox.answer("state", 1) == {"a": 1}
    assert inbox.answer("evaluate", 1).metrics == {"reward": 0.5}
    assert inbox.answer("state", 2) == {"b": 1}


def test_waiting_samples_are_counted(worker, inbox):
    worker.rollouts.put(result(0))
    worker.rollouts.put(result(1))
    becomes(lambda: inbox.num_samples == 4, "two groups of two")


def test_the_allowance_is_published(worker, inbox):
    inbox.publish(123)
    assert worker.allowance.value == 123


def unwritable(group):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "wait", [lambda box: box.take(), lambda box: box.answer("evaluate", 1)], ids=["take", "answer"]
)
@pytest.mark.parametrize(
    ("message", "on_group", "words"),
    [(result(0), unwritable, "No space left"), ("no message", lambda group: None, "ValueError")],
    ids=["it cannot be recorded", "it is no message"],
)
def test_a_receiver_that_fails_ends_the_waiting(worker, wait, message, on_group, words):
    box = Inbox(worker, on_group)
    worker.rollouts.put(message)
    later: queue.Queue = queue.Queue()

    def waiting():
        try:
            while True:
                wait(box)
        except Exception as error:
            later.put(error)

    threading.Thread(target=waiting, daemon=True).start()
    error = later.get(timeout=30)
    box.close()
    assert type(error).__name__ == "InboxError"
    assert words in str(error)
