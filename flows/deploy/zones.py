"""Time zones: the machine's own, and the local times that a change of the clocks leaves out or repeats."""

import os
import zoneinfo
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from pathlib import Path

from slipstream.config_file import ConfigError, Problem

LOCALTIME = Path("/etc/localtime")
HOUR = timedelta(hours=1)
YEAR = timedelta(days=366)


@dataclass(frozen=True)
class Change:
    """The clocks of a zone are set: at `at` (UTC) the offset to UTC becomes `after`; it was `before`."""

    at: datetime
    before: timedelta
    after: timedelta

    @property
    def unusual(self) -> tuple[datetime, datetime]:
        """Local times, from and (not included) to, that do not come on that day, or come twice."""
        local = self.at.replace(tzinfo=None)
        return local + min(self.before, self.after), local + max(self.before, self.after)

    @property
    def missing(self) -> bool:
        """Whether they do not come; else they come twice."""
        return self.after > self.before


def zone(name: str) -> zoneinfo.ZoneInfo:
    """The time zone of that name. Raises ConfigError with names that are like it."""
    known = zoneinfo.available_timezones()
    if name in known:
        return zoneinfo.ZoneInfo(name)
    same = [other for other in known if other.casefold() == name.casefold()]
    ends = sorted(other for other in known if name and other.casefold().endswith(f"/{name.casefold()}"))
    near = same or ends or get_close_matches(name, known, 3, 0.7)
    hint = f"did you mean {' or '.join(near[:3])}?" if near else "write it as Europe/Berlin, America/New_York or UTC"
    raise ConfigError([Problem("--timezone", name, f"there is no such time zone; {hint}")], "the schedule")


def machine_zone(environment: dict[str, str] | None = None, localtime: Path = LOCALTIME) -> str:
    """Name of this machine's time zone: $TZ, else what /etc/localtime points to, else UTC as the C library has it.

    Raises ConfigError where it has no name.
    """
    env = dict(os.environ) if environment is None else environment
    if given := env.get("TZ", "").removeprefix(":"):
        if given in zoneinfo.available_timezones():
            return given
        raise _nameless(f"TZ = {given!r}")
    if not localtime.exists():
        return "UTC"
    _, found, name = str(localtime.resolve()).partition("/zoneinfo/")
    name = name.removeprefix("posix/").removeprefix("right/")
    if found and name in zoneinfo.available_timezones():
        return name
    raise _nameless(f"{localtime} is no link into a zoneinfo folder")


def _nameless(why: str) -> ConfigError:
    message = f"this machine's time zone has no name that a schedule could keep ({why}): give one, like Europe/Berlin"
    return ConfigError([Problem("--timezone", None, message)], "the schedule")


def changes(where: zoneinfo.ZoneInfo, start: datetime, length: timedelta = YEAR) -> Iterator[Change]:
    """The changes of the clocks in `length` from `start` (with a zone of its own) on, to the minute."""
    at = start.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    end = at + length
    before = _offset(where, at)
    while at < end:
        at += HOUR
        after = _offset(where, at)
        if after != before:
            exact = at - HOUR
            while _offset(where, exact) == before:
                exact += timedelta(minutes=1)
            yield Change(exact, before, after)
            before = after


def _offset(where: zoneinfo.ZoneInfo, at: datetime) -> timedelta:
    return at.astimezone(where).utcoffset() or timedelta()


def troubled(change: Change, local_times: Iterable[datetime]) -> list[datetime]:
    """Those of the local times (without a zone) that the change leaves out or repeats."""
    first, last = change.unusual
    return [local for local in local_times if first <= local < last]
