"""What is measured of a cell, how cells are compared, and what the report says."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.sweep.draw import QUANTITIES, distinct, word_for_missing, written
from slipstream.sweep.measure import Measured, Point, measure
from slipstream.sweep.rank import CellResult, front, rank
from slipstream.sweep.report import SweepReport, draw_all, markdown, page, short_names, write_sweep_report

HELD_OUT = "eval/reward"


def window(step: int, time: float, attempt: int = 1, **values: float) -> dict[str, Any]:
    return {"step": step, "time": time, "attempt": attempt, **values}


def test_the_clock_begins_with_the_first_step_and_leaves_pauses_out() -> None:
    step = {"perf/step_s": 10.0}
    windows = [
        window(1, 1010.0, reward=0.1, **step),
        window(2, 1020.0, reward=0.2, **step),
        window(3, 9010.0, attempt=2, reward=0.3, **step),
        window(4, 9025.0, attempt=2, reward=0.4, **step),
    ]
    measured = measure(windows, ["reward"])
    assert [point.seconds for point in measured.curves["reward"]] == [10.0, 20.0, 30.0, 45.0]
    assert (measured.steps, measured.seconds) == (4, 45.0)
    assert measured.time_to("reward", 0.3) == 30.0
    assert measured.time_to("reward", 0.5) is None


def test_an_evaluation_before_the_first_step_is_at_zero() -> None:
    windows = [window(0, 100.0, **{HELD_OUT: 0.3}), window(1, 104.0, reward=0.2, **{"perf/step_s": 4.0})]
    measured = measure(windows, [HELD_OUT, "reward"])
    assert measured.curves[HELD_OUT] == [Point(0, 0.0, 0.3)]
    assert measured.curves["reward"] == [Point(1, 4.0, 0.2)]
    assert measured.final(HELD_OUT) == 0.3


def test_throughput_is_tokens_by_step_time_and_staleness_is_by_samples() -> None:
    windows = [
        window(1, 10.0, **{"perf/step_s": 1.0, "batch/trained_tokens_per_step": 100.0,
                           "sample/staleness_mean": 0.0, "batch/samples_per_step": 10.0}),
        window(3, 30.0, **{"perf/step_s": 9.0, "batch/trained_tokens_per_step": 200.0,
                           "sample/staleness_mean": 3.0, "batch/samples_per_step": 20.0}),
    ]  # fmt: skip
    measured = measure(windows, [])
    assert measured.tokens_per_s == pytest.approx((100 + 2 * 200) / (1 + 2 * 9))
    assert measured.staleness == pytest.approx((0 * 10 + 3 * 40) / 50)


def test_a_clock_that_is_set_back_makes_no_negative_time_and_nothing_recorded_is_nothing() -> None:
    measured = measure([window(1, 100.0, reward=1.0), window(2, 90.0, reward=2.0)], ["reward"])
    assert [point.seconds for point in measured.curves["reward"]] == [0.0, 0.0]
    assert measure([], ["reward"]) == Measured(curves={"reward": []})
    assert measure([], ["reward"]).final("reward") is None


def cell(name: str, state: str = "finished", reason: str = "", **kinds: Any) -> CellResult:
    """`values`: of the cell; `curve`: of the metric; `rate`, `metric`."""
    metric = kinds.get("metric", HELD_OUT)
    points = [Point(step, 10.0 * step, value) for step, value in enumerate(kinds.get("curve", ()))]
    measured = Measured(len(points), 60.0, kinds.get("rate"), kinds.get("staleness"), {metric: points})
    return CellResult(name, kinds.get("values", {}), state, measured, reason, 0.5)


def test_the_best_cell_is_the_best_finished_one() -> None:
    ranking = rank(
        [
            cell("c00", curve=[0.1, 0.5], rate=100.0),
            cell("c01", curve=[0.1, 0.6], rate=50.0),
            cell("c02", "failed", curve=[0.1, 0.9], rate=10.0),
            cell("c03", curve=[0.1, 0.4], rate=60.0),
            cell("c04", "waiting"),
        ],
        HELD_OUT,
        0.5,
    )
    assert [row.id for row in ranking.rows] == ["c01", "c00", "c03", "c02", "c04"]
    assert ranking.best == "c01"
    assert [row.on_front for row in ranking.rows] == [True, True, False, False, False]
    assert [row.time_to_reward for row in ranking.rows] == [10.0, 10.0, None, 10.0, None]
    assert ranking.notes == ("2 of 5 cells have not finished: c02, c04.",)


def test_a_finished_cell_without_records_is_named() -> None:
    ranking = rank([cell("c00"), cell("c01", curve=[0.1, 0.4], rate=60.0), cell("c02", "failed")], HELD_OUT, 0.3)
    assert (ranking.best, ranking.whole) == ("c01", False)
    assert ranking.notes[0] == "Finished, but without records, so that they are compared with nothing: c00."
    assert rank([cell("c01", curve=[0.1, 0.4])], HELD_OUT, 0.3).whole


def test_without_held_out_values_it_is_the_training_reward_and_says_so() -> None:
    results = [cell("c00", curve=[0.0, *[0.5] * 5, 1.0], metric="reward"), cell("c01", metric="reward", curve=[0.2])]
    ranking = rank(results, HELD_OUT, None)
    assert ranking.metric == "reward"
    assert "No cell has measured eval/reward" in ranking.notes[0]
    assert ranking.row("c00").reward == pytest.approx(0.6)
    assert ranking.target == 0.2
    assert "No target was given: it is 0.2" in ranking.notes[1]


def test_a_sweep_of_which_nothing_was_measured() -> None:
    ranking = rank([cell("c00", "failed", "no such model")], HELD_OUT, None)
    assert (ranking.best, ranking.target, ranking.rows[0].time_to_reward) == (None, None, None)
    report = SweepReport("s", "b", ["trainer.seed"], ranking, "1 failed", {})
    assert draw_all(report) == {}
    assert "Nothing measured." in page(report, {})
    assert "no such model" in page(report, {})


points = st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8)


@given(points)
def test_the_front_is_what_nothing_beats(points: dict[str, tuple[float, float]]) -> None:
    found = front(points)

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one != other and one[0] >= other[0] and one[1] >= other[1]

    for name, point in points.items():
        assert (name in found) == (not any(beats(other, point) for other in points.values()))
    assert bool(found) == bool(points)


@given(points)
def test_the_best_cell_is_on_the_front(points: dict[str, tuple[float, float]]) -> None:
    """Also where several have the highest value."""
    ranking = rank([cell(name, curve=[reward], rate=rate) for name, (reward, rate) in points.items()], HELD_OUT, None)
    assert ranking.best is None or ranking.row(ranking.best).on_front
    assert (ranking.best is None) == (not points)


def grid() -> SweepReport:
    results = [
        cell(
            f"c{3 * x + y:02d}",
            "failed" if (x, y) == (1, 1) else "finished",
            "<b>out of luck</b>" if (x, y) == (1, 1) else "",
            values={"trainer.max_staleness": 2 * x, "trainer.token_budget": 100 * (y + 1)},
            curve=() if (x, y) == (1, 1) else [0.1, 0.2 + 0.1 * x + 0.1 * y],
            rate=None if (x, y) == (1, 1) else 100.0 + x,
            staleness=None if (x, y) == (1, 1) else 0.5 * x,
        )
        for x in range(3)
        for y in range(3)
    ]
    ranking = rank(results, HELD_OUT, 0.45)
    return SweepReport("s-1", "b", ["trainer.max_staleness", "trainer.token_budget"], ranking, "8 finished", {})


def test_the_report_asks_nothing_of_the_network_and_lies_beside_its_pictures(tmp_path: Path) -> None:
    path = write_sweep_report(tmp_path, grid(), "text of the best")
    text = path.read_text()
    assert {file.name for file in tmp_path.iterdir()} == {
        "report.html", "best.toml", "time_to_reward.png", "tokens_per_s.png", "staleness.png", "reward.png", "pareto.png",
    }  # fmt: skip
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert text.count("data:image/png;base64,") == 5
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "<b>out of luck</b>" not in text
    assert "not reached" in text
    assert (tmp_path / "best.toml").read_text() == "text of the best"


def test_missing_numbers_have_words_and_are_never_zero() -> None:
    ranking = grid().ranking
    time_to = QUANTITIES[0]
    assert word_for_missing(time_to, ranking.row("c00"), HELD_OUT) == "not reached"
    assert word_for_missing(time_to, ranking.row("c04"), HELD_OUT) == "failed"
    failed = next(line for line in markdown(grid()).splitlines() if line.startswith("| c04"))
    assert failed == "| c04 | 2 | 200 | failed | 0 | – | – | – | – | 1.0 | 0.50 |"


@pytest.mark.parametrize("keys", [["trainer.seed"], ["trainer.seed", "trainer.top_p"], ["trainer.top_p"], []])
def test_pictures_over_one_axis_over_many_values_and_over_values_that_are_not_there(keys: list[str]) -> None:
    results = [
        cell(f"c{n:02d}", values={"trainer.seed": n * n, "trainer.top_p": 0.1 + n}, curve=[n / 20], rate=float(n))
        for n in range(14)
    ]
    results.append(cell("c14", "failed", values={"trainer.seed": "", "trainer.top_p": "x"}))
    ranking = rank(results, HELD_OUT, 0.3)
    drawn = draw_all(SweepReport("s", "b", keys, ranking, "", {}))
    assert set(drawn) == {"time_to_reward", "tokens_per_s", "reward", "pareto"}


def test_a_value_is_drawn_as_it_is_whatever_stands_in_it() -> None:
    """No formula, also where it looks like one; and a picture has room left beside a long path."""
    names = ["$\\nonsense$", "a$b$c", "/scratch/of/somebody/" + "model" * 40, "\u6570\u636e", "\x01\n"]
    for keys in (["model.name"], ["model.name", "data.source"]):
        results = [
            cell(f"c{n:02d}", values={"model.name": name, "data.source": name}, curve=[n / 5], metric="$\\x$", rate=1.0)
            for n, name in enumerate(names)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            drawn = draw_all(SweepReport("s", "b", keys, rank(results, "$\\x$", None), "", {}))
        assert len(drawn) == 4
    assert written("m" * 99) == "…" + "m" * 31
    assert written("a$b") == "a\\$b"
    assert QUANTITIES[1].text(1e300) == "1e+300"


def test_axes_are_ordered_by_number_and_short_where_that_is_clear() -> None:
    rows = rank([cell(f"c{n}", values={"k": v}) for n, v in enumerate([8, 0, "", 2.5])], HELD_OUT, None).rows
    assert distinct(rows, "k") == [0, 2.5, 8, ""]
    assert short_names(["trainer.seed", "server.nodes", "learner.nodes"]) == ["seed", "server.nodes", "learner.nodes"]


def test_more_than_two_axes_are_averaged_and_said_so() -> None:
    results = [
        cell(f"c{n}", values={"a": n % 2, "b": 0, "c": n}, curve=[0.1 * n], rate=1.0 if n < 3 else None)
        for n in range(4)
    ]
    report = SweepReport("s", "b", ["a", "b", "c"], rank(results, HELD_OUT, 0.0), "", {})
    assert "The pictures are over a and b, averaged over c." in markdown(report)
    assert "tokens_per_s" in draw_all(report)
