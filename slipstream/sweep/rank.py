"""The results of a sweep's cells, compared: a table, the Pareto front, the best cell. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.sweep.measure import Measured
from slipstream.sweep.spec import TRAINING

FINISHED = "finished"


@dataclass(frozen=True)
class CellResult:
    """What is known of one cell. `state` is its phase in words, `reason` why it failed or was stopped."""

    id: str
    values: Mapping[str, Any]
    state: str
    measured: Measured = field(default_factory=Measured)
    reason: str = ""
    gpu_hours: float = 0.0


@dataclass(frozen=True)
class Row:
    """One line of the table. None: not measured; of `time_to_reward`: the target was not reached."""

    id: str
    values: Mapping[str, Any]
    state: str
    reason: str
    steps: int
    reward: float | None
    time_to_reward: float | None
    tokens_per_s: float | None
    staleness: float | None
    seconds: float | None
    gpu_hours: float
    on_front: bool = False


@dataclass(frozen=True)
class Ranking:
    """The cells of a sweep, best first.

    Attributes:
        metric: what was compared: the wanted one, or the training reward where no cell has measured it.
        target: value of it for time-to-reward; None where nothing was measured.
        best: id of the finished cell with the highest final value, of equal ones the fastest; None where none has one.
        notes: what a reader must know about the numbers.
        whole: whether every finished cell could be compared; runs may have been removed since.
    """

    rows: tuple[Row, ...]
    metric: str
    target: float | None
    best: str | None
    notes: tuple[str, ...] = ()
    whole: bool = True

    def row(self, cell: str) -> Row:
        return next(row for row in self.rows if row.id == cell)


def rank(results: Sequence[CellResult], metric: str, target: float | None) -> Ranking:
    """Compare the cells; more of the metric is better."""
    notes: list[str] = []
    if metric != TRAINING and not any(result.measured.curves.get(metric) for result in results):
        if any(result.measured.curves.get(TRAINING) for result in results):
            notes.append(
                f"No cell has measured {metric}: cells are compared by the training reward ({TRAINING}), which is "
                "measured on the prompts that are trained, and of which the final value is the mean of the last five "
                "log windows."
            )
            metric = TRAINING
    finished = [result for result in results if result.state == FINISHED]
    if target is None:
        reached = [value for result in finished if (value := result.measured.best(metric)) is not None]
        target = min(reached, default=None)
        if target is not None:
            notes.append(
                f"No target was given: it is {target:.3g}, the highest value that every finished cell has reached."
            )
    if gone := [result.id for result in finished if not result.measured.steps]:
        notes.append(f"Finished, but without records, so that they are compared with nothing: {', '.join(gone)}.")
    missing = [result.id for result in results if result.state != FINISHED]
    if missing:
        notes.append(f"{len(missing)} of {len(results)} cells have not finished: {', '.join(missing)}.")
    rows = [_row(result, metric, target) for result in results]
    points = {
        row.id: (row.reward, row.tokens_per_s)
        for row in rows
        if row.reward is not None and row.tokens_per_s is not None and row.state == FINISHED
    }
    on_front = front(points)
    rows = [Row(**{**row.__dict__, "on_front": row.id in on_front}) for row in rows]
    rows.sort(key=_place)
    best = next((row.id for row in rows if row.state == FINISHED and row.reward is not None), None)
    return Ranking(tuple(rows), metric, target, best, tuple(notes), not gone)


def _place(row: Row) -> tuple[bool, bool, float, float, str]:
    """Finished ones first, then by the final value; of equal ones the faster, so that the best is on the front."""
    return row.state != FINISHED, row.reward is None, -(row.reward or 0.0), -(row.tokens_per_s or 0.0), row.id


def _row(result: CellResult, metric: str, target: float | None) -> Row:
    measured = result.measured
    return Row(
        id=result.id,
        values=result.values,
        state=result.state,
        reason=result.reason,
        steps=measured.steps,
        reward=measured.final(metric),
        time_to_reward=None if target is None else measured.time_to(metric, target),
        tokens_per_s=measured.tokens_per_s,
        staleness=measured.staleness,
        seconds=measured.seconds,
        gpu_hours=result.gpu_hours,
    )


def front(points: Mapping[str, tuple[float, float]]) -> frozenset[str]:
    """Those of which no other is at least as good in both and better in one; more is better."""

    def beaten(one: tuple[float, float]) -> bool:
        return any(other[0] >= one[0] and other[1] >= one[1] and other != one for other in points.values())

    return frozenset(name for name, point in points.items() if not beaten(point))
