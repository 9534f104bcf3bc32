"""What to start and stop next in a sweep: a pure function of how its cells stand. No clock, no files, no processes.

Contract of `decide(cells, limits, hopeless)`:

1. Never more than `limits.cells_at_once` cells are active after it, unless more are already.
2. A finished cell is never started again; a failed cell, and one that a person stopped, only where `again` says so.
3. A failed cell ends nothing.
4. Once the budget is spent nothing is started, and every active cell is asked to stop; it can go on later.
5. A cell that has begun and has no leader gets one before new cells are started: its jobs run, or its work is half done.
6. It is done when nothing is active and nothing can be started.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

BUDGET, HALVING, INTERRUPT = "budget", "halving", "interrupt"  # why the sweep itself stopped a cell


class Phase(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def active(self) -> bool:
        return self in (Phase.STARTING, Phase.RUNNING)

    @property
    def ended(self) -> bool:
        return self in (Phase.FINISHED, Phase.FAILED, Phase.STOPPED)


@dataclass(frozen=True)
class CellState:
    """How one cell stands.

    Attributes:
        led: somebody leads it, or is about to; False only for a run without a leader.
        asked: it has been asked to stop.
        stopped_for: BUDGET, HALVING or INTERRUPT where the sweep stopped it; '' where a person did.
        again: a person asked to try it again although it failed or was stopped.
        gpu_hours: used so far.
    """

    id: str
    phase: Phase
    led: bool = True
    asked: bool = False
    stopped_for: str = ""
    again: bool = False
    gpu_hours: float = 0.0


@dataclass(frozen=True)
class Limits:
    cells_at_once: int
    gpu_hours: float | None = None


@dataclass(frozen=True)
class Plan:
    """What to do next: `start` these (new, or to be continued), `stop` these (why, and what it is recorded as)."""

    start: tuple[str, ...] = ()
    stop: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    done: bool = False
    spent: bool = False
    reason: str = ""


def may_start(cell: CellState) -> bool:
    """Whether a cell that is not active has work left."""
    if cell.phase is Phase.WAITING:
        return True
    if cell.phase is Phase.STOPPED and cell.stopped_for in (BUDGET, INTERRUPT):
        return True
    return cell.again and cell.phase in (Phase.FAILED, Phase.STOPPED)


def decide(cells: Sequence[CellState], limits: Limits, hopeless: Mapping[str, str]) -> Plan:
    """The next thing to do. `hopeless`: why early stopping gives a cell up; those that it does not are absent."""
    used = sum(cell.gpu_hours for cell in cells)
    spent = limits.gpu_hours is not None and used >= limits.gpu_hours
    active = [cell for cell in cells if cell.phase.active]
    ready = [cell for cell in cells if may_start(cell)]
    ended = len(cells) - len(active) - len(ready)
    counts = f"{ended} of {len(cells)} cells have ended, {len(active)} active"
    if spent:
        why = f"the budget of {limits.gpu_hours:g} GPU hours is spent ({used:.2f} used)"
        stop = {cell.id: (BUDGET, why) for cell in active if not cell.asked}
        left = f"; {len(ready)} cells are left" if ready else ""
        return Plan(stop=stop, done=not active, spent=bool(ready or active), reason=f"{why}{left}")
    stop = {cell.id: (HALVING, hopeless[cell.id]) for cell in active if cell.id in hopeless and not cell.asked}
    lead = [cell.id for cell in active if not cell.led and not cell.asked and cell.id not in stop]
    begun = [cell for cell in ready if cell.phase is not Phase.WAITING]
    new = [cell for cell in ready if cell.phase is Phase.WAITING]
    room = max(0, limits.cells_at_once - len(active))
    start = tuple(lead) + tuple(cell.id for cell in [*begun, *new][:room])
    return Plan(start=start, stop=stop, done=not active and not ready, reason=counts)
