"""What a sweep starts and stops next, and which cells early stopping gives up."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.sweep.halving import hopeless, rungs
from slipstream.sweep.schedule import BUDGET, HALVING, INTERRUPT, CellState, Limits, Phase, Plan, decide
from slipstream.sweep.spec import Halving

P = Phase


def cells(*states: CellState | Phase) -> list[CellState]:
    return [
        state if isinstance(state, CellState) else CellState(f"c{number}", state) for number, state in enumerate(states)
    ]


@pytest.mark.parametrize(
    ("states", "limits", "expected"),
    [
        (cells(P.WAITING, P.WAITING, P.WAITING), Limits(2), {"start": ("c0", "c1")}),
        (cells(P.RUNNING, P.WAITING, P.WAITING), Limits(2), {"start": ("c1",)}),
        (cells(P.STARTING, P.RUNNING, P.WAITING), Limits(2), {}),
        (cells(P.FINISHED, P.FINISHED), Limits(2), {"done": True}),
        (cells(P.FAILED, P.WAITING), Limits(1), {"start": ("c1",)}),
        (cells(P.FAILED, P.FINISHED), Limits(1), {"done": True}),
        (cells(CellState("c0", P.FAILED, again=True), P.FINISHED), Limits(1), {"start": ("c0",)}),
        (cells(P.STOPPED, P.FINISHED), Limits(1), {"done": True}),
        (cells(CellState("c0", P.STOPPED, stopped_for=INTERRUPT)), Limits(1), {"start": ("c0",)}),
        (cells(CellState("c0", P.STOPPED, stopped_for=BUDGET)), Limits(1), {"start": ("c0",)}),
        (cells(CellState("c0", P.STOPPED, stopped_for=HALVING)), Limits(1), {"done": True}),
        # what has begun goes on before what has not
        (cells(P.WAITING, CellState("c1", P.STOPPED, stopped_for=INTERRUPT)), Limits(1), {"start": ("c1",)}),
        # a run without a leader gets one, and counts
        (cells(CellState("c0", P.RUNNING, led=False), P.WAITING), Limits(1), {"start": ("c0",)}),
        (cells(CellState("c0", P.RUNNING, led=False, asked=True), P.WAITING), Limits(1), {}),
    ],
)
def test_table(states: list[CellState], limits: Limits, expected: dict[str, Any]) -> None:
    plan = decide(states, limits, {})
    assert (plan.start, plan.done) == (expected.get("start", ()), expected.get("done", False))
    assert not plan.stop


def test_a_budget_that_is_spent_stops_all_and_starts_nothing() -> None:
    states = cells(
        CellState("c0", P.FINISHED, gpu_hours=1.5), CellState("c1", P.RUNNING, gpu_hours=0.6), P.STARTING, P.WAITING
    )
    plan = decide(states, Limits(3, gpu_hours=2.0), {})
    why = "the budget of 2 GPU hours is spent (2.10 used)"
    assert plan == Plan(stop={"c1": (BUDGET, why), "c2": (BUDGET, why)}, spent=True, reason=f"{why}; 1 cells are left")
    over = decide([states[0], CellState("c1", P.STOPPED, stopped_for=BUDGET, gpu_hours=0.6)], Limits(3, 2.0), {})
    assert (over.done, over.spent, over.start) == (True, True, ())
    all_done = decide([CellState("c0", P.FINISHED, gpu_hours=3.0)], Limits(1, 2.0), {})
    assert (all_done.done, all_done.spent) == (True, False)


def test_a_hopeless_cell_is_stopped_once_and_only_while_it_runs() -> None:
    states = cells(P.RUNNING, CellState("c1", P.RUNNING, asked=True), P.FINISHED)
    plan = decide(states, Limits(3), {"c0": "last", "c1": "last", "c2": "last"})
    assert plan.stop == {"c0": (HALVING, "last")}


states = st.builds(
    CellState,
    id=st.just(""),
    phase=st.sampled_from(Phase),
    led=st.booleans(),
    asked=st.booleans(),
    stopped_for=st.sampled_from(["", BUDGET, HALVING, INTERRUPT]),
    again=st.booleans(),
    gpu_hours=st.floats(0, 2),
)


@given(st.lists(states, max_size=8), st.integers(1, 4), st.none() | st.floats(0.1, 8), st.sets(st.integers(0, 7)))
def test_the_contract_of_decide(drawn: list[CellState], most: int, budget: float | None, bad: set[int]) -> None:
    given_cells = [CellState(**{**vars(state), "id": f"c{number}"}) for number, state in enumerate(drawn)]
    by_id = {cell.id: cell for cell in given_cells}
    plan = decide(given_cells, Limits(most, budget), {f"c{number}": "last" for number in bad})
    active = {cell.id for cell in given_cells if cell.phase.active}
    assert len(active | set(plan.start)) <= max(most, len(active))
    assert len(set(plan.start)) == len(plan.start)
    assert not set(plan.start) & set(plan.stop)
    for cell in plan.start:
        assert by_id[cell].phase is not Phase.FINISHED
        assert by_id[cell].again or by_id[cell].phase is not Phase.FAILED
        assert not (by_id[cell].phase is Phase.RUNNING and by_id[cell].led)
    assert set(plan.stop) <= active
    assert not any(by_id[cell].asked for cell in plan.stop)
    if budget is not None and sum(cell.gpu_hours for cell in given_cells) >= budget:
        assert not plan.start
    assert not (plan.done and (plan.start or plan.stop or active))


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=6), st.integers(1, 3))
def test_a_sweep_comes_to_its_end_with_each_cell_run_once(work: list[tuple[int, bool]], most: int) -> None:
    """A simulation: each cell needs some rounds, and fails or finishes."""
    left = {f"c{number}": rounds for number, (rounds, _) in enumerate(work)}
    fails = {f"c{number}": bad for number, (_, bad) in enumerate(work)}
    phases = dict.fromkeys(left, Phase.WAITING)
    starts = dict.fromkeys(left, 0)
    for _ in range(100):
        plan = decide([CellState(cell, phase) for cell, phase in phases.items()], Limits(most), {})
        if plan.done:
            break
        for cell in plan.start:
            starts[cell] += 1
            phases[cell] = Phase.RUNNING
        running = [cell for cell, phase in phases.items() if phase is Phase.RUNNING]
        assert 0 < len(running) <= most
        for cell in running:
            left[cell] -= 1
            if left[cell] == 0:
                phases[cell] = Phase.FAILED if fails[cell] else Phase.FINISHED
    assert plan.done
    assert set(starts.values()) == {1}
    assert all(phase in (Phase.FAILED, Phase.FINISHED) for phase in phases.values())


def curve(*values: float) -> list[tuple[int, float]]:
    return list(enumerate(values, 1))


def test_rungs() -> None:
    assert rungs(Halving(first_rung=2, factor=3), 20) == [2, 6, 18]
    assert rungs(Halving(first_rung=5), 4) == []


def test_the_first_to_arrive_goes_on_and_is_judged_again_as_more_come() -> None:
    halving = Halving(first_rung=2, factor=2)
    running = frozenset({"a", "b"})
    curves = {"a": curve(0.1, 0.2, 0.2), "b": curve(0.1, 0.3)}
    assert hopeless(halving, {"a": 3, "b": 1}, curves, running) == {}
    late = hopeless(halving, {"a": 3, "b": 2}, curves, running)
    assert late == {"a": "place 2 of 2 at step 2 (0.2); the best 1 go on"}
    assert hopeless(halving, {"a": 3, "b": 2}, curves, frozenset({"b"})) == {}, "one that has ended is left alone"


def test_equal_cells_and_cells_without_a_value_go_on() -> None:
    halving = Halving(first_rung=2, factor=2)
    running = frozenset({"a", "b", "c"})
    alike = {"a": curve(0.1, 0.2), "b": curve(0.1, 0.2), "c": []}
    assert hopeless(halving, {"a": 2, "b": 2, "c": 2}, alike, running) == {}


@given(
    st.dictionaries(
        st.sampled_from("abcdefgh"), st.lists(st.floats(0, 1), min_size=1, max_size=12), min_size=1, max_size=8
    ),
    st.integers(1, 4),
    st.integers(2, 4),
)
def test_never_all_are_given_up_and_never_one_that_none_beats(
    values: dict[str, list[float]], first: int, factor: int
) -> None:
    halving = Halving(first_rung=first, factor=factor)
    curves = {cell: curve(*drawn) for cell, drawn in values.items()}
    steps = {cell: len(drawn) for cell, drawn in values.items()}
    given_up = hopeless(halving, steps, curves, frozenset(values))
    assert set(given_up) < set(values)
    assert all(steps[cell] >= first for cell in given_up)
    for cell, why in given_up.items():
        rung = int(re.search(r"at step (\d+)", why)[1])  # type: ignore[index]
        assert rung in rungs(halving, steps[cell])
        better = [o for o in values if steps[o] >= rung and curves[o][rung - 1][1] > curves[cell][rung - 1][1]]
        assert better, "it was given up, and nobody was better"
