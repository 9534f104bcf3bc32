"""Records of submitted jobs, and what is known of their state. No decision rests on submitit's result()."""

import contextlib
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any

from slipstream.run_folder import RunFolder, append_jsonl, is_number, read_jsonl, read_object

UNRECORDED = "0"  # id of a job of which only the intent is on storage
JOB_MARK = "SLIPSTREAM_JOB"  # environment variable that every process of a job inherits


class JobState(StrEnum):
    PENDING = "pending"
    HELD = "held"  # by a person, an administrator, or after a requeue: it does not start by itself
    RUNNING = "running"
    SUSPENDED = "suspended"
    COMPLETING = "completing"  # it is ending; its processes may still run
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    NODE_FAIL = "node failed"
    TIMEOUT = "out of time"
    OUT_OF_MEMORY = "out of memory"
    BOOT_FAIL = "boot failed"
    DEADLINE = "deadline"
    GONE = "gone"  # the scheduler answers, and does not know it any more
    UNKNOWN = "unknown"  # the scheduler does not answer: nothing is known

    @property
    def ended(self) -> bool:
        return self in _ENDED


_ENDED = frozenset(
    {
        JobState.FINISHED,
        JobState.FAILED,
        JobState.CANCELLED,
        JobState.PREEMPTED,
        JobState.NODE_FAIL,
        JobState.TIMEOUT,
        JobState.OUT_OF_MEMORY,
        JobState.BOOT_FAIL,
        JobState.DEADLINE,
        JobState.GONE,
    }
)


@dataclass(frozen=True)
class JobRecord:
    """One submitted job, as it stands in jobs/<attempt>.jsonl.

    `start_time` is the controller's start (`local_jobs.started`, in seconds since the host's boot): with the pid it names
    one process, so a recycled pid is never taken for the job.
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
    """A job's state with what its exit record says, where it left one.

    Attributes:
        returncode: of its leader; None where it left no record.
        reason: why it ended, in its leader's words, or in the scheduler's.
        final: its leader says that starting it again cannot help (a wrong setting, a full disk).
        left: the optimizer step at which it saved and left because a signal said so; else None.
        queue_reason: why the scheduler does not start a pending job, in its words.
        nodes: that it runs or ran on, where the scheduler says.
        lost: those of them that were down once it had ended for a node's sake.
        source: who told the state ("process", "squeue", "scontrol", "sacct").
    """

    state: JobState
    returncode: int | None = None
    reason: str = ""
    log: str = ""
    last_lines: str = ""
    final: bool = False
    left: int | None = None
    queue_reason: str = ""
    nodes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    source: str = ""


def record_job(run: RunFolder, record: JobRecord) -> None:
    append_jsonl(run.jobs_file(record.attempt), asdict(record))


def read_jobs(run: RunFolder, attempt: int) -> list[JobRecord]:
    """All jobs submitted in an attempt, oldest first."""
    return [job for line in read_jsonl(run.jobs_file(attempt)) if (job := _job_of(line)) is not None]


def _job_of(line: dict[str, Any]) -> JobRecord | None:
    """None where the line is damaged: one that says less than a job, or something else."""
    names = [field.name for field in fields(JobRecord)]
    numbers = ("attempt", "start_time", "submitted")
    if any(not (is_number if name in numbers else _is_text)(line.get(name)) for name in names):
        return None
    return JobRecord(**{name: line[name] for name in names})


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def latest_job(run: RunFolder, attempt: int, role: str) -> JobRecord | None:
    jobs = [job for job in read_jobs(run, attempt) if job.role == role]
    return jobs[-1] if jobs else None


def exit_record(run: RunFolder, job: JobRecord) -> dict[str, Any] | None:
    """How the leader of `job` says that it ended; of several nodes the first that failed.

    A record carries the job's incarnation. One without a job's (a leader started by hand) counts for the newest job of
    its role and attempt, if it was written since that was submitted.
    """
    own: list[dict[str, Any]] = []
    other: list[dict[str, Any]] = []
    for path in (run.path / "exit").glob("*.json"):
        with contextlib.suppress(ValueError, OSError):
            value = read_object(path, "time", "returncode", "left")
            if not value:
                continue
            if value.get("incarnation") == job.incarnation:
                own.append(value)
            elif path.name.startswith(job.role) and _may_be_of(value, job):
                other.append(value)
    found = own or sorted(other, key=lambda value: -value.get("time", 0))[:1]
    return min(found, key=lambda value: (value.get("returncode") == 0, value.get("time", 0)), default=None)


def _may_be_of(record: dict[str, Any], job: JobRecord) -> bool:
    return (
        not record.get("job")
        and record.get("attempt") == job.attempt
        and bool(record.get("time", 0) >= job.submitted - 1)
    )


def with_exit_record(view: JobView, record: dict[str, Any] | None) -> JobView:
    """`view` of an ended job, with what its leader recorded; the leader's exit code decides where the job only ended."""
    if record is None:
        return view
    code = int(record.get("returncode", 1))
    state = view.state
    if state in (JobState.FINISHED, JobState.FAILED, JobState.GONE):
        state = JobState.FINISHED if code == 0 else JobState.FAILED
    left = record.get("left")
    return replace(
        view,
        state=state,
        returncode=code,
        reason=str(record.get("reason", "")) or view.reason,
        log=str(record.get("log", "")),
        last_lines=str(record.get("last_lines", "")),
        final=bool(record.get("final")),
        left=None if left is None else int(left),
    )
