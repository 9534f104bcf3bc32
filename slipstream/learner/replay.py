"""Recorded groups in place of live rollouts: the same samples, whatever the timing.

One rank against two, resumed against uninterrupted, packed against plain can only be compared on the same samples.
"""

import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.learner.pipeline import Pipeline, Resumed
from slipstream.learner.sync import PolicySync
from slipstream.rollout.types import GroupResult

if TYPE_CHECKING:
    from slipstream.learner.trainer import AsyncGRPOTrainer


class Recorder:
    """Appends every group to a file, in the order of arrival."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, group: GroupResult) -> None:
        with open(self._path, "ab") as file:
            pickle.dump(group, file)


def recorded(path: Path) -> Iterator[GroupResult]:
    """The groups that a `Recorder` wrote; a torn last one is left out. Only open what you recorded yourself (pickle)."""
    with open(path, "rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return


class ReplaySource:
    """Hands out groups from a list."""

    def __init__(self, groups: Iterable[GroupResult]) -> None:
        self._groups = deque(groups)

    @property
    def num_samples(self) -> int:
        return sum(len(group.samples) for group in self._groups)

    def take(self) -> GroupResult | None:
        return self._groups.popleft() if self._groups else None

    def publish(self, allowance_total: int) -> None:
        """A list needs no leave to go on."""

    def step_awaited(self) -> None:
        """All groups are here."""

    def step_planned(self) -> None:
        """Nobody waits."""


class ReplayPipeline(Pipeline):
    """Trains on given groups; there is no server and no rollout process."""

    def __init__(
        self,
        trainer: "AsyncGRPOTrainer",
        groups: Iterable[GroupResult],
        token_budget: int,
        resumed: Resumed | None = None,
    ) -> None:
        super().__init__(trainer, ReplaySource(groups), token_budget, resumed)

    def make_sync(self, version: int) -> PolicySync:
        return PolicySync(None, "replay", self._trainer.args.attempt, None, version)

    def set_version(self, version: int) -> None:
        """No one else needs to know."""
