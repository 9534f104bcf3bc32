"""Cron expressions as Prefect's scheduler reads them, over both changes of the clocks."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest

from flows.deploy.cron import change_text, check_cron, starts, touched
from slipstream.config_file import ConfigError

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
SPRING = {"Europe/Berlin": "2027-03-28", "America/New_York": "2027-03-14"}
AUTUMN = {"Europe/Berlin": "2027-10-31", "America/New_York": "2027-11-07"}
REPEATED = {"Europe/Berlin": "02:30", "America/New_York": "01:30"}


def around(cron: str, zone: str, day: str) -> list[str]:
    """Starts of the day before, the day and the day after, as day, local time and offset."""
    first = datetime.fromisoformat(day).replace(tzinfo=ZoneInfo(zone)) - timedelta(days=1)
    last = datetime.fromisoformat(day).replace(tzinfo=ZoneInfo(zone)) + timedelta(days=2)
    return [f"{start:%d %H:%M %z}" for start in starts(cron, zone, first, 100, last) if start < last]


@pytest.mark.parametrize("zone", SPRING)
def test_eight_in_the_evening_stays_eight_in_the_evening_all_year(zone: str) -> None:
    found = starts("0 20 * * *", zone, NOW, 366)
    assert len(found) == 366
    assert {f"{start:%H:%M}" for start in found} == {"20:00"}
    assert {(later.date() - start.date()).days for start, later in pairwise(found)} == {1}
    assert {(later.timestamp() - start.timestamp()) / 3600 for start, later in pairwise(found)} == {23, 24, 25}
    assert not touched("0 20 * * *", ZoneInfo(zone), NOW)


def test_friday_s_start_is_on_friday() -> None:
    assert {f"{start:%a %H:%M}" for start in starts("0 20 * * FRI", "Europe/Berlin", NOW, 60)} == {"Fri 20:00"}


def test_a_time_that_is_left_out_comes_an_hour_later() -> None:
    assert around("30 2 * * *", "Europe/Berlin", SPRING["Europe/Berlin"]) == [
        "27 02:30 +0100",
        "28 03:30 +0200",
        "29 02:30 +0200",
    ]
    assert around("30 2 * * *", "America/New_York", SPRING["America/New_York"]) == [
        "13 02:30 -0500",
        "14 03:30 -0400",
        "15 02:30 -0400",
    ]
    both = around("30 2,3 * * *", "Europe/Berlin", SPRING["Europe/Berlin"])
    assert [start for start in both if start.startswith("28")] == ["28 03:30 +0200"], "once, where another is due then"


def test_a_time_that_comes_twice_starts_once_the_first_time() -> None:
    assert around("30 2 * * *", "Europe/Berlin", AUTUMN["Europe/Berlin"]) == [
        "30 02:30 +0200",
        "31 02:30 +0200",
        "01 02:30 +0100",
    ]
    assert around("30 1 * * *", "America/New_York", AUTUMN["America/New_York"]) == [
        "06 01:30 -0400",
        "07 01:30 -0400",
        "08 01:30 -0500",
    ]
    hourly = around("30 * * * *", "Europe/Berlin", AUTUMN["Europe/Berlin"])
    assert [start for start in hourly if start.startswith("31 0")][:4] == [
        "31 00:30 +0200",
        "31 01:30 +0200",
        "31 02:30 +0200",
        "31 03:30 +0100",
    ], "an hourly schedule pauses for two hours"


@pytest.mark.parametrize("zone", SPRING)
def test_what_a_change_of_the_clocks_touches_is_said(zone: str) -> None:
    said = [
        change_text(change, times, ZoneInfo(zone))
        for cron in ("30 2 * * *", f"30 {int(REPEATED[zone][:2])} * * *")
        for change, times in touched(cron, ZoneInfo(zone), NOW)
    ]
    spring, autumn = (datetime.fromisoformat(days[zone]) for days in (SPRING, AUTUMN))
    assert (
        f"on {spring:%a %d %B %Y} the clocks of {zone} are set forward over 02:30: Prefect starts 60 minutes later by "
        "the clock, once where another start is due then"
    ) in said
    assert (
        f"on {autumn:%a %d %B %Y} the clocks of {zone} are set back, and {REPEATED[zone]} comes twice: Prefect starts "
        "the first time only"
    ) in said


def test_only_changes_within_a_year_and_on_days_of_the_schedule_are_said() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    assert len(touched("30 2 * * *", berlin, NOW)) == 2
    assert touched("30 2 * * MON", berlin, NOW) == [], "the clocks are set on Sundays"
    assert len(touched("30 2 31 10 *", berlin, NOW)) == 1
    assert touched("0 0 29 2 *", berlin, NOW) == []
    assert touched("* * * * *", ZoneInfo("UTC"), NOW) == []
    ((_, times),) = touched("*/10 * 28 3 *", berlin, NOW)
    assert [f"{time:%H:%M}" for time in times] == ["02:00", "02:10", "02:20", "02:30", "02:40", "02:50"]


@pytest.mark.parametrize("cron", ["0 20 * * FRI", "*/5 * * * *", "0 0 29 2 *", "0 9-17 * JAN-MAR 1,3", "0 0 1 * 7"])
def test_good_expressions(cron: str) -> None:
    check_cron(cron, NOW)


@pytest.mark.parametrize(
    ("cron", "words"),
    [
        ("", "has 0 fields, and takes five"),
        ("0 20 * *", "has 4 fields, and takes five: minute, hour"),
        ("0 20 * * FRI 2027", "has 6 fields"),
        ("@daily", "has 1 field, "),
        ("60 20 * * *", "'60' is no minute; it takes 0 to 59"),
        ("0 24 * * *", "'24' is no hour; it takes 0 to 23"),
        ("0 20 32 * *", "'32' is no day of the month; it takes 1 to 31"),
        ("0 20 * 13 *", "'13' is no month; it takes 1 to 12 or JAN to DEC"),
        ("0 20 * * FRY", "'FRY' is no day of the week; it takes 0 (Sunday) to 6 or SUN to SAT"),
        ("H 20 * * *", "'H' is no minute"),
        ("0 20 30 2 *", "never comes"),
    ],
)
def test_bad_expressions_are_refused_by_field(cron: str, words: str) -> None:
    with pytest.raises(ConfigError, match="--cron = ") as refused:
        check_cron(cron, NOW)
    assert words in str(refused.value)
