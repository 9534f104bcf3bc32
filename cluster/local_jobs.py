"""Local jobs: their state from the controller's process, and their end."""

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Iterable

import psutil

from cluster.jobs import JOB_MARK, JobRecord, JobState, JobView, exit_record, with_exit_record
from slipstream.run_folder import RunFolder

LEAST_ROOM = 1 << 16  # bytes
SAME_S = 0.05  # the kernel counts a process's start in hundredths of a second


def started(process: psutil.Process) -> float:
    """Seconds from the host's boot to the start of `process`: since the epoch it would move with each step of the clock."""
    return process.create_time() - psutil.boot_time()


def find_process(pid: int, start_time: float) -> psutil.Process | None:
    """The process with this pid *and* start (`started`), None where it is gone (a zombie is gone)."""
    try:
        process = psutil.Process(pid)
        if abs(started(process) - start_time) > SAME_S or process.status() == psutil.STATUS_ZOMBIE:
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
    if job.executor != "local":
        return JobView(JobState.UNKNOWN, reason=f"it is no process of this machine, but a job of {job.executor}")
    if job.host != socket.gethostname():
        return JobView(JobState.UNKNOWN, reason=f"it runs on {job.host}, this is {socket.gethostname()}")
    if find_process(int(job.job_id), job.start_time):
        return JobView(JobState.RUNNING, nodes=(job.host,), source="process")
    record = exit_record(run, job)
    if record is None:
        why = f"the disk of {run.path} is full" if disk_is_full(run) else "killed, or out of memory"
        return JobView(JobState.FAILED, reason=f"its process is gone and left no exit record ({why})")
    return with_exit_record(JobView(JobState.FINISHED, source="process"), record)


def job_processes(job: JobRecord) -> list[psutil.Process]:
    """Every live process of a local job: the controller, its descendants, and whatever inherited the job's mark."""
    if job.executor != "local" or job.host != socket.gethostname():
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
        for head in [controller] if controller else sorted(processes, key=started)[:1]:
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
