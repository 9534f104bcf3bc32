"""A job whose time is up: what its leader makes of signals, how rank 0 hears of it, and what the feed then holds."""

import queue
from pathlib import Path

import pytest

from slipstream.learner.feed import SampleFeed
from slipstream.learner.leave import LOOK_S, REPLACED, LeaveRequested, LeaveWatch, Orders, left_reason
from slipstream.learner.ledger import Ledger
from slipstream.metrics.window import Window
from slipstream.rollout.setup import Position
from slipstream.rollout.types import STALE, TRAINED
from slipstream.run_folder import RunFolder, read_json, write_json
from tests.samples import make_result, make_sample

INCARNATION = "abcd"


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(tmp_path, "run")
    folder.begin_attempt(None, 0)
    folder.begin_attempt("output/a1/checkpoint-4", 4)
    return folder


# ---- the leader


@pytest.fixture
def orders(run):
    return Orders(run, "learner", INCARNATION, 2)


def training(run, phase="training", step=6, attempt=2):
    write_json(run.heartbeat_file("learner"), {"phase": phase, "step": step, "attempt": attempt})


def told_to_leave(run):
    return (read_json(run.leave_file(INCARNATION)) or {}).get("signal")


@pytest.mark.parametrize("name", ["SIGUSR2", "SIGTERM"])
def test_it_lets_its_ranks_leave(run, orders, name):
    training(run)
    orders.look(0.0)
    assert not told_to_leave(run)
    orders.hear(name)
    assert orders.woken.is_set()
    orders.look(1.0)
    assert told_to_leave(run) == name
    assert (orders.stop, orders.left, orders.woken.is_set()) == (None, None, False)


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_it_stops_at_once(run, orders, name):
    training(run)
    orders.hear(name)
    orders.look(0.0)
    assert (orders.stop, orders.left, told_to_leave(run)) == (f"stopped by {name}", None, None)


def test_a_cancelled_run_stops_at_once(run, orders):
    training(run)
    write_json(run.cancel_file, {"who": "me", "why": "enough"})
    orders.hear("SIGTERM")
    orders.look(0.0)
    assert (orders.stop, told_to_leave(run)) == ("stopped by SIGTERM", None)


def test_so_does_one_that_is_cancelled_while_it_leaves(run, orders):
    training(run)
    orders.hear("SIGUSR2")
    orders.look(0.0)
    write_json(run.cancel_file, {"who": "me", "why": "enough"})
    orders.look(LOOK_S / 2)
    assert orders.stop is None, "the storage is asked once a second"
    orders.look(LOOK_S)
    assert (orders.stop, orders.left) == ("stopped by SIGUSR2", None)


def test_a_second_term_stops_at_once(run, orders):
    training(run)
    for name in ("SIGUSR2", "SIGTERM"):
        orders.hear(name)
        orders.look(0.0)
    assert orders.stop is None, "SLURM sends TERM some time after USR2"
    orders.hear("SIGTERM")
    orders.look(0.0)
    assert orders.stop == "stopped by SIGTERM"
    assert told_to_leave(run) == "SIGUSR2"


@pytest.mark.parametrize(
    ("phase", "step", "attempt"),
    [("loading", 0, 2), ("waiting for the server", 0, 2), ("loading the model", 4, 2), ("training", 9, 1)],
)
def test_where_nothing_was_trained_yet_nothing_is_waited_for(run, orders, phase, step, attempt):
    training(run, phase, step, attempt)
    orders.hear("SIGUSR2")
    orders.look(0.0)
    assert (orders.stop, orders.left) == ("saved at step 4 and left: SIGUSR2", 4)


def test_a_learner_that_waits_for_its_server_again_has_something_to_save(run, orders):
    training(run, "waiting for the server", 7)
    orders.hear("SIGUSR2")
    orders.look(0.0)
    assert orders.stop is None


def test_before_the_first_heartbeat(run, orders):
    orders.hear("SIGTERM")
    orders.look(0.0)
    assert orders.left == 4


