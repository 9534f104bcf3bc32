"""What the page of a run shows, read from its folder alone.

A part that cannot be read (storage that stumbles, a damaged record) is left out: a page ends no run.
"""

import json
import os
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cluster.jobs import JobState, exit_record
from cluster.recovery import RELEASED
from flows.cli.snapshot import Snapshot, take_snapshot
from flows.masking import Mask
from slipstream.metrics.report import LATEST
from slipstream.run_folder import RunFolder, is_number, read_jsonl, read_object
from tasks.observe import heartbeat, newest_attempt
from tasks.outcome import Outcome, read_outcome
from tasks.records import FAULTS, assigned_jobs

SAMPLES = 4
TAIL_BYTES = 2 * 1024 * 1024  # of a file of completions
RECENT_WINDOWS = 20  # that the time of a step is taken from
ENDED = "ended"

Value = TypeVar("Value")


@dataclass(frozen=True)
class JobRow:
    """A job that counts: its state as the supervisor saw it last."""

    role: str
    job_id: str
    state: str
    where: str = ""
    reason: str = ""
    log: str = ""


@dataclass(frozen=True)
class Recovery:
    """A job that was started again. `step_after` and `seconds`: the next step that was logged, and how long it took.

    `key` tells it from all others of the run.
    """

    key: str
    time: float
    attempt: int
    role: str
    kind: str
    step: int
    reason: str
    step_after: int | None = None
    seconds: float | None = None

    @property
    def counts(self) -> bool:
        """Whether something had gone wrong: nodes that idled are given back without that."""
        return self.kind != RELEASED


@dataclass(frozen=True)
class Sample:
    """A prompt and what the policy made of it."""

    step: int
    prompt: str
    completion: str
    reward: float | None


@dataclass(frozen=True)
class Facts:
    """A run as its page shows it. `share`: done of the whole, 0 to 1; None where the end is not known."""

    run_id: str
    folder: str
    snapshot: Snapshot
    share: float | None = None
    left_s: float | None = None
    jobs: tuple[JobRow, ...] = ()
    recoveries: tuple[Recovery, ...] = ()
    samples: tuple[Sample, ...] = ()
    samples_wanted: bool = False
    outcome: Outcome | None = None
    outcome_time: float = 0.0
    starts: tuple[int, ...] = ()  # steps at which later attempts began
    settings: dict[str, Any] = field(default_factory=dict)
    mask: Mask = field(default_factory=Mask)


def read_facts(run: RunFolder, mask: Mask) -> Facts:
    """Look at the run now. Raises nothing."""
    none: dict[str, Any] = {}
    settings = _or(none, lambda: tomllib.loads(run.run_file.read_text()))
    trainer = settings.get("trainer")
    trainer = trainer if isinstance(trainer, dict) else {}
    snapshot = _or(Snapshot(run.run_id), lambda: take_snapshot(run))
    not_ended: tuple[Outcome | None, float] = (None, 0.0)
    outcome, ended = _or(not_ended, lambda: _outcome(run))
    share = 1.0 if outcome is not None and outcome.kind == "finish" else done(snapshot, trainer)
    return Facts(
        run_id=run.run_id,
        folder=str(run.path),
        snapshot=snapshot,
        share=share,
        left_s=None if outcome is not None else left_s(snapshot, share),
        jobs=_or((), lambda: _jobs(run, outcome)),
        recoveries=_or((), lambda: recoveries(run)),
        samples=_or((), lambda: _samples(run)),
        samples_wanted=bool(trainer.get("log_completions")),
        outcome=outcome,
        outcome_time=ended,
        starts=_or((), lambda: tuple(int(run.fence(attempt).get("step") or 0) for attempt in run.attempts()[1:])),
        settings=settings,
        mask=mask,
    )


def _or(default: Value, read: Callable[[], Value]) -> Value:
    try:
        return read()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return default


def _outcome(run: RunFolder) -> tuple[Outcome | None, float]:
    outcome = read_outcome(run)
    value = read_object(run.path / "outcome.json")
    when = value.get("time")
    when = when if is_number(when) and 0 <= when < LATEST else 0.0
    counts = outcome is not None and value.get("attempt") in (newest_attempt(run), None)
    return (outcome if counts else None), float(when)


def done(snapshot: Snapshot, trainer: dict[str, Any]) -> float | None:
    """Which share of the run is done: of its steps, or of its passes over the prompts; None where neither is known."""
    if snapshot.max_steps > 0:
        return min(1.0, snapshot.step / snapshot.max_steps)
    epochs, epoch = trainer.get("num_train_epochs"), snapshot.metrics.get("epoch")
    if is_number(epochs) and epochs > 0 and is_number(epoch) and not _positive(trainer.get("max_steps")):
        return min(1.0, max(0.0, epoch / epochs))
    return None


def _positive(value: Any) -> bool:
    return is_number(value) and value > 0


