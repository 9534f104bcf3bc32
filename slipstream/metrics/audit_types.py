"""What an audit reads and what it finds: plain values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Line = Mapping[str, Any]


class Fault(StrEnum):
    """What an audit can find."""

    TWICE = "settled twice"
    NEVER = "never settled"
    VOID_ONLY = "settled by a void record only"
    OUTCOMES = "outcomes do not add up"
    LINE = "impossible ledger line"
    STEP_MISSING = "step missing"
    STEP_TWICE = "step twice"
    CHECKPOINT = "checkpoint disagrees with the ledger"
    FENCE = "fence disagrees with its checkpoint"
    UNREADABLE = "unreadable record"


@dataclass(frozen=True)
class Finding:
    """One fault; `text` names prompts, attempts and steps."""

    fault: Fault
    text: str

    def __str__(self) -> str:
        return f"{self.fault}: {self.text}"


@dataclass(frozen=True)
class CheckpointRecord:
    """A complete checkpoint.

    Attributes:
        attempt: in whose output folder it lies.
        path: relative to the run folder.
        state: its `rollout_state.json`.
        held: number of samples that it holds back, by prompt number.
    """

    attempt: int
    step: int
    path: str
    state: Line
    held: Mapping[int, int] = field(default_factory=dict)

    @property
    def known(self) -> int:
        """The last step whose ledger lines it knows."""
        step = self.state.get("ledger_step")
        return self.step if step is None else int(step)


@dataclass(frozen=True)
class AttemptRecords:
    """All that one attempt left.

    Attributes:
        left: the step at which it saved and left because a signal said so.
        why: why it was begun, in words: what ended the one before.
        faults: what was recovered from without a new attempt, in words.
        unreadable: places in its records that hold no record.
    """

    number: int
    fence: Line
    ledger: Sequence[Line] = ()
    metrics: Sequence[Line] = ()
    checkpoints: Sequence[CheckpointRecord] = ()
    left: int | None = None
    why: str = ""
    faults: Sequence[str] = ()
    unreadable: Sequence[str] = ()


@dataclass(frozen=True)
class RunRecords:
    """All that a run left.

    Attributes:
        max_steps, num_train_epochs, num_generations, logging_steps, max_staleness: as configured.
        result: what the finished learner wrote; None while it has not finished.
    """

    attempts: Sequence[AttemptRecords]
    num_generations: int
    max_steps: int = -1
    num_train_epochs: float = 1.0
    logging_steps: int = 1
    max_staleness: int = 4
    result: Line | None = None

    @property
    def checkpoints(self) -> list[CheckpointRecord]:
        return [checkpoint for attempt in self.attempts for checkpoint in attempt.checkpoints]

    @property
    def length(self) -> int | None:
        """Prompts in the dataset; None for an iterable one, and where no checkpoint is left to tell."""
        states = [checkpoint.state for checkpoint in self.checkpoints]
        return states[-1].get("dataset_length") if states else None

    @property
    def iterable(self) -> bool:
        return bool(self.checkpoints) and self.length is None


@dataclass(frozen=True)
class Attempt:
    """A row of the table of attempts. `redone`: steps that the one before had made and this one had to make again."""

    number: int
    began_from: int
    reached: int
    redone: int
    why: str
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Audit:
    """What is proved about a run, and what speaks against it.

    Attributes:
        finished: whether the run has a result.
        settled: prompts settled exactly once or more, over all epochs.
        expected: prompts that the finished run must have settled; None where its steps, or its stream, decide that.
        repeated: prompts of an iterable dataset that a resume had to generate again.
        void: ledger lines that a later fence made void.
        open: prompts not settled although later ones are, as ranges; no fault while they may be in flight.
    """

    finished: bool
    settled: int
    expected: int | None
    repeated: int
    void: int
    open_count: int
    open: str
    attempts: tuple[Attempt, ...]
    findings: tuple[Finding, ...]

    @property
    def clean(self) -> bool:
        return not self.findings

    @property
    def redone(self) -> int:
        return sum(attempt.redone for attempt in self.attempts)


def ranges(numbers: Iterable[int], most: int = 8) -> str:
    """Numbers in words: "3, 5-9 and 12 more"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans[:most])
    rest = sum(b - a + 1 for a, b in spans[most:])
    return f"{shown} and {rest} more" if rest else shown
