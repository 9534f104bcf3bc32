"""The thread on rank 0 that drafts the next step while one is trained."""

import threading
from typing import Protocol

from slipstream.learner.draft import Draft
from slipstream.rollout.types import GroupResult

POLL_S = 0.2


class Source(Protocol):
    """Where groups come from."""

    @property
    def num_samples(self) -> int:
        """Samples that wait."""

    def take(self) -> GroupResult | None:
        """The next group, or None at the end of the data. Blocks. Called by the planner."""

    def publish(self, allowance_total: int) -> None:
        """Let generation go on until this running total of tokens."""

    def step_awaited(self) -> None:
        """The trainer does nothing until its step is planned."""

    def step_planned(self) -> None:
        """The trainer has all that its step needs, and waits no more."""


class Planner(Protocol):
    """Works on one draft at a time."""

    def begin(self, draft: Draft) -> None:
        """Work on this one from now on; one that is not done is left once its `take` has returned."""

    def wait(self, draft: Draft) -> None:
        """Return once the draft is done or has events, or after a while."""

    def close(self) -> None:
        """Stop. The source does not block `take` any more."""


class PlannerThread:
    """The planner of a training."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._changed = threading.Condition()
        self._draft: Draft | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def begin(self, draft: Draft) -> None:
        with self._changed:
            self._draft = draft
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="planner", daemon=True)
            self._thread.start()

    def wait(self, draft: Draft) -> None:
        with self._changed:
            if not draft.done and not draft.has_events:
                self._changed.wait(POLL_S)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            if self._draft is not None:
                self._draft.abandoned = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(10)

    def _run(self) -> None:
        last: Draft | None = None
        while True:
            with self._changed:
                while not self._closed and self._draft is last:
                    self._changed.wait()
                if self._closed:
                    return
                last = self._draft
            assert last is not None
            try:
                self._work(last)
            except BaseException as error:  # raised where the step is waited for: nobody else would notice
                last.fail(error)
            self._tell()

    def _work(self, draft: Draft) -> None:
        draft.begin()
        while draft.needs_group and not draft.abandoned:
            self._tell()
            if draft.awaited:
                draft.saw_queue(self._source.num_samples)
            draft.add(self._source.take())
        if not draft.abandoned:
            draft.finish()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()
