"""Stopping a run: who and why on storage first, then the jobs."""

import time

from cluster.backend import KILL_AFTER_S
from cluster.jobs import JobRecord
from slipstream.run_folder import RunFolder, write_json
from tasks.interrupt import uninterrupted
from tasks.observe import newest_attempt
from tasks.records import log_event
from tasks.stored import all_jobs, backend_anyway


def request_cancel(run: RunFolder, who: str, why: str) -> bool:
    """Record that the run is to stop; the first request is kept. Returns whether this was recorded.

    A full disk must not keep anybody from stopping the jobs: what cannot be written is left out.
    """
    if run.cancel_file.exists():
        return False
    try:
        write_json(run.cancel_file, {"who": who, "why": why, "time": time.time()})
    except OSError:
        return False
    return True


def stop_jobs(run: RunFolder, kill_after_s: float = KILL_AFTER_S) -> list[JobRecord]:
    """Stop every live job of the run: TERM to all at once, KILL to what is left. Returns those that were alive.

    Idempotent, and not broken by a second Ctrl-C.
    """
    with uninterrupted():
        stopped = backend_anyway(run).cancel(run, all_jobs(run), kill_after_s)
        if stopped:
            said = "stopped: " + ", ".join(f"{job.role} (job {job.job_id})" for job in stopped)
            log_event(run, newest_attempt(run), said)
    return stopped


def stop(run: RunFolder, who: str, why: str, kill_after_s: float = KILL_AFTER_S) -> list[JobRecord]:
    """Stop a run from outside: its supervisor sees the request, and its jobs are stopped even where none lives."""
    request_cancel(run, who, why)
    return stop_jobs(run, kill_after_s)
