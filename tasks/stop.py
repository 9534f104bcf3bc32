"""Stopping a run: who and why on storage first, then the jobs."""

import time

from cluster.jobs import JobRecord
from cluster.local_jobs import cancel_jobs
from slipstream.run_folder import RunFolder, write_json
from tasks.claim import superseded
from tasks.interrupt import uninterrupted
from tasks.prepare import all_jobs, log_event

# A learner finishes its step and leaves; a server ends its requests. Longer than the leaders' own grace for children.
GRACE_S = 40.0


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


def request_own_cancel(run: RunFolder, attempt: int, who: str, why: str) -> None:
    """`request_cancel` by the process that drives `attempt`; nothing where a later attempt has taken the run over."""
    if superseded(run, attempt) is None:
        request_cancel(run, who, why)


def stop_jobs(run: RunFolder, attempt: int, grace_s: float = GRACE_S) -> list[JobRecord]:
    """Stop every live job of this attempt and of earlier ones. Returns those that were alive.

    Idempotent, and not broken by a second Ctrl-C. A later attempt is another supervisor's.
    """
    with uninterrupted():
        stopped = cancel_jobs([job for job in all_jobs(run) if job.attempt <= attempt], grace_s)
        if stopped:
            log_event(run, attempt, "stopped: " + ", ".join(f"{job.role} (job {job.job_id})" for job in stopped))
    return stopped


def stop(run: RunFolder, who: str, why: str, grace_s: float = GRACE_S) -> list[JobRecord]:
    """Stop a run from outside: its supervisor sees the request, and its jobs are stopped even where none lives."""
    request_cancel(run, who, why)
    with uninterrupted():
        return cancel_jobs(all_jobs(run), grace_s)
