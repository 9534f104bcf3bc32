"""Restarts: how many in a row are too many, how long to wait before one, which nodes to avoid. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.jobs import JobState


@dataclass(frozen=True)
class Fault:
    """Why a job was started again, as it stands in records/faults.jsonl.

    Attributes:
        time: seconds since the epoch, by the clock of the host that led the run.
        role: "server", "learner" or "allocation".
        kind: one of the constants below.
        step: the optimizer step that the run had reached.
        nodes: that are to blame, where anybody can tell.
        job: incarnation of the job that is given up; empty where none could be submitted.
    """

    time: float
    attempt: int
    role: str
    kind: str
    step: int
    nodes: tuple[str, ...] = ()
    reason: str = ""
    job: str = ""


DIED = "died"
HUNG = "hung"
NODE = "node failed"
NOT_CHECKED = "node check failed"
TIME = "out of time"
PREEMPTED = "preempted"
LEFT = "left"  # it saved and left, because its time was up
RELEASED = "released"  # by us: its nodes did nothing
REFUSED = "not submitted"

KINDS = {
    JobState.NODE_FAIL: NODE,
    JobState.BOOT_FAIL: NODE,
    JobState.TIMEOUT: TIME,
    JobState.DEADLINE: TIME,
    JobState.PREEMPTED: PREEMPTED,
}
# Nobody's fault: the same again at the same step says nothing about that step.
INTERRUPTIONS = frozenset({NODE, TIME, PREEMPTED, LEFT, RELEASED, REFUSED})
BLAMES_THE_NODE = frozenset({NODE, NOT_CHECKED, HUNG})


def strikes(faults: Sequence[Fault], step: int) -> int:
    """Restarts in a row that led to no new step. A fault that comes again at the same step counts twice.

    Args:
        faults: of the run, oldest first.
        step: that the run has reached now.
    """
    count, best = 0, -1
    last: Fault | None = None
    given_up: set[str] = set()
    for fault in faults:
        # a leader that died before it had given the job up leaves its fault to be recorded again by the next one
        if fault.kind == RELEASED or fault.job in given_up:
            continue
        given_up |= {fault.job} - {""}
        if fault.step > best:
            count, best = 0, fault.step
        again = last is not None and (last.role, last.step) == (fault.role, fault.step)
        both = last is not None and not {last.kind, fault.kind} & INTERRUPTIONS
        count += 2 if again and both else 1
        last = fault
    return 0 if step > best else count


def delay_s(count: int, base_s: float, most_s: float) -> float:
    """Seconds to wait before the restart that `count` strikes ask for: none before the first, then doubling."""
    return 0.0 if count <= 1 else float(min(most_s, base_s * 2.0 ** min(count - 2, 60)))


def excluded(faults: Sequence[Fault], now: float, window_s: float) -> tuple[str, ...]:
    """Nodes that were at fault twice within `window_s` before `now` (seconds since the epoch), sorted."""
    blamed = Counter(
        node
        for fault in faults
        if fault.kind in BLAMES_THE_NODE and now - fault.time < window_s
        for node in set(fault.nodes)
    )
    return tuple(sorted(node for node, times in blamed.items() if times >= 2))


def released(faults: Sequence[Fault], role: str) -> bool:
    """Whether the newest that happened to `role` is that its idle nodes were given back."""
    return next((fault.kind == RELEASED for fault in reversed(faults) if fault.role == role), False)
