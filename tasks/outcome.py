"""How a run ends."""

import shlex
import time
from dataclasses import dataclass
from typing import Any

from cluster.decide import Kind
from slipstream.run_folder import DamagedFile, RunFolder, read_object, write_json


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt: `kind` is finish, fail or cancelled; `log` and `last_lines` explain a failure."""

    kind: Kind
    reason: str
    role: str | None = None
    log: str = ""
    last_lines: str = ""

    def told(self, run_dir: str) -> "Outcome":
        """Itself, of a run that finished. Raises RunFailed and RunCancelled for the others."""
        if self.kind is Kind.FAIL:
            raise RunFailed(run_dir, self)
        if self.kind is Kind.CANCELLED:
            raise RunCancelled(run_dir, self.reason)
        return self


class RunFailed(Exception):
    """A run failed: which part, why, and what its log says last."""

    def __init__(self, run_dir: str, outcome: Outcome) -> None:
        self.run_dir = run_dir
        self.outcome = outcome
        super().__init__(run_dir, outcome)  # so that it survives a pickle

    @property
    def role(self) -> str | None:
        return self.outcome.role

    @property
    def reason(self) -> str:
        return self.outcome.reason

    @property
    def last_lines(self) -> str:
        return self.outcome.last_lines

    def __repr__(self) -> str:
        return f"RunFailed({self.outcome.reason!r})"

    def __str__(self) -> str:
        text = f"the run failed: {self.outcome.reason}"
        if self.outcome.last_lines:
            text += f"\n--- last lines of {self.outcome.log}\n{self.outcome.last_lines}\n---"
        text += f"\ncontinue once the cause is mended: slipstream resume {shlex.quote(self.run_dir)}"
        return text


class RunCancelled(Exception):
    """A person (or a signal) asked the run to stop."""

    def __init__(self, run_dir: str, reason: str) -> None:
        self.run_dir = run_dir
        self.reason = reason
        super().__init__(run_dir, reason)

    def __str__(self) -> str:
        return f"the run was stopped: {self.reason}"


class NothingToResume(Exception):
    """The run has finished, or its folder cannot be continued; the text says why and what to do instead."""


def outcome_of(error: BaseException) -> Outcome:
    """How a run ended of which `error` came out."""
    if isinstance(error, RunFailed):
        return error.outcome
    if isinstance(error, RunCancelled):
        return Outcome(Kind.CANCELLED, error.reason)
    if isinstance(error, Exception):
        return Outcome(Kind.FAIL, f"{type(error).__name__}: {error}")
    return Outcome(Kind.CANCELLED, f"interrupted by {type(error).__name__}")


def read_outcome(run: RunFolder) -> Outcome | None:
    """How the run ended; None while it has not. Raises DamagedFile."""
    path = run.path / "outcome.json"
    value = read_object(path)
    if not value:
        return None
    texts = {name: str(value.get(name) or "") for name in ("reason", "log", "last_lines")}
    kinds = (Kind.FINISH, Kind.FAIL, Kind.CANCELLED)
    if value.get("kind") not in kinds:
        raise DamagedFile(f"{path} is damaged: its kind is {value.get('kind')!r}, which is none of {', '.join(kinds)}")
    return Outcome(Kind(value["kind"]), role=value.get("role"), **texts)


def write_outcome(run: RunFolder, outcome: Outcome, attempt: int) -> None:
    write_json(run.path / "outcome.json", outcome_record(outcome, attempt, time.time()))


def outcome_record(outcome: Outcome, attempt: int, when: float) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "kind": str(outcome.kind),
        "role": outcome.role,
        "reason": outcome.reason,
        "log": outcome.log,
        "last_lines": outcome.last_lines,
        "time": when,
    }
