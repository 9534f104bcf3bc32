"""What the rollout process sends, as it arrives on rank 0."""

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from slipstream.rollout.types import EndOfData, EvalResult, GroupResult, Observation
from slipstream.rollout.worker import RolloutWorker

POLL_S = 0.2


class InboxError(RuntimeError):
    """A message of the rollout process could not be received or recorded; the cause says why."""


class Inbox:
    """Receives the rollout process's messages on a thread, so that unpickling is off the training thread."""

    def __init__(
        self,
        worker: RolloutWorker,
        on_group: Callable[[GroupResult], None] = lambda group: None,
    ) -> None:
        """`on_group` is called on the receiving thread, before the group can be taken."""
        self._worker = worker
        self._on_group = on_group
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
                self._receive_one()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _receive_one(self) -> None:
        try:
            message = self._worker.rollouts.get(timeout=POLL_S)
        except queue.Empty:
            return
        if isinstance(message, GroupResult):
            self._on_group(message)
        with self._changed:
            if isinstance(message, GroupResult):
                self._groups.append(message)
                self._tell_worker()
            elif isinstance(message, EndOfData):
                self._ended = True
                self._last_report = message.observations
            elif isinstance(message, EvalResult):
                self._answers["evaluate", message.request] = message
            else:
                kind, request, value = message
                self._answers[kind, request] = value
            self._changed.notify_all()

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

    def answer(self, kind: str, request: int, while_waiting: Callable[[], None] = lambda: None) -> Any:
        """The answer to a command. Blocks, calling `while_waiting` now and then; raises RolloutWorkerError, InboxError."""
        while True:
            with self._changed:
                if (kind, request) in self._answers:
                    return self._answers.pop((kind, request))
                self._changed.wait(POLL_S)
            self._check()
            while_waiting()

    def _check(self) -> None:
        self._worker.check()
        if self._error is not None:
            raise InboxError(
                f"receiving from the rollout process failed: {type(self._error).__name__}: {self._error}"
            ) from self._error

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(2)
