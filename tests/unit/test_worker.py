"""The rollout process: how it is started, watched and stopped. Real processes, without a server."""

import functools
import os
import signal
import time

import pytest

import slipstream.rollout.worker as worker_module
from slipstream.rollout.setup import LoopSetup
from slipstream.rollout.worker import NotPicklable, RolloutWorker, RolloutWorkerError, RolloutWorkerLost
from tests import tiny_loops

DEADLINE_S = 60.0
SETUP = LoopSetup("run", 1, "m", True, 64)


@pytest.fixture
def start(monkeypatch):
    """Start a worker; stopped at the end of the test."""
    workers = []

    def make(loop_cls, arguments=None, timeout_s=DEADLINE_S):
        worker = RolloutWorker(loop_cls, arguments or {}, SETUP, timeout_s)
        workers.append(worker)
        worker.start()
        return worker

    yield make
    monkeypatch.setattr(worker_module, "STOP_GRACE_S", 1.0)
    for worker in workers:
        worker.stop()


def error_of(worker) -> str:
    """What `check` raises, once it does."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        try:
            worker.check()
        except RolloutWorkerError as error:
            return str(error)
        time.sleep(0.01)
    raise AssertionError(f"check() raised nothing within {DEADLINE_S:g} s")


def test_it_runs_apart_without_a_gpu_and_without_torch(start, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    worker = start(tiny_loops.Describes, {"reward_funcs": [tiny_loops.length_reward]})
    said = worker.rollouts.get(timeout=DEADLINE_S)
    assert said["pid"] == worker.pid != os.getpid()
    assert (said["cuda"], said["threads"], said["torch"]) == ("", "1", False)
    assert said["interrupt"], "Ctrl-C in a terminal reaches everybody; the trainer decides"
    assert (said["run_id"], said["rewards"], said["version"]) == ("run", [[2, 1]], 0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3", "of the trainer, unchanged"
    worker.check()


def test_an_exception_arrives_with_its_traceback(start):
    """Every time: the training thread asks, and the planner's."""
    worker = start(tiny_loops.Fails)
    message = error_of(worker)
    assert error_of(worker) == message
    assert "ZeroDivisionError: the hook is wrong" in message
    assert "tiny_loops.py" in message
    assert "in run" in message


def test_so_does_one_of_the_constructor(start):
    assert "ValueError: no such model" in error_of(start(tiny_loops.FailsToStart))


def test_a_killed_process_is_noticed(start):
    worker = start(tiny_loops.Describes)
    worker.rollouts.get(timeout=DEADLINE_S)
    worker.check()
    os.kill(worker.pid, signal.SIGKILL)
    message = error_of(worker)
    assert "died (signal SIGKILL)" in message
    assert "out of memory" in message


def test_a_killed_process_keeps_no_lock(start):
    """Wherever it is when it is killed, the trainer can go on reading, writing and stopping."""
    for _ in range(3):
        worker = start(tiny_loops.Busy)
        worker.rollouts.get(timeout=DEADLINE_S)
        os.kill(worker.pid, signal.SIGKILL)
        assert "SIGKILL" in error_of(worker)
        worker.version.value, worker.allowance.value, worker.trainer_waits.value = 1, 2, 1
        worker.stop()


def test_one_that_exits_is_noticed(start):
    assert "died (exit code 7)" in error_of(start(tiny_loops.Leaves))


def test_one_that_does_not_beat_is_noticed(start):
    worker = start(tiny_loops.Hangs)
    assert worker.rollouts.get(timeout=DEADLINE_S) == "hanging"
    worker._timeout_s = 0.2
    message = error_of(worker)
    assert "has not beaten" in message
    assert "rollout_worker_timeout = 0.2" in message


def test_one_that_is_killed_because_it_hangs_is_still_one_that_hung(start):
    """Of two threads that look, one kills it before the other asks."""
    worker = start(tiny_loops.Hangs)
    assert worker.rollouts.get(timeout=DEADLINE_S) == "hanging"
    worker._timeout_s = 0.2
    assert "has not beaten" in error_of(worker)
    with pytest.raises(RolloutWorkerLost) as lost:
        worker.check()
    worker.kill(lost.value)
    assert worker.gone(DEADLINE_S)
    assert "has not beaten" in error_of(worker)


def test_one_that_has_never_beaten_is_said_to_be_starting(start):
    worker = start(tiny_loops.Hangs)
    assert worker.rollouts.get(timeout=DEADLINE_S) == "hanging"
    worker._heartbeat.value = worker._begun
    worker._timeout_s = 0.0
    assert "has been starting for" in error_of(worker)


def exit_code(worker):
    return worker._process.exitcode


def test_a_clean_stop(start):
    worker = start(tiny_loops.Describes)
    worker.rollouts.get(timeout=DEADLINE_S)
    worker.stop()
    assert exit_code(worker) == 0, "it ended by itself"
    worker.check()  # it was asked to


def test_a_full_queue_does_not_keep_it_from_stopping(start):
    worker = start(tiny_loops.Floods)
    assert worker.rollouts._reader.poll(DEADLINE_S)
    worker.stop()
    assert exit_code(worker) == 0


def test_one_that_does_not_listen_is_killed(start, monkeypatch):
    worker = start(tiny_loops.Hangs)
    worker.rollouts.get(timeout=DEADLINE_S)
    monkeypatch.setattr(worker_module, "STOP_GRACE_S", 0.1)
    worker.stop()
    assert exit_code(worker) == -signal.SIGKILL


def test_stop_before_start():
    RolloutWorker(tiny_loops.TinyLoop, {}, SETUP, 1.0).stop()


def closure():
    value = 1

    def reward(**kwargs):
        return [value]

    return reward


@pytest.mark.parametrize("reward", [lambda **kwargs: [0], closure(), functools.partial(closure())])
def test_what_cannot_be_pickled_is_named_before_anything_starts(reward):
    with pytest.raises(NotPicklable, match=r"(?s)reward_funcs = .*(lambda|closure).*module level"):
        RolloutWorker(tiny_loops.TinyLoop, {"reward_funcs": [reward]}, SETUP, 1.0)
    assert issubclass(NotPicklable, TypeError)


def test_a_local_loop_class_is_named():
    class Local(tiny_loops.TinyLoop):
        pass

    with pytest.raises(NotPicklable, match=r"loop_cls = .*Local"):
        RolloutWorker(Local, {}, SETUP, 1.0)


@pytest.mark.parametrize("reward", [tiny_loops.length_reward, functools.partial(tiny_loops.length_reward, extra=1)])
def test_what_can_be_pickled(reward):
    RolloutWorker(tiny_loops.TinyLoop, {"reward_funcs": [reward]}, SETUP, 1.0)
