"""What the supervisor keeps on storage: which jobs count, why others were given up, and what it said."""

import contextlib
import time
from dataclasses import asdict, fields
from typing import Any

from cluster.jobs import JobRecord, read_jobs
from cluster.recovery import Fault
from slipstream.run_folder import RunFolder, append_jsonl, read_json, read_jsonl, write_json

FAULTS = "faults.jsonl"


def assignment(run: RunFolder) -> dict[str, Any]:
    """Which job of each role counts. Raises OSError: whoever starts jobs must not take no answer for none."""
    with contextlib.suppress(ValueError):
        value = read_json(run.assignment_file)
        if isinstance(value, dict):
            return value
    return {}


def assign(run: RunFolder, attempt: int, **roles: str | None) -> dict[str, Any]:
    """Say on storage which job of each role counts from now on; None takes a role's job away. Returns the whole.

    Raises OSError.
    """
    value = {**assignment(run), "attempt": attempt, **roles}
    value = {key: item for key, item in value.items() if item is not None}
    write_json(run.assignment_file, value)
    return value


def assigned_jobs(run: RunFolder) -> tuple[dict[str, JobRecord], list[str]]:
    """The job of each role that counts, and roles whose job is assigned but has no record. Raises OSError."""
    named = {role: str(item) for role, item in assignment(run).items() if role != "attempt"}
    records = {job.incarnation: job for attempt in run.attempts() for job in read_jobs(run, attempt)}
    found = {role: records[incarnation] for role, incarnation in named.items() if incarnation in records}
    return found, [role for role in named if role not in found]


def read_faults(run: RunFolder) -> tuple[Fault, ...]:
    """All faults of the run since it was last started by a person, oldest first."""
    names = {field.name for field in fields(Fault)}
    found: list[Fault] = []
    for line in read_jsonl(run.path / "records" / FAULTS):
        if line.get("kind") == "resumed":  # by a person, who knows why
            found = []
            continue
        with contextlib.suppress(TypeError):
            values = {key: value for key, value in line.items() if key in names}
            found.append(Fault(**{**values, "nodes": tuple(values.get("nodes", ()))}))
    return tuple(found)


def record_fault(run: RunFolder, fault: Fault) -> None:
    append_jsonl(run.path / "records" / FAULTS, asdict(fault))


def forgive(run: RunFolder, attempt: int) -> None:
    """A person starts the run again: earlier faults do not count any more."""
    line = {"time": time.time(), "attempt": attempt, "kind": "resumed"}
    append_jsonl(run.path / "records" / FAULTS, line)


def log_event(run: RunFolder, attempt: int, event: str) -> None:
    """Append to the supervisor's own event file of the attempt, where the storage takes it: no run ends for a note."""
    with contextlib.suppress(OSError):
        append_jsonl(run.records(attempt) / "supervisor.jsonl", {"time": time.time(), "event": event})


def run_step(run: RunFolder) -> int:
    """Optimizer steps that the run has done, as far as its records count."""
    step = 0
    attempt = (run.attempts() or [0])[-1]
    if attempt:
        step = int(run.fence(attempt).get("step", 0))
    with contextlib.suppress(ValueError, OSError):
        beat = read_json(run.heartbeat_file("learner")) or {}
        if beat.get("attempt") == attempt:
            step = max(step, int(beat.get("step") or 0))
    return step
