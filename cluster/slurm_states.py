"""SLURM's words for jobs, and what they mean here. Pure: texts in, values out."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.jobs import JobState, JobView

LINE_END = "|end"  # a person's comment may hold line breaks, and what was cut short must be seen
SQUEUE_FORMAT = "%i|%T|%r|%N|%j|%k" + LINE_END
SACCT_FORMAT = "JobID,State,NodeList,JobName,Comment"

STATES = {
    # not started
    "PENDING": JobState.PENDING,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.HELD,
    "RESV_DEL_HOLD": JobState.HELD,
    "SPECIAL_EXIT": JobState.HELD,
    # its nodes are being booted: no process of it runs yet, and that may take minutes
    "CONFIGURING": JobState.PENDING,
    "POWER_UP_NODE": JobState.PENDING,
    # running
    "RUNNING": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "EXPEDITING": JobState.RUNNING,
    "SUSPENDED": JobState.SUSPENDED,
    "STOPPED": JobState.SUSPENDED,
    # ending
    "COMPLETING": JobState.COMPLETING,
    "STAGE_OUT": JobState.COMPLETING,
    "UPDATE_DB": JobState.COMPLETING,
    # ended
    "COMPLETED": JobState.FINISHED,
    "FAILED": JobState.FAILED,
    "LAUNCH_FAILED": JobState.FAILED,
    "RECONFIG_FAIL": JobState.FAILED,
    "CANCELLED": JobState.CANCELLED,
    "REVOKED": JobState.CANCELLED,
    "PREEMPTED": JobState.PREEMPTED,
    "NODE_FAIL": JobState.NODE_FAIL,
    "TIMEOUT": JobState.TIMEOUT,
    "OUT_OF_MEMORY": JobState.OUT_OF_MEMORY,
    "BOOT_FAIL": JobState.BOOT_FAIL,
    "DEADLINE": JobState.DEADLINE,
}
HELD_REASONS = frozenset(
    {"JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue", "job_requeued_in_held_state", "ReservationDeleted"}
)
JOB_ID = re.compile(r"\d+([_+].+)?")  # of an array 7_1, of a heterogeneous job 7+0
NO_REASON = frozenset({"", "None", "(null)", "N/A"})


@dataclass(frozen=True)
class SlurmJob:
    """One job as a client lists it."""

    job_id: str
    state: str
    reason: str
    nodes: str
    name: str
    comment: str


def state_of(word: str, reason: str = "") -> JobState:
    """A state as clients print it (`CANCELLED by 0`, `RUNNING+`), with the reason that they give; UNKNOWN for another."""
    first = word.strip().split(" ")[0].rstrip("+").upper()
    state = STATES.get(first, JobState.UNKNOWN)
    return JobState.HELD if state is JobState.PENDING and reason in HELD_REASONS else state


def view_of(job: SlurmJob, source: str) -> JobView:
    """What a listed job amounts to, without its exit record."""
    state = state_of(job.state, job.reason)
    reason = "" if job.reason in NO_REASON else job.reason
    waiting = state in (JobState.PENDING, JobState.HELD)
    words = f"SLURM: {job.state.strip()}" + (f" ({reason})" if reason else "")
    return JobView(
        state,
        reason=words if state.ended or state is JobState.UNKNOWN else "",
        queue_reason=reason if waiting else "",
        nodes=expand_hosts(job.nodes),
        source=source,
    )


def parse_squeue(text: str) -> list[SlurmJob]:
    """What `squeue -h -o SQUEUE_FORMAT` prints. Raises ValueError where the text is something else."""
    text = re.sub(r"^CLUSTER: .*\n", "", text, flags=re.MULTILINE)  # a heading where SLURM_CLUSTERS is set
    *rows, rest = f"{text.rstrip()}\n".split(f"{LINE_END}\n")
    if rest.strip():
        raise ValueError(f"no line of squeue -o {SQUEUE_FORMAT}: {rest.strip()!r}")
    return [_row(row) for row in rows]


def _row(row: str) -> SlurmJob:
    fields = row.split("|", 5)
    if len(fields) != 6 or not JOB_ID.fullmatch(fields[0].strip()):
        raise ValueError(f"no line of squeue -o {SQUEUE_FORMAT}: {row!r}")
    return SlurmJob(*(field.strip() for field in fields))


def parse_scontrol(text: str) -> list[SlurmJob]:
    """Lines of `scontrol show job -o`."""
    found = []
    for line in text.splitlines():
        # values may hold spaces, so a value reaches up to the next `Word=`
        fields = dict(re.findall(r"(?:^| )([A-Za-z][\w:/]*)=(.*?)(?= [A-Za-z][\w:/]*=|\s*$)", line))
        if "JobId" in fields:
            nodes, comment = fields.get("NodeList", ""), fields.get("Comment", "")
            found.append(
                SlurmJob(
                    fields["JobId"],
                    fields.get("JobState", ""),
                    fields.get("Reason", ""),
                    "" if nodes in NO_REASON else nodes,
                    fields.get("JobName", ""),
                    "" if comment in NO_REASON else comment.strip(),
                )
            )
    return found


def parse_sacct(text: str) -> list[SlurmJob]:
    """Lines of `sacct -nP -o SACCT_FORMAT`; of a job with several (`-D`) the last, which is the newest."""
    found: dict[str, SlurmJob] = {}
    for line in text.splitlines():
        fields = line.split("|", 4)
        if len(fields) == 5:
            job_id, state, nodes, name, comment = (field.strip() for field in fields)
            nodes = "" if nodes in NO_REASON | {"None assigned"} else nodes
            found[job_id] = SlurmJob(job_id, state, "", nodes, name, comment)
    return list(found.values())


def expand_hosts(text: str) -> tuple[str, ...]:
    """SLURM's host list as names: `n[1-3,07],login` → n1, n2, n3, n07, login."""
    return tuple(name for part in _split(text) for name in _expand(part))


def _split(text: str) -> list[str]:
    """At commas outside brackets."""
    return [part for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text.strip()) if part not in NO_REASON]


def _expand(part: str) -> Iterable[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)$", part)
    if match is None:
        yield part
        return
    head, numbers, tail = match.groups()
    rests = list(_expand(tail)) if tail else [""]
    for piece in numbers.split(","):
        first, _, last = piece.partition("-")
        span = [piece]
        if first.isdigit() and (last or first).isdigit():
            span = [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
        yield from (f"{head}{number}{rest}" for number in span for rest in rests)
