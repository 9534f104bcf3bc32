"""What the rollout process sends, as it arrives on rank 0."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from slipstream.rollout.setup import LoopSetup, Position
from slipstream.rollout.types import EndOfData, EvalResult, GroupResult, Observation
from slipstream.rollout.worker import RolloutWorker, RolloutWorkerError, RolloutWorkerLost

POLL_S = 0.2
GONE_S = 20.0  # from SIGKILL to the end of a process
REVIVE_S = 120.0  # from the loss of a process to the start of the next

Renew = Callable[[Position, int], LoopSetup]


class InboxError(RuntimeError):
    """A message of the rollout process could not be received or recorded; the cause says why."""


class Handed:
    """What has arrived of the data, whatever became of it here: where another rollout process goes on.

    Attributes:
        cost: tokens that all of it holds or has held of the allowance.
    """

    def __init__(self, position: Position) -> None:
        self._first = position.first_unsettled
        self._beyond = set(position.settled_beyond)
        self.cost = 0

    def add(self, group: GroupResult) -> None:
        self.cost += group.cost
        self._beyond.add(group.number)
        while self._first in self._beyond:
            self._beyond.remove(self._first)
            self._first += 1

    @property
    def position(self) -> Position:
        return Position(self._first, frozenset(self._beyond))


class Inbox:
    """Receives the rollout process's messages on a thread, so that unpickling is off the training thread.

    The thread also puts another process in the place of one that was killed or hangs: it alone knows when everything that
    the old one had handed over has been read, so that no prompt is generated twice or left out.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        on_group: Callable[[GroupResult], None] = lambda group: None,
        *,
        position: Position | None = None,
        restarts: int = 0,
        renew: Renew | None = None,
        on_restart: Callable[[str, int], None] = lambda reason, count: None,
    ) -> None:
        """
        Args:
            on_group: called on the receiving thread, before the group can be taken.
            position: where the first process starts.
            restarts: how often a lost process is started again without a group in between.
            renew: what another process is started with, for the position and the cost of all groups that have arrived.
            on_restart: called on the receiving thread with the reason, and how many times it was without a group.
        """
        self._worker = worker
        self._on_group = on_group
        self._handed = Handed(position or Position())
        self._restarts = restarts if renew is not None else 0
        self._renew = renew
        self._on_restart = on_restart
        self._lost_in_row = 0
        self._lost_since: float | None = None
        self._pending: list[tuple[str, int]] = []
        self._changed = threading.Condition()
        self._groups: deque[GroupResult] = deque()
        self._answers: dict[tuple[str, int], Any] = {}
        self._ended = False
        self._last_report: list[Observation] = []
        self._closed = False
        self._taking = self._awaited = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._receive, name="rollout-inbox", daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        """The thread. Whatever ends it is raised where its messages are waited for: nobody else would notice."""
        try:
            while not self._closed:
                if not self._receive_one():
                    self._look_after()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _receive_one(self) -> bool:
        """Take in one message; whether there was one."""
        try:
            message = self._worker.rollouts.get(timeout=POLL_S)
        except queue.Empty:
            return False
        except (EOFError, OSError):  # its writer has ended, perhaps within a message
            if not self._worker.gone(GONE_S):
                raise
            time.sleep(POLL_S)  # until somebody asks it to be replaced, or the end
            return False
        self._take_in(message)
        return True

    def _take_in(self, message: Any) -> None:
        if isinstance(message, GroupResult):
            self._on_group(message)
        with self._changed:
            if isinstance(message, GroupResult):
                self._groups.append(message)
                self._handed.add(message)
                self._lost_in_row = 0
                self._tell_worker()
            elif isinstance(message, EndOfData):
                self._ended = True
                self._last_report = message.observations
            elif isinstance(message, EvalResult):
                self._answer_came("evaluate", message.request, message)
            else:
                kind, request, value = message
                self._answer_came(kind, request, value)
            self._changed.notify_all()

    def _answer_came(self, kind: str, request: int, value: Any) -> None:
        self._answers[kind, request] = value
        if (kind, request) in self._pending:
            self._pending.remove((kind, request))

    def _look_after(self) -> None:
        """Nothing has come: put another process in the place of one that is lost. One that failed is told by `_check`."""
        try:
            self._worker.check()
        except RolloutWorkerLost as lost:
            self._replace(lost)
        except RolloutWorkerError:
            time.sleep(POLL_S)

    def _replace(self, lost: RolloutWorkerLost) -> None:
        self._worker.kill(lost)
        if not self._worker.gone(GONE_S):
            raise lost
        while self._receive_one():
            """What it had handed over wholly counts."""
        self._lost_in_row += 1
        if self._renew is None or self._lost_in_row > self._restarts:
            again = f"; it had been started again {self._restarts} times without a new group in between"
            raise RolloutWorkerError(
                f"{lost}{again if self._restarts else ''} (rollout_worker_restarts = {self._restarts})"
            ) from lost
        setup = self._renew(self._handed.position, self._handed.cost)
        with self._changed:
            if self._closed:
                return
            self._worker.renew(setup)
            for request in self._pending:
                self._worker.commands.put(request)
        self._on_restart(str(lost), self._lost_in_row)
        self._worker.start()

    @property
    def num_samples(self) -> int:
        with self._changed:
            return sum(len(group.samples) for group in self._groups)

    def take(self) -> GroupResult | None:
        """The next group, or None at the end of the data. Blocks; raises RolloutWorkerError, InboxError."""
        try:
            while True:
                with self._changed:
                    if self._groups:
                        return self._groups.popleft()
                    if self._ended:
                        return None
                    if self._closed:
                        raise InboxError("the inbox is closed")
                    self._taking = True
                    self._tell_worker()
                    self._changed.wait(POLL_S)
                    if self._groups or self._ended:
                        continue
                self._check()
        finally:
            with self._changed:
                self._taking = False
                self._tell_worker()

    def last_report(self) -> list[Observation]:
        """What came with the end of the data, once."""
        with self._changed:
            found, self._last_report = self._last_report, []
        return found

    def publish(self, allowance_total: int) -> None:
        self._worker.allowance.value = allowance_total

    def step_awaited(self) -> None:
        with self._changed:
            self._awaited = True
            self._tell_worker()

    def step_planned(self) -> None:
        with self._changed:
            self._awaited = False
            self._tell_worker()

    def _tell_worker(self) -> None:
        """Only a trainer that waits for a group that is not here yet lets one start beyond the bound."""
        self._worker.trainer_waits.value = int(self._awaited and self._taking and not self._groups)

    def ask(self, kind: str, request: int) -> None:
        """Send the process a command; one that takes its place is asked again."""
        with self._changed:
            self._pending.append((kind, request))
            self._worker.commands.put((kind, request))

    def answer(self, kind: str, request: int, while_waiting: Callable[[], None] = lambda: None) -> Any:
        """The answer to a command. Blocks; raises RolloutWorkerError, InboxError, and what `while_waiting` raises."""
        while True:
            with self._changed:
                if (kind, request) in self._answers:
                    return self._answers.pop((kind, request))
                self._changed.wait(POLL_S)
            self._check()
            while_waiting()

    def _check(self) -> None:
        """Raise what the receiving thread ended with, or the process; one that is lost is waited for, as it is replaced."""
        if isinstance(self._error, RolloutWorkerError):
            raise self._error
        try:
            self._worker.check()
        except RolloutWorkerLost as lost:
            # the receiving thread may be stuck in a half-written message of a process that hangs
            self._worker.kill(lost)
            now = time.monotonic()
            self._lost_since = self._lost_since or now
            if now - self._lost_since > REVIVE_S:
                raise
        else:
            self._lost_since = None
        if self._error is not None:
            raise InboxError(
                f"receiving from the rollout process failed: {type(self._error).__name__}: {self._error}"
            ) from self._error

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(2)
