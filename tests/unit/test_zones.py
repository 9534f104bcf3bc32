"""Time zones by name, and the local times that a change of the clocks touches."""

import zoneinfo
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.deploy.zones import Change, changes, machine_zone, troubled, zone
from slipstream.config_file import ConfigError

START = datetime(2027, 1, 1, tzinfo=UTC)


def local(text: str) -> datetime:
    return datetime.fromisoformat(text)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "Europe/Berlin",
            [("2027-03-28T01:00", "2027-03-28T02:00", True), ("2027-10-31T01:00", "2027-10-31T02:00", False)],
        ),
        (
            "America/New_York",
            [("2027-03-14T07:00", "2027-03-14T02:00", True), ("2027-11-07T06:00", "2027-11-07T01:00", False)],
        ),
        (
            "Australia/Lord_Howe",
            [("2027-04-03T15:00", "2027-04-04T01:30", False), ("2027-10-02T15:30", "2027-10-03T02:00", True)],
        ),
        ("Asia/Tokyo", []),
        ("UTC", []),
    ],
)
def test_the_changes_of_a_year(name: str, expected: list[tuple[str, str, bool]]) -> None:
    found = [(c.at.replace(tzinfo=None), c.unusual[0], c.missing) for c in changes(zone(name), START)]
    assert found == [(local(at), local(first), missing) for at, first, missing in expected]


def test_what_a_change_touches() -> None:
    spring = Change(datetime(2027, 3, 28, 1, tzinfo=UTC), timedelta(hours=1), timedelta(hours=2))
    times = [local(f"2027-03-28T0{hour}:{minute}") for hour in (1, 2, 3) for minute in ("00", "30", "59")]
    assert [f"{time:%H:%M}" for time in troubled(spring, times)] == ["02:00", "02:30", "02:59"]
    assert troubled(spring, [local("2027-03-29T02:30")]) == []


@settings(max_examples=25)
@given(st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe"]), st.integers(0, 60 * 24 * 365))
def test_a_local_time_is_touched_exactly_where_the_zone_says_so(name: str, minute: int) -> None:
    where = zoneinfo.ZoneInfo(name)
    wall = datetime(2027, 1, 1) + timedelta(minutes=minute)
    there_and_back = wall.replace(tzinfo=where).astimezone(UTC).astimezone(where).replace(tzinfo=None)
    twice = wall.replace(tzinfo=where, fold=0).utcoffset() != wall.replace(tzinfo=where, fold=1).utcoffset()
    touched = [c for c in changes(where, START - timedelta(days=2), timedelta(days=370)) if troubled(c, [wall])]
    assert bool(touched) == (twice or there_and_back != wall)
    assert all(change.missing == (there_and_back != wall) for change in touched)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("europe/berlin", "did you mean Europe/Berlin?"),
        ("Berlin", "did you mean Europe/Berlin?"),
        ("Europe/Berlni", "Europe/Berlin"),
        ("MEZ zone", "write it as Europe/Berlin"),
        ("", "write it as Europe/Berlin"),
        ("../../etc/passwd", "there is no such time zone"),
    ],
)
def test_an_unknown_zone_is_refused_with_the_nearest(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match="--timezone = ") as refused:
        zone(name)
    assert words in str(refused.value)


def test_the_machine_s_zone(tmp_path: Path) -> None:
    assert machine_zone({"TZ": "America/New_York"}) == "America/New_York"
    assert machine_zone({"TZ": ":Asia/Tokyo"}) == "Asia/Tokyo"
    assert machine_zone({}, tmp_path / "none") == "UTC"
    folder = tmp_path / "zoneinfo" / "Europe"
    folder.mkdir(parents=True)
    (folder / "Berlin").write_text("")
    (tmp_path / "localtime").symlink_to(folder / "Berlin")
    assert machine_zone({}, tmp_path / "localtime") == "Europe/Berlin"


def test_a_zone_without_a_name_has_to_be_given(tmp_path: Path) -> None:
    (tmp_path / "localtime").write_text("")
    for environment in ({}, {"TZ": "CET-1CEST,M3.5.0,M10.5.0/3"}):
        with pytest.raises(ConfigError, match=r"--timezone: .*no name.*: give one, like Europe/Berlin"):
            machine_zone(environment, tmp_path / "localtime")
