"""Recorded groups in place of live rollouts: the same samples, whatever the timing.

One rank against two, resumed against uninterrupted, packed against plain can only be compared on the same samples.
"""

import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.learner.pipeline import Pipeline, Resumed
from slipstream.learner.sync import PolicySync
from slipstream.rollout.types import GroupResult

if TYPE_CHECKING:
    from slipstream.learner.trainer import AsyncGRPOTrainer


RECORDING = "samples.pickle"


class NotARecording(ValueError):
    """A file does not begin as a `Recorder` begins it."""


class Recorder:
    """Writes every group to a new file, in the order of arrival, behind the token budget of a row."""

    def __init__(self, path: Path, token_budget: int) -> None:
        """Raises OSError where the file cannot be written; so does a call."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            pickle.dump({"token_budget": token_budget}, file)

    def __call__(self, group: GroupResult) -> None:
        with open(self._path, "ab") as file:
            pickle.dump(group, file, protocol=5)


def _read(path: Path) -> Iterator[Any]:
    with open(path, "rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return


def recorded_budget(path: Path) -> int:
    """The token budget of the recorded training. Raises NotARecording."""
    header = next(_read(path), None)
    if not isinstance(header, dict) or "token_budget" not in header:
        raise NotARecording(f"{path} is no recording of samples: set record_samples = true in the run to be replayed")
    return int(header["token_budget"])


def recorded(path: Path) -> Iterator[GroupResult]:
    """The groups that a `Recorder` wrote; a torn last one is left out. Only open what you recorded yourself (pickle)."""
    for group in _read(path):
        if isinstance(group, GroupResult):
            for sample in group.samples:
                sample.queued_at = 0.0  # by a clock that may have begun anew since
            yield group


class ReplaySource:
    """Hands out groups from a list."""

    def __init__(self, groups: Iterable[GroupResult]) -> None:
        self._groups = deque(groups)
        self.num_samples = sum(len(group.samples) for group in self._groups)

    def take(self) -> GroupResult | None:
        if not self._groups:
            return None
        group = self._groups.popleft()
        self.num_samples -= len(group.samples)
        return group

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
