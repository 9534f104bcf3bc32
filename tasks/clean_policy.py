"""Which old runs go, and why the others stay. Pure: facts in, rows out."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

HOUR = 3600.0
UNITS = {"h": HOUR, "d": 24 * HOUR, "w": 7 * 24 * HOUR}
DURATION = re.compile(r"^([0-9]{1,6})([hdw])$")


def parse_duration(text: str) -> float:
    """Seconds of "12h", "30d" or "2w". Raises ValueError with what would be valid."""
    found = DURATION.match(text.strip())
    if not found:
        raise ValueError(f"{text!r} is no duration: write a whole number and h, d or w, like 12h, 30d or 2w")
    return int(found[1]) * UNITS[found[2]]


def duration_text(seconds: float) -> str:
    """As a person says it: "3 hours", "45 days"."""
    for unit, one in (("day", UNITS["d"]), ("hour", HOUR), ("minute", 60.0)):
        if seconds >= (2 if unit == "day" else 1) * one:
            count = int(seconds // one)
            return f"{count} {unit}{'s' * (count != 1)}"
    return "less than a minute"


@dataclass(frozen=True)
class Found:
    """A folder in the storage root.

    Attributes:
        id: its name.
        name: name in the run's configuration.
        sweep: id of the sweep that it is a cell of; "" for none.
        is_sweep: it is a sweep's own folder.
        remains: it is what a removal that was cut short left.
        untouchable: why it is not ours to touch (another user's, a link, damaged), in words; "".
        ended_at: seconds since the epoch; None while it has not ended.
        leader: who leads it, in words; "".
        jobs: live jobs, in words.
        away: why the scheduler says nothing of its jobs; "".
        held_out, reward: the last that was measured.
        size: bytes on disk.
    """

    id: str
    name: str = ""
    sweep: str = ""
    is_sweep: bool = False
    remains: bool = False
    untouchable: str = ""
    ended_at: float | None = None
    leader: str = ""
    jobs: tuple[str, ...] = ()
    away: str = ""
    held_out: float | None = None
    reward: float | None = None
    size: int = 0


@dataclass(frozen=True)
class Row:
    """What becomes of a folder, and why, in words."""

    found: Found
    goes: bool
    why: str


def plan(found: Sequence[Found], now: float, older_than_s: float, keep_best: bool) -> list[Row]:
    """One row for each folder, in the given order.

    Args:
        now: seconds since the epoch.
        older_than_s: a run goes that ended longer ago than this.
        keep_best: of each sweep, and of each run name, the run with the best reward stays.
    """
    best = _best(found) if keep_best else {}
    working = {one.id for one in found if one.is_sweep and (one.ended_at is None or one.leader)}
    rows = [_row(one, now, older_than_s, best.get(one.id, ""), one.sweep in working) for one in found]
    staying = [row.found for row in rows if not row.goes]
    return [_with_cells(row, [one for one in staying if one.sweep == row.found.id]) for row in rows]


def _row(one: Found, now: float, older_than_s: float, best: str, sweep_works: bool) -> Row:
    def stays(why: str) -> Row:
        return Row(one, False, why)

    if one.untouchable:
        return stays(one.untouchable)
    if one.remains:
        return Row(one, True, "a removal of it was cut short")
    if one.ended_at is None:
        return stays("it has not ended")
    if one.leader:
        return stays(f"{one.leader} leads it")
    if one.jobs:
        return stays(f"still there: {', '.join(one.jobs)}")
    if one.away:
        return stays(f"nothing is known of its jobs: {one.away}")
    if sweep_works:  # which would run the cell again
        return stays(f"its sweep {one.sweep} has not ended")
    age = f"it ended {duration_text(max(0.0, now - one.ended_at))} ago"
    if now - one.ended_at <= older_than_s:
        return stays(age)
    return stays(best) if best else Row(one, True, age)


def _with_cells(row: Row, staying: Sequence[Found]) -> Row:
    if not row.goes or not row.found.is_sweep or not staying:
        return row
    more = f" and {len(staying) - 1} more" if len(staying) > 1 else ""
    return replace(row, goes=False, why=f"its cell {staying[0].id}{more} stays")


def _best(found: Iterable[Found]) -> dict[str, str]:
    """Why a run is kept, by its id: the best of its sweep or of its name. Without a reward none is the best."""
    groups: dict[tuple[str, str], list[Found]] = {}
    for one in found:
        if one.untouchable or one.remains or one.is_sweep or one.ended_at is None or _rank(one) is None:
            continue
        groups.setdefault(("name", one.name), []).append(one)
        if one.sweep:
            groups.setdefault(("sweep", one.sweep), []).append(one)
    why: dict[str, str] = {}
    for (kind, name), members in groups.items():
        first = max(members, key=lambda one: (_rank(one) or (False, 0.0), one.ended_at or 0.0))
        kept = f"the best of {'the sweep' if kind == 'sweep' else 'those named'} {name}"
        why[first.id] = f"{why[first.id]}, and {kept}" if first.id in why else kept
    return why


def _rank(one: Found) -> tuple[bool, float] | None:
    """What was measured on held-out prompts comes before what was measured in training."""
    value = one.held_out if one.held_out is not None else one.reward
    return None if value is None else (one.held_out is not None, value)
