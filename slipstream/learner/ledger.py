"""What became of every prompt, and so where a resume begins.

A prompt is settled when each of its samples was trained in a finished optimizer step or dropped with a reason.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

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

    final = True


@dataclass
class History:
    """What a checkpoint keeps of the ledger, so that a resumed one goes on as if nothing had happened.

    Attributes:
        outcomes: samples by outcome, of the settled prompts of each epoch that is not over.
        split: by number, the row, outcomes and versions so far of prompts of which some samples are trained already.
    """

    outcomes: dict[int, dict[str, int]] = field(default_factory=dict)
    split: dict[int, dict[str, Any]] = field(default_factory=dict)


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
        self._epoch_outcomes: dict[int, Counter[str]] = {}  # of the epochs that are not over
        self._epoch_settled: Counter[int] = Counter()
        if length is not None:
            epoch, begun = divmod(self._first, length)
            self._epoch_settled = Counter({epoch: begun}) + Counter(number // length for number in self._beyond)
        self._starts: dict[int, int] = {}  # number of the first prompt of an epoch
        self._over: set[int] = set()
        self._epoch = self._judged_from = 0
        self._step = self._last_step = 0

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

    @property
    def last_step(self) -> int:
        """The last step that a line names, or that has finished."""
        return max(self._step, self._last_step)

    def start_at(self, step: int) -> None:
        """Say which optimizer step was finished last."""
        self._step = step

    @property
    def history(self) -> History:
        """What a checkpoint must keep besides the position."""
        split = {number: entry for number, entry in self._open.items() if number in self.partly_trained()}
        return History(
            {epoch: dict(counts) for epoch, counts in sorted(self._epoch_outcomes.items())},
            {n: {"row": e.row_index, "outcomes": dict(e.outcomes), "versions": e.versions} for n, e in split.items()},
        )

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and position of the first unsettled prompt. Without a length: of the first epoch that is not over."""
        if self._length is not None:
            return divmod(self._first, self._length)
        return self._epoch, self._first - self._starts.get(self._epoch, self._first)

    def restore(self, samples: Iterable[Sample], history: History | None = None, epoch: int = 0) -> None:
        """Take over what a checkpoint held: its history (None: it kept none), and the remainder of split groups.

        Epochs that are begun by then count as trained in where the checkpoint kept no history. `epoch` is that in which
        a dataset without a length starts over.
        """
        self._epoch = epoch
        if history is None:
            self._judged_from = (epoch if self._length is None else self._last_begun()) + 1
        else:
            self._epoch_outcomes = {e: Counter(counts) for e, counts in history.outcomes.items()}
        for sample in samples:
            split = history.split.get(sample.number, {}) if history else {}
            at, position = divmod(sample.number, self._length or sys.maxsize)
            entry = _Open(at, position, split.get("row", -1), 0, True, Counter(split.get("outcomes", {})))
            entry.versions += split.get("versions", [])
            self._open.setdefault(sample.number, entry).outstanding += 1

    def _last_begun(self) -> int:
        assert self._length is not None
        last = max([self._first - 1, *self._beyond])
        return last // self._length if last >= 0 else -1

    def arrived(self, result: GroupResult) -> None:
        """A group came from the rollout process."""
        entry = _Open(
            result.epoch, result.position, result.row_index, len(result.samples), outcomes=Counter(result.dropped)
        )
        self._open[result.number] = entry
        begins = result.epoch not in self._starts
        self._starts[result.epoch] = result.number - result.position
        self._settle_if_done(result.number)
        if begins:
            self._close_epoch(result.epoch - 1)

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
        self._last_step = self.step_in_progress if step is None else step
        self._write(
            {
                "number": number,
                "epoch": entry.epoch,
                "prompt": entry.position,
                "row": entry.row_index,
                "outcomes": dict(entry.outcomes),
                "step": self._last_step,
                "versions": [min(entry.versions), max(entry.versions)] if entry.versions else [],
            }
        )
        self._beyond.add(number)
        while self._first in self._beyond:
            self._beyond.remove(self._first)
            self._first += 1
        self._epoch_settled[entry.epoch] += 1
        self._epoch_outcomes.setdefault(entry.epoch, Counter()).update(entry.outcomes)
        self._close_epoch(entry.epoch)

    def _close_epoch(self, epoch: int) -> None:
        """Where each prompt of the epoch is settled, it is over; one of unknown length only once the next has begun."""
        size = self._length
        if size is None and epoch in self._starts and epoch + 1 in self._starts:
            size = self._starts[epoch + 1] - self._starts[epoch]
        if size is None or self._epoch_settled[epoch] < size or epoch in self._over:
            return
        self._over.add(epoch)
        while self._epoch in self._over:
            self._epoch += 1
        outcomes = self._epoch_outcomes.pop(epoch, Counter())
        if not outcomes[TRAINED] and epoch >= self._judged_from:
            self._raise_nothing_trained(f"epoch {epoch} is over", outcomes)

    def data_ended(self) -> None:
        """The data is over, and the last step has finished. Raises NothingTrained where it came to nothing."""
        if self._length is None and self._starts:
            last = max(self._starts)
            self._starts[last + 1] = self._first
            self._close_epoch(last)
        if self._step == 0:  # also where the data was less than an epoch
            self._raise_nothing_trained("the data is over", sum(self._epoch_outcomes.values(), Counter()))

    def _raise_nothing_trained(self, what: str, outcomes: Counter[str]) -> NoReturn:
        counts = ", ".join(f"{reason}: {count}" for reason, count in outcomes.most_common()) or "there was no prompt"
        diagnosis = self._diagnose()
        raise NothingTrained(
            f"{what} and not one sample was trained ({counts}). zero_std: every rollout of a prompt got the same reward, "
            "so the prompts are too easy or too hard, or the reward never tells answers apart; stale: raise "
            "max_staleness; oversize: raise token_budget" + (f".\nThe rewards: {diagnosis}" if diagnosis else "")
        )