def left_s(snapshot: Snapshot, share: float | None) -> float | None:
    """Seconds until the end at the pace of the newest windows; None where that cannot be said.

    Of the records alone: it changes with them, not with the clock.
    """
    recent = [
        (float(w["time"]), int(w["step"]))
        for w in snapshot.windows
        if w.get("attempt") == snapshot.attempt and is_number(w.get("time")) and is_number(w.get("step"))
    ][-RECENT_WINDOWS:]
    if share is None or not 0 < share < 1 or len(recent) < 2:
        return None
    (began, first), (now, last) = recent[0], recent[-1]
    if last <= first or now <= began or last <= 0:
        return None
    whole = snapshot.max_steps if snapshot.max_steps > 0 else last / share
    return max(0.0, (whole - last) * (now - began) / (last - first))


def _jobs(run: RunFolder, outcome: Outcome | None) -> tuple[JobRow, ...]:
    """The jobs that count. Their states are what the supervisor wrote into its heartbeat: no scheduler is asked."""
    records, missing = assigned_jobs(run)
    seen = heartbeat(run, "supervisor").get("jobs")
    seen = seen if isinstance(seen, dict) else {}
    rows = []
    for role, job in records.items():
        view = seen.get(job.incarnation)
        view = view if isinstance(view, dict) else {}
        state, reason = str(view.get("state") or "submitted"), str(view.get("reason") or "")
        where = ", ".join(str(node) for node in view.get("nodes") or []) or _host(run, role, job.incarnation)
        if outcome is not None and state not in [s.value for s in JobState if s.ended]:
            state = ENDED
            reason = str((exit_record(run, job) or {}).get("reason") or "")
        logs = [run.log_file(part, job.attempt) for part in (["server", "learner"] if role == "allocation" else [role])]
        rows.append(JobRow(role, job.job_id, state, where, reason, " ".join(map(str, logs))))
    return (*rows, *(JobRow(role, "", "being submitted") for role in missing))


def _host(run: RunFolder, role: str, incarnation: str) -> str:
    beat = heartbeat(run, "server-0" if role == "server" else "learner", incarnation)
    return str(beat.get("host") or "")


def recoveries(run: RunFolder) -> tuple[Recovery, ...]:
    """Every job that was given up and started again, oldest first, also from before a person's resume. Raises OSError."""
    logged = sorted(
        (float(line["time"]), int(line["step"]))
        for attempt in run.attempts()
        for line in read_jsonl(run.records(attempt) / "metrics.jsonl")
        if is_number(line.get("time")) and 0 <= line["time"] < LATEST and is_number(line.get("step"))
    )
    found: dict[str, Recovery] = {}
    for line in read_jsonl(run.path / "records" / FAULTS):
        when, step, role = line.get("time"), line.get("step"), line.get("role")
        if not is_number(when) or not 0 <= when < LATEST or not is_number(step) or not isinstance(role, str):
            continue  # a person's resume, or damaged
        after = next(((moment, at) for moment, at in logged if moment > when and at > step), None)
        key = str(line.get("job") or f"{role} {when}")
        attempt = line.get("attempt")
        one = Recovery(
            key=key,
            time=float(when),
            attempt=int(attempt) if is_number(attempt) else 0,
            role=role,
            kind=str(line.get("kind") or ""),
            step=int(step),
            reason=str(line.get("reason") or ""),
            step_after=after[1] if after else None,
            seconds=after[0] - when if after else None,
        )
        found.setdefault(key, one)  # a leader that died before it had given the job up leaves the fault to the next one
    return tuple(found.values())


def _samples(run: RunFolder) -> tuple[Sample, ...]:
    """The newest completions that were recorded."""
    for attempt in reversed(run.attempts()):
        files = sorted((run.records(attempt) / "completions").glob("step-*.jsonl"))
        if files:
            step = int(files[-1].stem.partition("-")[2])
            return tuple(_sample(row, step) for row in _tail(files[-1])[-SAMPLES:])
    return ()


def _tail(path: Path) -> list[dict[str, Any]]:
    """The whole lines at the end of a file that may be large."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").split("\n")
    rows = []
    for line in lines[1:] if size > TAIL_BYTES else lines:
        value = _or(None, lambda line=line: json.loads(line))  # type: ignore[misc]
        if isinstance(value, dict):
            rows.append(value)
    return rows


def _sample(row: dict[str, Any], step: int) -> Sample:
    reward = row.get("reward")
    words = (words_of(row.get("prompt")), words_of(row.get("completion")))
    return Sample(step, *words, float(reward) if is_number(reward) else None)


def words_of(messages: Any) -> str:
    """A prompt or a completion as plain text: a string, or messages, each with its role where there are several."""
    if not isinstance(messages, list):
        return "" if messages is None else str(messages)
    texts = [(str(m.get("role", "?")), str(m.get("content") or "")) for m in messages if isinstance(m, dict)]
    return texts[0][1] if len(texts) == 1 else "\n".join(f"{role}: {content}" for role, content in texts)


def moment(seconds: float) -> str:
    """A time of day that means the same for everybody who looks."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # of a damaged record
        return "unknown"