@pytest.mark.parametrize("name", ["learner.json", "2.json"])
def test_storage_that_stumbles_while_it_leaves_costs_no_steps(run, orders, name, monkeypatch):
    training(run)
    orders.hear("SIGUSR2")
    orders.look(0.0)
    read = Path.read_text

    def read_text(self, *args, **kwargs):
        if self.name == name:
            raise OSError(5, "Input/output error")
        return read(self, *args, **kwargs)

    with monkeypatch.context() as stumbling:
        stumbling.setattr(Path, "read_text", read_text)
        orders.look(10.0)
    assert (orders.stop, orders.left) == (None, None)
    orders.look(20.0)
    assert (orders.stop, orders.left) == (None, None)


def test_a_job_that_was_replaced_stops(run, orders):
    write_json(run.assignment_file, {"attempt": 2, "learner": INCARNATION})
    orders.look(0.0)
    write_json(run.assignment_file, {"attempt": 3, "learner": "other"})
    orders.look(0.1)
    assert orders.stop is None, "it looks every few seconds"
    orders.look(100.0)
    assert orders.stop == REPLACED


def test_in_words():
    assert left_reason(12, "SIGUSR2") == "saved at step 12 and left: SIGUSR2"
    assert left_reason(0, "SIGTERM") == "left before the first step: SIGTERM"


# ---- rank 0


def test_rank_0_asks_the_storage_once_a_second_until_it_is_told(run, monkeypatch):
    now, asked = [0.0], []

    def read(path):
        asked.append(now[0])
        return read_json(path)

    monkeypatch.setattr("slipstream.learner.leave.read_json", read)
    watch = LeaveWatch(run, INCARNATION, lambda: now[0])
    for i in range(50):
        now[0] = i / 10
        watch.check()
    assert asked == [0.0, 1.0, 2.0, 3.0, 4.0]
    write_json(run.leave_file(INCARNATION), {"signal": "SIGUSR2"})
    now[0] = 5.0
    with pytest.raises(LeaveRequested, match="SIGUSR2"):
        watch.check()
    count = len(asked)
    assert watch.why == "SIGUSR2"
    assert len(asked) == count


def test_outside_a_job_nobody_says_it(run):
    write_json(run.leave_file(""), {"signal": "SIGUSR2"})
    assert LeaveWatch().why == LeaveWatch(run, "").why == ""


def test_a_damaged_leave_file_says_it_too(run):
    write_json(run.leave_file(INCARNATION), {})
    run.leave_file(INCARNATION).write_text("{")
    assert LeaveWatch(run, INCARNATION).why


# ---- the feed


class Waiting:
    """A group, and then nothing."""

    num_samples = 0

    def __init__(self, *groups):
        self.groups = queue.Queue()
        for group in groups:
            self.groups.put(group)

    def take(self):
        return self.groups.get(timeout=60)

    def publish(self, total):
        """A queue needs no leave."""

    step_awaited = step_planned = lambda self: None


def test_what_is_dropped_while_the_step_is_waited_for_is_not_held_any_more():
    """A checkpoint is written then: a sample must not be in the ledger's outcomes and among those to be trained."""
    samples = [make_sample([1], [10 * i + k for k in range(7)], number=3, version=5 * (i == 2)) for i in range(3)]
    source = Waiting(make_result(3, samples, 100))
    ledger = Ledger(100, Position())
    told = []

    def while_waiting():
        if told and ledger.history.split[3]["outcomes"] == {TRAINED: 1, STALE: 1}:
            raise LeaveRequested("SIGUSR2")

    feed = SampleFeed(
        source,
        ledger,
        Window(),
        ranks=1,
        accumulation=1,
        token_budget=10,
        max_staleness=1,
        warn=lambda text: None,
        while_waiting=while_waiting,
    )
    feed.step_finished(feed.next_step(0))
    assert feed.held_of({3}) == samples[1:]
    told.append(True)
    with pytest.raises(LeaveRequested):
        feed.next_step(5)
    assert feed.waiting_since is None
    assert feed.held_of(ledger.partly_trained()) == samples[2:]
    source.groups.put(None)  # the planner's thread waits for it
    feed.close()
