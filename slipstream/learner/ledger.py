"""What became of every prompt, and so where a resume begins.

A prompt is settled when each of its samples was trained in a finished optimizer step or dropped with a reason.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.packing.sample import Sample
from slipstream.rollout.setup import Position
from slipstream.rollout.types import TRAINED, GroupResult


@dataclass
class _Open:
    """A prompt with samples that are neither trained nor dropped yet."""

    epoch: int
    position: int
    row_index: int
    outstanding: int
    restored: bool = False
    outcomes: Counter[str] = field(default_factory=Counter)
    versions: list[int] = field(default_factory=list)


class NothingTrained(RuntimeError):
    """A whole epoch went by without one trained sample."""


class Ledger:
    """Settles prompts. Single-threaded: everything happens on the training thread, so a line's step is unambiguous.

    What the planner finds while a step is trained is said here once the next step is asked for, so that a checkpoint of
    the step in between does not hold it, and its line names the step that a resume from there voids.
    """

    def __init__(
        self,
        length: int | None,
        position: Position,
        write: Callable[[dict[str, Any]], None] = lambda line: None,
        diagnose: Callable[[], str] = lambda: "",
    ) -> None:
        """
        Args:
            length: prompts in the dataset; None where it is not known.
            write: where lines go.
            diagnose: what the rewards say, should nothing be trained.
        """
        self._length = length
        self._first = position.first_unsettled
        self._beyond = set(position.settled_beyond)
        self._write = write
        self._diagnose = diagnose
        self._open: dict[int, _Open] = {}
        self._in_step: dict[int, list[int]] = {}
        self._epoch_settled: Counter[int] = Counter()
        self._epoch_outcomes: dict[int, Counter[str]] = {}
        self._step = 0

    @property
    def position(self) -> Position:
        """The first unsettled prompt number, and the numbers settled beyond it."""
        return Position(self._first, frozenset(self._beyond))

    @property
    def settled(self) -> int:
        """Prompts settled so far, over all epochs."""
        return self._first + len(self._beyond)

    @property
    def step_in_progress(self) -> int:
        return self._step + 1

    def start_at(self, step: int) -> None:
        """Say which optimizer step was finished last."""
        self._step = step

    def restore(self, samples: Iterable[Sample]) -> None:
        """Open the groups whose remainder a checkpoint held."""
        for sample in samples:
            epoch, position = divmod(sample.number, self._length or sys.maxsize)
            self._open.setdefault(sample.number, _Open(epoch, position, -1, 0, restored=True)).outstanding += 1

    def arrived(self, result: GroupResult) -> None:
        """A group came from the rollout process."""
        entry = _Open(
            result.epoch, result.position, result.row_index, len(result.samples), outcomes=Counter(result.dropped)
        )
        self._open[result.number] = entry
        self._settle_if_done(result.number)

    def dropped(self, sample: Sample, reason: str) -> None:
        entry = self._open[sample.number]
        entry.outstanding -= 1
        entry.outcomes[reason] += 1
        self._settle_if_done(sample.number)

    def in_step(self, oldest_versions: Mapping[int, list[int]]) -> None:
        """Samples that are in the step being trained, by prompt number; they count once it has finished."""
        for number, versions in oldest_versions.items():
            self._in_step.setdefault(number, []).extend(versions)

    def step_finished(self) -> None:
        """The optimizer step is done: what was in it is trained."""
        self._step += 1
        trained, self._in_step = self._in_step, {}
        for number, versions in trained.items():
            entry = self._open[number]
            entry.outstanding -= len(versions)
            entry.outcomes[TRAINED] += len(versions)
            entry.versions += versions
            self._settle_if_done(number, self._step)

    def partly_trained(self) -> set[int]:
        """Numbers of open prompts of which a finished step, here or before a resume, has trained some samples already."""
        return {number for number, entry in self._open.items() if entry.restored or entry.outcomes[TRAINED]}

    def _settle_if_done(self, number: int, step: int | None = None) -> None:
        entry = self._open[number]
        if entry.outstanding > 0:
            return
        del self._open[number]
        self._write(
            {
                "number": number,
                "epoch": entry.epoch,
                "prompt": entry.position,
                "row": entry.row_index,
                "outcomes": dict(entry.outcomes),
                "step": self.step_in_progress if step is None else step,
                "versions": [min(entry.versions), max(entry.versions)] if entry.versions else [],
            }
        )
        self._beyond.add(number)
        while self._first in self._beyond:
            self._beyond.remove(self._first)
            self._first += 1
        self._close_epoch(entry)

    def _close_epoch(self, entry: _Open) -> None:
        self._epoch_settled[entry.epoch] += 1
        outcomes = self._epoch_outcomes.setdefault(entry.epoch, Counter())
        outcomes.update(entry.outcomes)
        if self._length is None or self._epoch_settled[entry.epoch] < self._length:
            return
        if not outcomes[TRAINED]:
            counts = ", ".join(f"{reason}: {count}" for reason, count in outcomes.most_common())
            diagnosis = self._diagnose()
            raise NothingTrained(
                f"epoch {entry.epoch} is over and not one sample was trained ({counts}). zero_std: every rollout of a "
                "prompt got the same reward, so the prompts are too easy or too hard, or the reward never tells answers "
                "apart; stale: raise max_staleness; oversize: raise token_budget"
                + (f".\nThe rewards: {diagnosis}" if diagnosis else "")
            )


def audit(lines: Iterable[dict[str, Any]], length: int, epochs: int | None = None) -> list[str]:
    """Check that each prompt of each epoch was settled exactly once; what is wrong, in words.

    Args:
        lines: ledger lines of all attempts, without the void ones (`RunFolder.merged_records("ledger.jsonl")`).
        length: prompts in the dataset.
        epochs: whole epochs that must be there; None checks only that nothing was settled twice.
    """
    counts = Counter((line["epoch"], line["prompt"]) for line in lines)
    problems = [f"epoch {e}, prompt {p}: settled {c} times" for (e, p), c in sorted(counts.items()) if c > 1]
    for epoch in range(epochs or 0):
        missing = [p for p in range(length) if (epoch, p) not in counts]
        if missing:
            problems.append(f"epoch {epoch}: {len(missing)} prompts not settled, the first is {missing[0]}")
    return problems
