"""Start, watch and stop the rollout process; its entry point."""

import contextlib
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing import get_context
from typing import Any

from slipstream.process import die_with_parent
from slipstream.rollout.main_module import describe_main, hidden_main, load_main
from slipstream.rollout.setup import LoopSetup

STOP_GRACE_S = 10.0


class RolloutWorkerError(RuntimeError):
    """The rollout process failed, died, or stopped beating. The message holds its traceback."""


class RolloutWorkerLost(RolloutWorkerError):
    """The rollout process was killed, or hangs: another one can take its place. It did not fail by an error of its own."""

    def __init__(self, message: str, pid: int | None) -> None:
        super().__init__(message)
        self.pid = pid


class NotPicklable(TypeError):
    """Something handed to the rollout process cannot be pickled."""

    final = True


def dump_for_child(name: str, value: Any) -> bytes:
    """Pickle one argument of the loop. Raises NotPicklable naming it."""
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise NotPicklable(
            f"{name} = {value!r:.200} cannot be pickled ({error}): the rollout process is a separate one, so use functions "
            "defined at module level, functools.partial, or instances of module-level classes; no lambdas or closures"
        ) from error


class SharedFlag:
    """`set` and `is_set` of an event between two processes, without a lock."""

    def __init__(self, context: Any) -> None:
        self._raised = context.RawValue("b", 0)

    def set(self) -> None:
        self._raised.value = 1

    def is_set(self) -> bool:
        return bool(self._raised.value)


