"""Records of submitted jobs, and what is known of their state. No decision rests on submitit's result()."""

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

import psutil

from slipstream.run_folder import RunFolder, append_jsonl, read_json, read_jsonl

LEAST_ROOM = 1 << 16  # bytes
JOB_MARK = "SLIPSTREAM_JOB"  # environment variable that every process of a job inherits


class JobState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    UNKNOWN = "unknown"

    @property
    def ended(self) -> bool:
        return self in (JobState.FINISHED, JobState.FAILED)


@dataclass(frozen=True)
class JobRecord:
    """One submitted job, as it stands in jobs/<attempt>.jsonl.

    `start_time` is the controller's creation time (s since the epoch, by psutil): with the pid it names one process for
    ever, so a recycled pid is never taken for the job.
    """

    run_id: str
    role: str
    attempt: int
    incarnation: str
    executor: str
    job_id: str
    host: str
    start_time: float
    submitted: float
    why: str

    @property
    def mark(self) -> str:
        return f"{self.run_id}/a{self.attempt}/{self.role}/{self.incarnation}"


@dataclass(frozen=True)
class JobView:
    """A job's state with what its exit record says, where it left one."""

    state: JobState
    returncode: int | None = None
    reason: str = ""
    log: str = ""
    last_lines: str = ""


def record_job(run: RunFolder, record: JobRecord) -> None:
    append_jsonl(run.jobs_file(record.attempt), asdict(record))


def read_jobs(run: RunFolder, attempt: int) -> list[JobRecord]:
    """All jobs submitted in an attempt, oldest first."""
    names = {field.name for field in fields(JobRecord)}
    return [
        JobRecord(**{key: value for key, value in line.items() if key in names})
        for line in read_jsonl(run.jobs_file(attempt))
    ]


def unrecorded_jobs(run: RunFolder) -> list[JobRecord]:
    """Jobs of which only the intent is on storage: whoever submitted them died in between. Found by their mark."""
    known = {job.incarnation for attempt in run.attempts() for job in read_jobs(run, attempt)}
    found = []
    for path in sorted((run.path / "intents").glob("*.json")):
        intent = read_json(path) or {}
        if intent.get("incarnation") and intent["incarnation"] not in known:
            found.append(
                JobRecord(
                    run_id=run.run_id,
                    role=str(intent["role"]),
                    attempt=int(intent["attempt"]),
                    incarnation=str(intent["incarnation"]),
                    executor=str(intent["executor"]),
                    job_id="0",
                    host=str(intent["host"]),
                    start_time=0.0,
                    submitted=float(intent["time"]),
                    why=str(intent["why"]),
                )
            )
    return found


def latest_job(run: RunFolder, attempt: int, role: str) -> JobRecord | None:
    jobs = [job for job in read_jobs(run, attempt) if job.role == role]
    return jobs[-1] if jobs else None


def exit_record(run: RunFolder, job: JobRecord) -> dict[str, Any] | None:
    """How the leader of `job` says that it ended: the newest record of its role and attempt since its submission."""
    found: list[dict[str, Any]] = []
    for path in (run.path / "exit").glob(f"{job.role}*.json"):
        with contextlib.suppress(ValueError, OSError):
            value = read_json(path)
            if value and value.get("attempt") == job.attempt and value.get("time", 0) >= job.submitted - 1:
                found.append(value)
    return max(found, key=lambda value: value.get("time", 0), default=None)


def find_process(pid: int, start_time: float) -> psutil.Process | None:
    """The process with this pid *and* creation time, None where it is gone (a zombie is gone)."""
    try:
        process = psutil.Process(pid)
        if abs(process.create_time() - start_time) > 0.5 or process.status() == psutil.STATUS_ZOMBIE:
            return None
    except psutil.Error:
        return None
    return process


def disk_is_full(run: RunFolder) -> bool:
    """Whether the run's storage has no room left even for small files."""
    try:
        return shutil.disk_usage(run.path).free < LEAST_ROOM
    except OSError:
        return False


def job_view(run: RunFolder, job: JobRecord) -> JobView:
    """State of a local job, by its controller's process and its exit record; UNKNOWN from another host."""
    if job.host != socket.gethostname():
        return JobView(JobState.UNKNOWN, reason=f"it runs on {job.host}, this is {socket.gethostname()}")
    if find_process(int(job.job_id), job.start_time):
        return JobView(JobState.RUNNING)
    record = exit_record(run, job)
    if record is None:
        why = f"the disk of {run.path} is full" if disk_is_full(run) else "killed, or out of memory"
        return JobView(JobState.FAILED, reason=f"its process is gone and left no exit record ({why})")
    code = int(record.get("returncode", 1))
    return JobView(
        JobState.FINISHED if code == 0 else JobState.FAILED,
        code,
        str(record.get("reason", "")),
        str(record.get("log", "")),
        str(record.get("last_lines", "")),
    )


def job_processes(job: JobRecord) -> list[psutil.Process]:
    """Every live process of a local job: the controller, its descendants, and whatever inherited the job's mark."""
    if job.host != socket.gethostname():
        return []
    found: dict[int, psutil.Process] = {}
    controller = find_process(int(job.job_id), job.start_time)
    if controller:
        found[controller.pid] = controller
        with contextlib.suppress(psutil.Error):
            found |= {child.pid: child for child in controller.children(recursive=True)}
    for process in psutil.process_iter():
        if process.pid in found or process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(JOB_MARK) == job.mark:
                found[process.pid] = process
    return [process for process in found.values() if _alive(process)]


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def cancel_jobs(jobs: Iterable[JobRecord], grace_s: float = 30.0) -> list[JobRecord]:
    """TERM the controllers of local jobs (they forward it to their leaders), wait, KILL what is left.

    Idempotent, bounded by about `grace_s` for all jobs together, and exact: only processes known by pid and creation
    time, or by the mark in their environment, are signalled. Returns the jobs that had live processes.
    """
    families = [(job, job_processes(job)) for job in jobs]
    live = [job for job, processes in families if processes]
    if not live:
        return []
    watched = {process.pid: process for _, processes in families for process in processes}
    for job, processes in families:
        controller = find_process(int(job.job_id), job.start_time)
        # Without its controller the leader has no one to forward the signal: tell the oldest that is left.
        for head in [controller] if controller else sorted(processes, key=lambda p: p.create_time())[:1]:
            with contextlib.suppress(psutil.Error):
                head.terminate()
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        psutil.wait_procs(list(watched.values()), timeout=0.1)
        if not any(_alive(process) for process in watched.values()):
            break
    for _ in range(3):  # a process that was forking while it was killed may leave one more
        left = {p.pid: p for job in live for p in job_processes(job)}
        left |= {pid: process for pid, process in watched.items() if _alive(process)}
        if not left:
            break
        for process in left.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(list(left.values()), timeout=5)
    return live
