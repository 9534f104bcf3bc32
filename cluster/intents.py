"""What stands on storage before a job is submitted: whoever dies in between leaves something to find the job by."""

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil

from cluster.jobs import UNRECORDED, JobRecord, read_jobs
from cluster.local_jobs import SAME_S, started
from slipstream.run_folder import RunFolder, read_object, write_json


def intent_file(run: RunFolder, role: str, attempt: int, incarnation: str) -> Path:
    return run.path / "intents" / f"{attempt}-{role}-{incarnation}.json"


def write_intent(run: RunFolder, role: str, attempt: int, incarnation: str, executor: str, why: str) -> dict[str, Any]:
    """Raises OSError."""
    intent = {
        "role": role,
        "attempt": attempt,
        "incarnation": incarnation,
        "executor": executor,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": started(psutil.Process()),
        "time": time.time(),
        "why": why,
    }
    write_json(intent_file(run, role, attempt, incarnation), intent)
    return intent


def record_of(run: RunFolder, intent: dict[str, Any], job_id: str, start_time: float = 0.0) -> JobRecord:
    return JobRecord(
        run_id=run.run_id,
        role=str(intent["role"]),
        attempt=int(intent["attempt"]),
        incarnation=str(intent["incarnation"]),
        executor=str(intent["executor"]),
        job_id=job_id,
        host=str(intent["host"]),
        start_time=start_time,
        submitted=float(intent["time"]),
        why=str(intent["why"]),
    )


def open_intents(run: RunFolder, recorded: set[str]) -> list[dict[str, Any]]:
    """Intents that are not void, of incarnations that are not in `recorded`."""
    found = []
    for path in sorted((run.path / "intents").glob("*.json")):
        with contextlib.suppress(ValueError, OSError, TypeError):
            intent = read_object(path, "time", "attempt")
            if intent.get("incarnation") and intent["incarnation"] not in recorded:
                found.append(intent)
    return found


def unrecorded_jobs(run: RunFolder) -> list[JobRecord]:
    """Jobs of which only the intent is on storage: whoever submitted them died in between. Found by their mark.

    An intent that is damaged keeps nobody from stopping the others.
    """
    known = {job.incarnation for attempt in run.attempts() for job in read_jobs(run, attempt)}
    found = []
    for intent in open_intents(run, known):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found.append(record_of(run, intent, UNRECORDED))
    return found


def void_intent(run: RunFolder, intent: dict[str, Any]) -> None:
    """The job was certainly not submitted. Idempotent."""
    path = intent_file(run, intent["role"], intent["attempt"], intent["incarnation"])
    with contextlib.suppress(FileNotFoundError):
        path.rename(path.with_suffix(".void"))


def writer_lives(intent: dict[str, Any]) -> bool | None:
    """Whether the process that wrote the intent still runs; None where it was another host's."""
    if intent.get("host") != socket.gethostname():
        return None
    try:
        process = psutil.Process(int(intent.get("pid", 0)))
        return abs(started(process) - float(intent.get("pid_started", 0))) <= SAME_S and (
            process.status() != psutil.STATUS_ZOMBIE
        )
    except (psutil.Error, ValueError):
        return False
