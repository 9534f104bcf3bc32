"""Asynchronous successive halving as a stopping rule: which cells that run are not worth their time. Pure.

A cell reaches a rung once it has trained so many steps; its score there is the last value of the metric at or before
the rung. Of all cells that have reached the rung by now and were good enough at the rungs before, one in `factor` goes
on (at least one). Nobody waits for others: the first to arrive goes on, and is judged again as more arrive. A cell
without a value between this rung and the one before is not judged.
"""

from collections.abc import Mapping, Sequence

from slipstream.sweep.spec import Halving

Curve = Sequence[tuple[int, float]]  # (step, value), steps ascending


def rungs(halving: Halving, most: int) -> list[int]:
    """Steps of the rungs up to `most`."""
    found, step = [], halving.first_rung
    while step <= most:
        found.append(step)
        step *= halving.factor
    return found


def score_at(curve: Curve, rung: int, before: int) -> float | None:
    """The last value in (before, rung]; None where nothing was measured there."""
    values = [value for step, value in curve if before < step <= rung]
    return values[-1] if values else None


def hopeless(
    halving: Halving, steps: Mapping[str, int], curves: Mapping[str, Curve], running: frozenset[str]
) -> dict[str, str]:
    """Why each of the running cells that are not worth going on is to be stopped; the others are absent.

    Args:
        steps: optimizer steps that each cell has done, those included that have ended.
        curves: the metric of each, more being better.
        running: those that may be stopped.
    """
    found: dict[str, str] = {}
    out: set[str] = set()  # not good enough at an earlier rung, so no measure for others
    before = 0
    for rung in rungs(halving, max(steps.values(), default=0)):
        scores = {}
        for cell, done in steps.items():
            if cell in out or done < rung:
                continue
            if (score := score_at(curves.get(cell, ()), rung, before)) is not None:
                scores[cell] = score
        before = rung
        if not scores:
            continue
        keep = max(1, len(scores) // halving.factor)
        ranked = sorted(scores, key=lambda cell: (-scores[cell], cell))
        least = scores[ranked[keep - 1]]
        for place, cell in enumerate(ranked, 1):
            if scores[cell] < least:
                out.add(cell)
                if cell in running:
                    found[cell] = (
                        f"place {place} of {len(ranked)} at step {rung} ({scores[cell]:.3g}); the best {keep} go on"
                    )
    return found
