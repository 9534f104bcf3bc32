"""A rollout process that is killed or hangs: another one takes its place, and no prompt is lost or comes twice."""

import dataclasses
import os
import signal
import time

import pytest

import slipstream.rollout.worker as worker_module
from slipstream.learner.inbox import Handed, Inbox
from slipstream.rollout.setup import LoopSetup, Position
from slipstream.rollout.worker import RolloutWorker, RolloutWorkerError
from tests import tiny_loops
from tests.samples import make_result

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0
END = 12


class Lives:
    """An inbox and its worker; `restarts` are the reasons of each."""

    def __init__(self, loop_cls, restarts=3, timeout_s=DEADLINE_S, position=None):
        setup = LoopSetup("run", 1, "m", True, 64, position=position or Position(), end=END)
        self.worker = RolloutWorker(loop_cls, {}, setup, timeout_s)
        self.worker.start()
        self.first_pid = self.worker.pid
        self.restarts = []
        self.renewed = []
        self.inbox = Inbox(
            self.worker,
            position=setup.position,
            restarts=restarts,
            renew=self.renew,
            on_restart=lambda reason, count: self.restarts.append((reason, count)),
        )

    def renew(self, position, cost):
        self.renewed.append((position, cost))
        self.worker._timeout_s = DEADLINE_S  # a start may take longer than a test of silence
        return dataclasses.replace(self.worker.setup, position=position, finished_cost=cost)

    def take(self):
        group = self.inbox.take()
        return None if group is None else group.number

    def close(self):
        self.worker.stop()
        self.inbox.close()


@pytest.fixture
def lives(monkeypatch):
    made = []

    def make(*arguments, **options):
        made.append(Lives(*arguments, **options))
        return made[-1]

    yield make
    monkeypatch.setattr(worker_module, "STOP_GRACE_S", 1.0)
    for each in made:
        each.close()


def test_where_another_process_goes_on():
    handed = Handed(Position(2, frozenset({4})))
    for number, cost in ((5, 7), (2, 5), (3, 0)):
        group = make_result(number, [], 100)
        group.cost = cost
        handed.add(group)
    assert (handed.position, handed.cost) == (Position(6), 12)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_it_is_replaced_and_every_prompt_comes_once(lives, sent):
    """The first life hands over a few, the next goes on behind them."""
    run = lives(tiny_loops.HandsOver, position=Position(1))
    found = [run.take(), run.take()]
    if sent == signal.SIGSTOP:
        run.worker._timeout_s = 3.0
    os.kill(run.first_pid, sent)
    while (number := run.take()) is not None:
        found.append(number)
    assert sorted(found) == list(range(1, END)), found
    assert run.worker.pid != run.first_pid
    with pytest.raises(ProcessLookupError):
        os.kill(run.first_pid, 0)
    ((reason, count),) = run.restarts
    assert count == 1
    assert ("SIGKILL" if sent == signal.SIGKILL else "has not beaten for") in reason
    ((position, cost),) = run.renewed
    assert cost == 10 * (position.first_unsettled - 1 + len(position.settled_beyond)), "10 tokens each"


def test_half_a_message_is_nothing(lives):
    """It is killed while it writes a group that is larger than the pipe: nobody has read it, so that it comes again."""
    run = lives(tiny_loops.WritesSlowly)
    assert run.take() == 0
    found = [run.take() for _ in range(END - 1)]
    assert sorted(found) == list(range(1, END))
    assert len(run.restarts) == 1


def test_what_was_asked_is_asked_again(lives):
    run = lives(tiny_loops.AnswersInItsSecondLife)
    assert run.take() == 0
    run.inbox.ask("state", 7)
    assert run.inbox.answer("state", 7) == {"first": 1}
    assert run.restarts


def test_it_is_bounded_without_a_group_in_between(lives):
    run = lives(tiny_loops.DiesAtOnce, restarts=2)
    with pytest.raises(RolloutWorkerError) as raised:
        run.take()
    for words in ("SIGKILL", "started again 2 times without a new group", "rollout_worker_restarts = 2"):
        assert words in str(raised.value)
    assert [count for _, count in run.restarts] == [1, 2]
    with pytest.raises(RolloutWorkerError, match="rollout_worker_restarts"):
        run.inbox.answer("state", 1)


def test_a_new_group_begins_the_count_anew(lives):
    run = lives(tiny_loops.DiesAfterEach, restarts=1, position=Position(END - 4))
    assert [run.take() for _ in range(5)] == [*range(END - 4, END), None]
    assert {count for _, count in run.restarts} == {1}
    assert len(run.restarts) == 4


def test_none_is_replaced_where_no_restart_is_allowed(lives):
    run = lives(tiny_loops.DiesAtOnce, restarts=0)
    with pytest.raises(RolloutWorkerError, match=r"died \(signal SIGKILL\).*rollout_worker_restarts = 0"):
        run.take()
    assert run.restarts == []


def test_one_that_fails_itself_is_not_replaced(lives):
    run = lives(tiny_loops.Fails)
    with pytest.raises(RolloutWorkerError, match="the hook is wrong"):
        run.take()
    assert run.restarts == []


def test_a_stop_while_one_is_lost_starts_none(lives):
    run = lives(tiny_loops.HandsOver)
    assert run.take() == 0
    run.worker.stop()
    pid = run.worker.pid
    time.sleep(0.5)  # more than the receiving thread needs to look after it
    assert run.worker.pid == pid
    assert run.restarts == []


def test_the_end_of_the_data_stays_the_end(lives):
    run = lives(tiny_loops.HandsOver)
    assert len([run.take() for _ in range(END)]) == END
    assert run.take() is None
    os.kill(run.worker.pid, signal.SIGKILL)
    run.inbox.ask("state", 1)
    assert run.inbox.answer("state", 1) == {"first": END}
    assert run.take() is None
