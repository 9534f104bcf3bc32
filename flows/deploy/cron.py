"""When a cron expression starts something, by the code that Prefect's scheduler uses.

Local times that a change of the clocks leaves out come later by as much; those that come twice start once, the first time.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from prefect.server.schemas import schedules as server

from flows.deploy.zones import YEAR, Change, changes, troubled
from slipstream.config_file import ConfigError, Problem

MOST_STARTS = 24 * 60  # a day of them, one a minute
FIELDS = ("minute", "hour", "day of the month", "month", "day of the week")


def check_cron(cron: str, now: datetime) -> None:
    """Raises ConfigError naming the field that is wrong."""
    parts = cron.split()
    if len(parts) != len(FIELDS):
        count = f"{len(parts)} field{'s' * (len(parts) != 1)}"
        raise _refused(cron, f'has {count}, and takes five: {", ".join(FIELDS)}, as in "0 20 * * FRI"')
    for number, (part, what) in enumerate(zip(parts, FIELDS, strict=True)):
        alone = ["*"] * len(FIELDS)
        alone[number] = part
        if not _valid(" ".join(alone)):
            raise _refused(cron, f'{part!r} is no {what}; it takes {_takes(number)}, as in "0 20 * * FRI"')
    if not _valid(cron):
        raise _refused(cron, 'is no cron expression; write one like "0 20 * * FRI"')
    if not starts(cron, "UTC", now, 1):
        raise _refused(cron, "never comes: no year has such a day; choose another")


def _valid(cron: str) -> bool:
    try:
        server.CronSchedule(cron=cron)
    except ValueError:
        return False
    return True


def _takes(number: int) -> str:
    takes = ("0 to 59", "0 to 23", "1 to 31", "1 to 12 or JAN to DEC", "0 (Sunday) to 6 or SUN to SAT")
    return f"{takes[number]}, lists (1,2), ranges (1-5), steps (*/2) or *"


def _refused(cron: str, message: str) -> ConfigError:
    return ConfigError([Problem("--cron", cron, message)], "the schedule")


def starts(cron: str, timezone: str, after: datetime, count: int, until: datetime | None = None) -> list[datetime]:
    """The next starts, in the schedule's zone; none where none ever comes."""
    schedule = server.CronSchedule(cron=cron, timezone=timezone)
    return _found(lambda: schedule.get_dates(n=count, start=after, end=until))


def dates(
    schedule: server.CronSchedule | server.IntervalSchedule | server.RRuleSchedule, after: datetime, count: int
) -> list[datetime]:
    """The next dates of a schedule of Prefect's, as its scheduler finds them."""
    return _found(lambda: schedule.get_dates(n=count, start=after))


def _found(get_dates: Callable[[], Coroutine[Any, Any, Sequence[datetime]]]) -> list[datetime]:
    try:
        return list(asyncio.run(get_dates()))
    except ValueError:  # croniter: no such day in fifty years
        return []


def touched(cron: str, zone: ZoneInfo, now: datetime) -> list[tuple[Change, list[datetime]]]:
    """The changes of the clocks within a year that leave out or repeat local times of the schedule, and those times."""
    found = []
    for change in changes(zone, now, YEAR):
        first, last = (local.replace(tzinfo=ZoneInfo("UTC")) for local in change.unusual)
        local_times = [local.replace(tzinfo=None) for local in starts(cron, "UTC", first, MOST_STARTS, last)]
        if unusual := troubled(change, local_times):
            found.append((change, unusual))
    return found


def change_text(change: Change, times: list[datetime], zone: ZoneInfo) -> str:
    """What a change of the clocks does to the schedule, in words."""
    by: timedelta = abs(change.after - change.before)
    shown = f"{times[0]:%H:%M}" + (f" to {times[-1]:%H:%M} ({len(times)} starts)" if len(times) > 1 else "")
    come = "come" if len(times) > 1 else "comes"
    day = f"{times[0]:%a %d %B %Y}"
    if change.missing:
        minutes = int(by.total_seconds() // 60)
        return (
            f"on {day} the clocks of {zone.key} are set forward over {shown}: Prefect starts {minutes} minutes later by "
            "the clock, once where another start is due then"
        )
    return (
        f"on {day} the clocks of {zone.key} are set back, and {shown} {come} twice: Prefect starts the first time only"
    )
