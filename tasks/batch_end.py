"""What the end of an attempt inside an sbatch job means: the exit code, or the queue again. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import time
from typing import Any

from cluster import recovery
from cluster.decide import Kind
from cluster.recovery import Fault, strikes


@dataclass(frozen=True)
class Ended:
    """
    Attributes:
        kind: how the run ended; None where it has not: SLURM ends this start of the job, or it is requeued.
        code: exit code of the job.
        requeue: the kind of fault for which the job is put back into the queue; else ''.
    """

    kind: Kind | None
    code: int
    reason: str
    role: str | None = "allocation"
    log: str = ""
    last_lines: str = ""
    requeue: str = ""


class End(Exception):
    """The run has ended before an attempt began."""

    def __init__(self, ended: Ended) -> None:
        super().__init__(ended.reason)
        self.ended = ended


@dataclass(frozen=True)
class Restarted:
    """`given_up`: why no further attempt is made; ''."""

    fault: Fault
    given_up: str


def judge(
    code: int,
    record: Mapping[str, Any],
    result: bool,
    cancel: str,
    state: str,
    preempted: bool,
    time_up: bool,
    nodes_answer: bool,
) -> Ended:
    """What an attempt's end means.

    Args:
        code: exit code of all tasks.
        record: exit record of the learner; empty where it left none.
        result: whether the learner has finished.
        cancel: who asked to stop, and why.
        state: SLURM's word for the job.
        preempted: SLURM is about to take its nodes.
        time_up: the time limit is near.
        nodes_answer: all of its nodes do.
    """
    reason = str(record.get("reason") or "")
    if result:
        return Ended(Kind.FINISH, 0, "the learner has finished")
    if cancel:
        return Ended(Kind.CANCELLED, 130, cancel)
    if state == "CANCELLED":
        return Ended(Kind.CANCELLED, 130, "the job was cancelled (scancel)")
    if state == "TIMEOUT":
        return Ended(Kind.FAIL, 1, "the time limit came before the learner had saved and left: give more --signal time")
    if state != "RUNNING":
        return Ended(None, 1, f"SLURM ends the job ({state})")
    if record.get("left") is not None:
        if time_up or preempted:
            kind = recovery.PREEMPTED if preempted else recovery.LEFT
            return Ended(None, 0, f"the learner saved at step {record['left']} and left", requeue=kind)
        return Ended(Kind.CANCELLED, 130, f"told to by a signal, the learner saved at step {record['left']} and left")
    if code == 0:
        return Ended(Kind.FAIL, 1, "the learner exited without an error, but it wrote no result")
    if not nodes_answer and not record.get("final"):
        return Ended(None, 1, "a node does not answer any more", requeue=recovery.NODE)
    own = int(record.get("returncode") or 0) or code
    role = "learner" if record else None
    return Ended(
        Kind.FAIL, own, f"the run's tasks have ended with code {own}" + (f": {reason}" if reason else ""), role
    )


def as_fault(ended: Ended, attempt: int, step: int, job: str) -> Fault:
    """For the record: why the job is put back into the queue."""
    return Fault(time(), attempt, "allocation", ended.requeue, step, (), ended.reason, job)


def restarted(fault: Fault, record: Mapping[str, Any], faults: Sequence[Fault], max_restarts: int) -> Restarted:
    """Why SLURM has started the job again, and whether that has been too often without a new step in between.

    Args:
        fault: who and when; its kind and reason are filled in where it has none.
        record: exit record of the learner before.
        faults: on record, oldest first; `fault`'s job may be among them.
    """
    if not fault.kind:
        left = record.get("left")
        why = f"saved at step {left} and left" if left is not None else "a node was lost, or the job was preempted"
        kind = recovery.NODE if left is None else recovery.LEFT
        fault = replace(fault, kind=kind, reason=f"SLURM has started the job again: {why}")
    known = any(one.job == fault.job for one in faults)
    count = strikes(faults if known else (*faults, fault), fault.step)
    if count <= max_restarts:
        return Restarted(fault, "")
    return Restarted(
        fault, f"{fault.reason} ({count} strikes without a new step; recovery.max_restarts = {max_restarts})"
    )
