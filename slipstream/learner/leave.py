"""Leaving: a job whose time is up saves and ends by itself. The leader's half, which hears signals, and the ranks'.

The leader writes `RunFolder.leave_file`; rank 0 looks for it at each step and while it waits, and says it to the other
ranks with what they are sent for each step, so that all of them save at the same one.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from slipstream.process import INCARNATION_ENV, REPLACED, STARTING, on_terminate
from slipstream.run_folder import RunFolder, read_json, write_json

if TYPE_CHECKING:
    from slipstream.learner.pipeline import Pipeline
    from slipstream.learner.plan import StepPlan
    from slipstream.learner.sync import PolicySync

LOOK_S = 1.0  # of rank 0, for the leave file; of a leader that leaves, for a cancel request
REPLACED_LOOK_S = 3.0
STOP_GRACE_S = 3.0


class LeaveRequested(Exception):
    """Rank 0 has been told to leave while it waited."""


class LeaveWatch:
    """Whether rank 0 has been told to leave; asks the storage once a second at most, and never again after a yes."""

    def __init__(
        self, run: RunFolder | None = None, incarnation: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Without a run or an incarnation there is nobody who could say it."""
        self._file = run.leave_file(incarnation) if run is not None and incarnation else None
        self._clock = clock
        self._next = float("-inf")
        self._why = ""

    @property
    def why(self) -> str:
        """The signal that said so; '' where none has."""
        if self._file is None or self._why or self._clock() < self._next:
            return self._why
        self._next = self._clock() + LOOK_S
        with contextlib.suppress(OSError):
            try:
                value = read_json(self._file)
            except ValueError:
                value = {}
            if value is not None:
                self._why = str(value.get("signal") or "told to leave") if isinstance(value, dict) else "told to leave"
        return self._why

    def check(self) -> None:
        """Raise LeaveRequested where it has been said."""
        if self.why:
            raise LeaveRequested(self.why)


def leave_watch(run_dir: str | None) -> LeaveWatch:
    """Looks for the leave file of the job that this process belongs to; outside a job for nothing."""
    incarnation = os.environ.get(INCARNATION_ENV, "")
    return LeaveWatch(RunFolder(run_dir) if run_dir else None, incarnation)


class Leaving:
    """The leaving part of `AsyncGRPOTrainer`; transformers' `Trainer` comes after it among the bases.

    Attributes:
        left: the signal for which all ranks left after the last step, before the training was over ('' on other ranks
            than 0); None where it was not so.
    """

    args: Any
    left: str | None = None
    _leave = LeaveWatch()
    _plan: "StepPlan | None"
    _sync: "PolicySync"

    if TYPE_CHECKING:

        def _syncs_after(self, step: int) -> bool: ...
        def speak_if_silent(self) -> None: ...
        def _tend_server(self, doing: str) -> None: ...

    def _plan_step(self, pipeline: "Pipeline", step: int) -> "StepPlan | None":
        """On rank 0: the plan of the step after `step`; None at the end of the data, or with `left` set: the ranks leave."""
        self._plan = None
        another = step + 1 < self.args.max_steps
        following = self._sync.version + self._syncs_after(step + 1) if another else None
        try:
            self.check_leave()
            self._tend_server("waiting for rollouts")
            self._plan = pipeline.feed.next_step(self._sync.version, following)
        except LeaveRequested as request:
            self.left = str(request)
        return self._plan

    def while_waiting(self) -> None:
        """On rank 0, now and then while it waits for samples. Raises LeaveRequested."""
        self.check_leave()
        self.speak_if_silent()
        self._tend_server("waiting for rollouts")

    def while_evaluating(self) -> None:
        """On rank 0, now and then while it waits for an evaluation. Raises LeaveRequested."""
        self.check_leave()
        self._tend_server("evaluating")

    def check_leave(self) -> None:
        """On rank 0: raise LeaveRequested where it has been told to leave."""
        self._leave.check()


def left_reason(step: int, why: str) -> str:
    """In words, for the exit record."""
    return f"saved at step {step} and left: {why}" if step else f"left before the first step: {why}"


class Orders:
    """What signals and the run folder tell a leader: to go on, to let its ranks leave, or to stop at once.

    USR2 lets them leave, and so does TERM (a preemption) unless a person has cancelled the run; a second TERM, INT and HUP
    stop at once. A job that was replaced stops too.

    Attributes:
        stop: why to stop at once; None: it is not to.
        left: the step that it stops at where nothing had to be saved.
        woken: set by each signal.
    """

    def __init__(self, run: RunFolder, role: str, incarnation: str, attempt: int) -> None:
        self._run = run
        self._role = role
        self._incarnation = incarnation
        self._attempt = attempt
        self._heard: list[str] = []
        self._terms = 0
        self._leaving = ""
        self._next_look = self._next_replaced = float("-inf")
        self.stop: str | None = None
        self.left: int | None = None
        self.woken = threading.Event()

    def listen(self) -> None:
        """Take the signals of this process. Main thread only."""

        def leave(_number: int, _frame: FrameType | None) -> None:
            self.hear("SIGUSR2")

        on_terminate(self.hear)
        signal.signal(signal.SIGUSR2, leave)

    def hear(self, name: str) -> None:
        """A signal has come; `look` acts on it."""
        self._heard.append(name)
        self.woken.set()

    def look(self, now: float) -> None:
        """Act on what was heard, and see what the run folder says. `now`: monotonic, in seconds."""
        self.woken.clear()
        while self._heard and self.stop is None:
            self._obey(self._heard.pop(0))
        if self.stop is None and now >= self._next_replaced:
            self._next_replaced = now + REPLACED_LOOK_S
            if self._run.replaced(self._role, self._incarnation):
                self.stop = REPLACED
        if self.stop is None and self._leaving and now >= self._next_look:
            self._next_look = now + LOOK_S
            self._while_leaving()

    def _obey(self, name: str) -> None:
        if name == "SIGTERM":
            self._terms += 1
        if name in ("SIGTERM", "SIGUSR2") and self._terms < 2 and not (self._terms and self._cancelled):
            if not self._leaving:
                self._leaving = name
                self._say(name)
        else:
            self.stop = f"stopped by {name}"

    @property
    def _cancelled(self) -> bool:
        return self._run.cancel_file.exists()

    def _say(self, name: str) -> None:
        # a storage that takes no file takes no checkpoint either: the job goes on until it is ended
        with contextlib.suppress(OSError):
            write_json(self._run.leave_file(self._incarnation), {"signal": name, "time": time.time()})

    def _while_leaving(self) -> None:
        if self._cancelled:
            self.stop = f"stopped by {self._leaving}"
            return
        beat: dict[str, Any] = {}
        try:
            with contextlib.suppress(ValueError):
                beat = read_json(self._run.heartbeat_file("learner")) or {}
            begun = int(self._run.fence(self._attempt).get("step", 0))
        except OSError:  # storage that stumbles says nothing of what is to be saved: the next look does
            return
        ours = beat.get("attempt") == self._attempt
        if not ours or (beat.get("phase") in STARTING and int(beat.get("step") or 0) <= begun):
            self.left = begun
            self.stop = left_reason(begun, self._leaving)
