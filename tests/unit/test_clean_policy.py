"""Which old runs go: a table of every reason to stay, and properties."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.clean_policy import Found, duration_text, parse_duration, plan

DAY = 86400.0
NOW = 1000 * DAY
OLD = Found("old", name="demo", ended_at=NOW - 45 * DAY, held_out=0.5)


@pytest.mark.parametrize(
    ("text", "seconds"), [("12h", 43200), ("30d", 30 * DAY), ("2w", 14 * DAY), ("0h", 0), (" 1d ", DAY)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "d", "30 days", "-1d", "1.5d", "1m", "30D", "9999999d", "1d2h", "٣d"])
def test_a_bad_duration_is_refused_with_the_way_out(text: str) -> None:
    with pytest.raises(ValueError, match="like 12h, 30d or 2w") as refused:
        parse_duration(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "less than a minute"), (60, "1 minute"), (3600, "1 hour"), (47 * 3600, "47 hours"), (2 * DAY, "2 days")],
)
def test_durations_in_words(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("found", "goes", "why"),
    [
        (OLD, True, "it ended 45 days ago"),
        (replace(OLD, ended_at=NOW - 29 * DAY), False, "it ended 29 days ago"),
        (replace(OLD, ended_at=NOW - 30 * DAY), False, "it ended 30 days ago"),
        (replace(OLD, ended_at=NOW + DAY), False, "it ended less than a minute ago"),  # another host's clock
        (replace(OLD, ended_at=None), False, "it has not ended"),
        (replace(OLD, leader="pid 7 on login1"), False, "pid 7 on login1 leads it"),
        (replace(OLD, jobs=("learner (job 3, running)",)), False, "still there: learner (job 3, running)"),
        (replace(OLD, away="squeue hangs"), False, "nothing is known of its jobs: squeue hangs"),
        (replace(OLD, untouchable="it is bob's"), False, "it is bob's"),
        (Found(".removing-x-1", remains=True), True, "a removal of it was cut short"),
        (Found(".removing-x-1", remains=True, untouchable="it is bob's"), False, "it is bob's"),
    ],
)
def test_every_reason(found: Found, goes: bool, why: str) -> None:
    (row,) = plan([found], NOW, 30 * DAY, False)
    assert (row.goes, row.why) == (goes, why)


def kept(found: list[Found]) -> dict[str, str]:
    return {row.found.id: row.why for row in plan(found, NOW, 30 * DAY, True) if not row.goes}


def test_the_best_of_a_name_and_of_a_sweep_are_kept() -> None:
    better = replace(OLD, id="better", held_out=0.7)
    other = replace(OLD, id="other", name="other", held_out=0.1)
    cells = [replace(OLD, id=f"s-c{n}", name="cell", sweep="s", held_out=n / 10) for n in range(3)]
    assert kept([OLD, better, other, *cells]) == {
        "better": "the best of those named demo",
        "other": "the best of those named other",
        "s-c2": "the best of those named cell, and the best of the sweep s",
    }


def test_held_out_comes_before_training_and_no_reward_is_no_best() -> None:
    trained = replace(OLD, id="trained", held_out=None, reward=0.9)
    assert kept([OLD, trained]) == {"old": "the best of those named demo"}
    assert kept([trained, replace(trained, id="less", reward=0.2)]) == {"trained": "the best of those named demo"}
    assert kept([replace(OLD, held_out=None)]) == {}


def test_a_young_best_keeps_no_old_one_and_a_live_one_is_not_the_best() -> None:
    young = replace(OLD, id="young", held_out=0.9, ended_at=NOW)
    live = replace(OLD, id="live", held_out=1.0, ended_at=None)
    assert set(kept([OLD, young])) == {"young"}
    assert set(kept([OLD, live])) == {"old", "live"}


def test_a_sweep_goes_with_the_last_of_its_cells() -> None:
    sweep = Found("s", is_sweep=True, ended_at=NOW - 45 * DAY)
    cells = [replace(OLD, id=f"s-c{n}", sweep="s", held_out=None) for n in range(3)]
    assert all(row.goes for row in plan([sweep, *cells], NOW, 30 * DAY, False))
    assert all(row.goes for row in plan([sweep], NOW, 30 * DAY, False))
    cells[1:] = [replace(cell, ended_at=None) for cell in cells[1:]]
    first, *others = plan([sweep, *cells], NOW, 30 * DAY, False)
    assert (first.goes, first.why) == (False, "its cell s-c1 and 1 more stays")
    assert [row.goes for row in others] == [True, False, False]


@pytest.mark.parametrize(
    "sweep", [Found("s", is_sweep=True), Found("s", is_sweep=True, ended_at=0.0, leader="pid 7 on a")]
)
def test_a_finished_cell_stays_while_its_sweep_works(sweep: Found) -> None:
    """A sweep that goes on would run it again."""
    assert [row.why for row in plan([replace(OLD, sweep="s"), OLD, sweep], NOW, 30 * DAY, False)][:2] == [
        "its sweep s has not ended",
        "it ended 45 days ago",
    ]


NUMBERS = st.none() | st.floats(0, 1)
FOUND = st.builds(
    Found,
    id=st.uuids().map(str),
    name=st.sampled_from("ab"),
    sweep=st.sampled_from(["", "s"]),
    untouchable=st.sampled_from(["", "it is bob's"]),
    ended_at=st.none() | st.floats(0, 2 * NOW),
    leader=st.sampled_from(["", "pid 7 on login1"]),
    jobs=st.sampled_from([(), ("learner",)]),
    away=st.sampled_from(["", "squeue hangs"]),
    held_out=NUMBERS,
    reward=NUMBERS,
)
SWEEP = st.builds(Found, id=st.just("s"), is_sweep=st.just(True), ended_at=st.just(0.0))


@given(st.lists(FOUND, max_size=8), st.lists(SWEEP, max_size=1), st.floats(0, 2 * NOW), st.booleans())
def test_what_goes_is_old_and_idle_and_a_best_one_is_left(
    runs: list[Found], sweeps: list[Found], older_than_s: float, keep_best: bool
) -> None:
    rows = plan([*runs, *sweeps], NOW, older_than_s, keep_best)
    assert [row.found for row in rows] == [*runs, *sweeps]
    for row in rows:
        one = row.found
        if row.goes:
            assert one.ended_at is not None
            assert NOW - one.ended_at > older_than_s
            assert (one.untouchable, one.leader, one.jobs, one.away) == ("", "", (), "")
    left = [row.found for row in rows if not row.goes]
    if any(row.goes and row.found.is_sweep for row in rows):
        assert not [one for one in left if one.sweep == "s"]
    if keep_best:
        for name in "ab":
            held_out = [
                one.held_out
                for one in runs
                if one.name == name and one.held_out is not None and one.ended_at is not None and not one.untouchable
            ]
            if held_out:
                assert max(held_out) in [one.held_out for one in left if one.name == name]


@given(st.lists(FOUND, max_size=8), st.floats(0, 2 * NOW))
def test_keeping_the_best_removes_nothing_more(runs: list[Found], older_than_s: float) -> None:
    def goes(keep_best: bool) -> set[str]:
        return {row.found.id for row in plan(runs, NOW, older_than_s, keep_best) if row.goes}

    assert goes(True) <= goes(False)