class RolloutWorker:
    """The trainer's handle on the rollout process.

    Shared with it: policy version, token allowance, whether the trainer waits, the heartbeat, the stop flag, and queues.
    Each value has one writer and no lock: a process that is killed while it holds a lock would hang the other for ever.
    """

    def __init__(self, loop_cls: type, arguments: dict[str, Any], setup: LoopSetup, timeout_s: float) -> None:
        """`arguments`: of the loop's constructor, without the shared values. Raises NotPicklable."""
        self._context = get_context("spawn")
        self._timeout_s = timeout_s
        self._make_queues()
        self.version = self._context.RawValue("q", 0)
        self.allowance = self._context.RawValue("q", 0)
        self.trainer_waits = self._context.RawValue("b", 0)
        self._heartbeat = self._context.RawValue("d", 0.0)
        self._begun = 0.0
        self._failed = SharedFlag(self._context)
        self._stop = SharedFlag(self._context)
        self._payload = {name: dump_for_child(name, value) for name, value in arguments.items()}
        self._payload["loop_cls"] = dump_for_child("loop_cls", loop_cls)
        self._setup = setup
        self._payload["setup"] = dump_for_child("setup", setup)
        self._process: Any = None
        self._not_started = ""  # why the last start came to nothing
        self._starting = threading.Lock()
        self._checking = threading.Lock()  # by the training thread and others
        self._traceback: str | None = None
        self._killed: RolloutWorkerLost | None = None

    def _make_queues(self) -> None:
        """A process that was killed while it wrote leaves half a message, so that each start has queues of its own."""
        self.rollouts: Any = self._context.Queue()
        self.metrics: Any = self._context.Queue()
        self.commands: Any = self._context.Queue()
        self._exceptions: Any = self._context.Queue()

    @property
    def setup(self) -> LoopSetup:
        """What the process was started with."""
        return self._setup

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, unless it has been asked to stop by now; `check` says where it did not start."""
        shared = {
            "rollout_buffer": self.rollouts,
            "model_version_value": self.version,
            "token_allowance": self.allowance,
            "heartbeat_value": self._heartbeat,
            "failed_event": self._failed,
            "exception_info_queue": self._exceptions,
            "metrics_queue": self.metrics,
            "trainer_waits": self.trainer_waits,
            "stop_event": self._stop,
            "commands": self.commands,
        }
        # only something pickled by reference to the user's script needs the script
        main = describe_main() if any(b"__main__" in value for value in self._payload.values()) else None
        with self._starting, hidden_main():
            if self._stop.is_set():
                return
            self._begun = self._heartbeat.value = time.monotonic()
            self._not_started = ""
            self._process = self._context.Process(
                target=run_child,
                args=(self._payload, shared, main, os.getpid()),
                name="slipstream-rollout",
                daemon=True,
            )
            try:
                self._process.start()
            except OSError as error:  # it died before it had read what it is given, or there is no memory for it
                self._not_started = str(error)
            # the process alone can write now: its end ends a message that it left half written
            for q in (self.rollouts, self.metrics, self._exceptions):
                q._writer.close()

    def kill(self, lost: RolloutWorkerLost) -> None:
        """End the process that is lost at once, whatever it does; nothing where another has taken its place.

        Why it was lost is what `check` says of it from now on, and not that it was killed.
        """
        process = self._process
        if process is not None and lost.pid is not None and process.pid == lost.pid:
            if self._killed is None or self._killed.pid != lost.pid:
                self._killed = lost
            process.kill()

    def gone(self, within_s: float) -> bool:
        """Whether the process has ended, waiting for that a while."""
        if self._not_started:
            return True
        with self._checking:  # of two threads that reap it, one would take it for alive
            self._process.join(within_s)
            return not self._process.is_alive()

    def renew(self, setup: LoopSetup) -> None:
        """Make the queues of another process, to be started with `start`; the last one has ended. Raises NotPicklable."""
        old = (self.rollouts, self.metrics, self.commands, self._exceptions)
        self._setup = setup
        self._payload["setup"] = dump_for_child("setup", setup)
        self._make_queues()
        for q in old:
            q.cancel_join_thread()
            q.close()

    def check(self) -> None:
        """Raise RolloutWorkerError where the process failed, and RolloutWorkerLost where it died or has not beaten."""
        self._check_failed()
        pid = self.pid
        if self._not_started:
            raise RolloutWorkerLost(f"the rollout process did not start: {self._not_started}", pid)
        with self._checking:
            dead = self._process is not None and not self._process.is_alive()
        if dead and not self._stop.is_set():
            self._check_failed()  # it may have said so since
            if self._killed is not None and self._killed.pid == pid:
                raise RolloutWorkerLost(str(self._killed), pid)
            code = self._process.exitcode
            how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
            raise RolloutWorkerLost(f"the rollout process died ({how}): out of memory, or killed from outside?", pid)
        beaten = self._heartbeat.value
        silent = time.monotonic() - beaten
        if silent > self._timeout_s:
            words = f"for {silent:.0f} s (rollout_worker_timeout = {self._timeout_s:g})"
            if beaten == self._begun:
                why = f"the rollout process has been starting {words}: its imports take longer, or hang"
            else:
                why = f"the rollout process has not beaten {words}: a hook or reward function blocks its event loop"
            raise RolloutWorkerLost(why, pid)

    def _check_failed(self) -> None:
        if not self._failed.is_set():
            return
        with self._checking, contextlib.suppress(queue.Empty, EOFError, OSError):
            self._traceback = self._traceback or self._exceptions.get(timeout=5)
        if self._traceback is None:
            raise RolloutWorkerError("the rollout process failed, and could not say why")
        raise RolloutWorkerError("the rollout process failed:\n" + self._traceback)

    def stop(self) -> None:
        """Ask it to stop, and end it where it does not within seconds."""
        self._stop.set()
        with self._starting:
            if self._process is not None and not self._not_started:
                self._process.join(STOP_GRACE_S)
                if self._process.is_alive():
                    self._process.kill()
                    self._process.join(5)
        for q in (self.rollouts, self.metrics, self.commands, self._exceptions):
            q.cancel_join_thread()
            q.close()


def run_child(payload: dict[str, bytes], shared: dict[str, Any], main: tuple[str, str] | None, parent: int) -> None:
    """Entry point of the rollout process."""
    die_with_parent(parent)
    os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")  # here: the parent's threads go on beside the start
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches everybody; the trainer decides
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    code = 0
    try:
        load_main(main)
        arguments = {name: pickle.loads(value) for name, value in payload.items()}
        loop_cls = arguments.pop("loop_cls")
        loop_cls(**arguments, **shared).run()
    except BaseException:
        code = 1
        shared["exception_info_queue"].put(traceback.format_exc())
        shared["failed_event"].set()
    finally:
        # the exception must reach the trainer; everything else may be lost
        for name in ("rollout_buffer", "metrics_queue", "commands"):
            shared[name].cancel_join_thread()
        shared["exception_info_queue"].close()
        shared["exception_info_queue"].join_thread()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
