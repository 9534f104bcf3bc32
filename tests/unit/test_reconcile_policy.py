"""What reconciliation does about a run: the table, and what holds for all runs."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.decide import Kind
from tasks.reconcile_policy import (
    CANCELS,
    LATE_S,
    LOST_S,
    PENDING_S,
    SETTLE_S,
    TRUTH,
    Act,
    Facts,
    FlowState,
    Leader,
    reconcile,
    without_folder,
)

ID = "f00d"
STATES = ("SCHEDULED", "PENDING", "RUNNING", "COMPLETED", "FAILED", "CRASHED", "PAUSED", *CANCELS)


def flow(state: str = "RUNNING", **more: Any) -> FlowState:
    return FlowState(state, **{"cancelled": 10.0 if state in CANCELS else 0.0, "at": 30.0, **more})


def run(state: str | None = "RUNNING", **more: Any) -> Facts:
    return Facts(flow_run=ID, flow=None if state is None else flow(state), **more)


JOBS = ("server (job 7)", "learner (job 8)")
LIVES, NONE, RELEASED, UNSURE = Leader.LIVES, Leader.NONE, Leader.RELEASED, Leader.UNSURE
ROWS: list[tuple[str, Facts, Act, str]] = [
    ("another instance's", run("CRASHED", others="of bob", live=JOBS), Act.NOTHING, ""),
    ("unknown to this Prefect", run(None, live=JOBS), Act.NOTHING, ""),
    ("ended, unknown to this Prefect", run(None, outcome=Kind.FAIL, live=JOBS), Act.NOTHING, ""),
    ("all is well", run(leader=LIVES, live=JOBS), Act.NOTHING, ""),
    ("crashed by a server that had not heard of it", run("CRASHED", leader=LIVES, live=JOBS), Act.SET_STATE, "RUNNING"),
    ("a second start is asked for", run("SCHEDULED", leader=LIVES), Act.NOTHING, ""),
    ("cancelled, its leader was not told", run("CANCELLING", leader=LIVES, live=JOBS), Act.ASK_TO_STOP, ""),
    ("cancelled, and told", run("CANCELLING", leader=LIVES, live=JOBS, cancel="Prefect: x"), Act.NOTHING, ""),
    ("a leader of another host", run(leader=UNSURE), Act.NOTHING, ""),
    ("the same, cancelled", run("CANCELLED", leader=UNSURE), Act.ASK_TO_STOP, ""),
    ("the same, crashed", run("CRASHED", leader=UNSURE), Act.NOTHING, ""),
    ("killed", run(live=JOBS), Act.LEAD_BY_FLOW, ""),
    ("killed and crashed", run("CRASHED"), Act.LEAD_BY_FLOW, ""),
    ("crashed a moment ago", replace(run("CRASHED"), flow=flow("CRASHED", age_s=5.0)), Act.NOTHING, ""),
    ("given free a moment ago", run(leader=RELEASED), Act.NOTHING, ""),
    ("given free", run(leader=RELEASED, seen_s=SETTLE_S), Act.LEAD_BY_FLOW, ""),
    ("given free, and Prefect knows", run("CRASHED", leader=RELEASED), Act.LEAD_BY_FLOW, ""),
    ("started a moment ago", replace(run(), flow=flow(age_s=1.0)), Act.NOTHING, ""),
    ("killed, and told twice", run("CRASHED", lead_age_s=5.0), Act.NOTHING, ""),
    ("two passes, one after the other", Facts(lead_age_s=1.0), Act.NOTHING, ""),
    ("waits for a worker", run("SCHEDULED"), Act.NOTHING, ""),
    ("no worker takes it", run("SCHEDULED", seen_s=LATE_S), Act.LEAD_HERE, ""),
    ("no worker takes it, unprepared", run("SCHEDULED", seen_s=LATE_S, prepared=False), Act.NOTHING, ""),
    ("a worker takes it", run("PENDING"), Act.NOTHING, ""),
    ("a worker died over it", run("PENDING", seen_s=PENDING_S), Act.LEAD_BY_FLOW, ""),
    ("paused", run("PAUSED"), Act.NOTHING, ""),
    ("of the command line", Facts(live=JOBS), Act.LEAD_HERE, ""),
    ("never prepared", Facts(prepared=False), Act.NOTHING, ""),
    ("died while it was prepared", run(prepared=False), Act.LEAD_BY_FLOW, ""),
    ("Prefect is away", run(None, answers=False), Act.LEAD_HERE, ""),
    ("no deployment", replace(run(), flow=flow(startable=False)), Act.LEAD_HERE, ""),
    ("led by its SLURM job", Facts(batch=True, leader=RELEASED), Act.NOTHING, ""),
    ("local jobs of another host", run(elsewhere="n7"), Act.NOTHING, ""),
    ("cancelled with worker and flow dead", run("CANCELLING", live=JOBS), Act.CANCEL, ""),
    ("the same, later", run("CANCELLED", live=JOBS), Act.CANCEL, ""),
    ("a crash forced on a cancelled one", replace(run(), flow=flow("CRASHED", cancelled=10.0)), Act.CANCEL, ""),
    ("its leader died in a cancel", run(cancel="alice: enough"), Act.CANCEL, ""),
    ("cancelled, then resumed by hand, led", run("CANCELLED", resumed_at=20, leader=LIVES), Act.NOTHING, ""),
    ("cancelled, then resumed by hand", run("CANCELLED", resumed_at=20), Act.LEAD_HERE, ""),
    ("failed, then resumed by hand", run("FAILED", resumed_at=20, leader=LIVES), Act.SET_STATE, "RUNNING"),
    ("tried too often", run("CRASHED", leads=5, live=JOBS), Act.FAIL, ""),
    ("tried too often, but led", run("CRASHED", leads=5, leader=LIVES), Act.SET_STATE, "RUNNING"),
    ("tried too often, but asked", run("SCHEDULED", leads=5), Act.NOTHING, ""),
    ("a cell, its sweep cancelled, nobody leads it", run("CRASHED", sweep="bob: x", live=JOBS), Act.CANCEL, ""),
    ("the same, queued", run("SCHEDULED", sweep="bob: x", prepared=False), Act.CANCEL, ""),
    ("the same, led", run(sweep="bob: x", leader=LIVES), Act.ASK_TO_STOP, ""),
    ("the same, and asked", run(sweep="bob: x", cancel="sweep s: bob: x", leader=LIVES), Act.NOTHING, ""),
    ("a sweep, its parent killed", run("CRASHED", cells=("c00",), unasked=("c00",)), Act.LEAD_BY_FLOW, ""),
    ("a sweep of the command line", Facts(cells=("c00",), unasked=("c00",)), Act.LEAD_HERE, ""),
    ("a sweep, Prefect away", run(None, answers=False), Act.LEAD_HERE, ""),
    ("a cancelled sweep, its parent dead", run("CANCELLING", cells=("c00",), unasked=("c00",)), Act.ASK_CELLS, ""),
    ("the same, asked", run("CANCELLING", cells=("c00",), cancel="Prefect: x"), Act.NOTHING, ""),
    ("the same, ended", run("CANCELLING", cancel="Prefect: x"), Act.CANCEL, ""),
    ("the same, its parent lives", run("CANCELLING", leader=LIVES, cells=("c00",)), Act.ASK_TO_STOP, ""),
    ("a sweep whose parent died too often", run("CRASHED", leads=5, cells=("c00",)), Act.FAIL, ""),
    ("ended, jobs live", run(outcome=Kind.FINISH, live=JOBS), Act.STOP_JOBS, ""),
    ("ended, jobs live, being resumed", run(outcome=Kind.FAIL, live=JOBS, leader=LIVES), Act.NOTHING, ""),
    ("ended, scheduler away", run(outcome=Kind.FAIL, live=JOBS, jobs_known=False), Act.NOTHING, ""),
    ("just ended", run(outcome=Kind.FINISH, age_s=1), Act.NOTHING, ""),
    ("finished", run(outcome=Kind.FINISH, age_s=SETTLE_S), Act.SET_STATE, "COMPLETED"),
    ("finished, paused by a person", run("PAUSED", outcome=Kind.FINISH, age_s=SETTLE_S), Act.SET_STATE, "COMPLETED"),
    ("just ended, paused by a person", run("PAUSED", outcome=Kind.FINISH, age_s=1), Act.NOTHING, ""),
    ("finished, crashed", run("CRASHED", outcome=Kind.FINISH), Act.SET_STATE, "COMPLETED"),
    ("failed", run("CRASHED", outcome=Kind.FAIL), Act.SET_STATE, "FAILED"),
    ("cancelled", run("CANCELLING", outcome=Kind.CANCELLED), Act.SET_STATE, "CANCELLED"),
    ("cancelled, a crash forced on it", run("CRASHED", outcome=Kind.CANCELLED), Act.SET_STATE, "CANCELLED"),
    ("finished, then cancelled", run("CANCELLED", outcome=Kind.FINISH), Act.NOTHING, ""),
    ("a person starts it again", run("SCHEDULED", outcome=Kind.FAIL), Act.NOTHING, ""),
    ("the same, a worker takes it", run("PENDING", outcome=Kind.FAIL), Act.NOTHING, ""),
    (
        "the same, a worker died over it",
        run("PENDING", outcome=Kind.FAIL, seen_s=PENDING_S),
        Act.SET_STATE,
        "SCHEDULED",
    ),
    ("the same, it runs", replace(run(outcome=Kind.FAIL, age_s=9e4), flow=flow(age_s=1)), Act.NOTHING, ""),
    ("the same, it was killed at once", run(outcome=Kind.FAIL, age_s=9e4), Act.SET_STATE, "FAILED"),
    ("finished, a worker died over it", run("PENDING", outcome=Kind.FINISH, seen_s=9e4), Act.SET_STATE, "COMPLETED"),
    ("a start of one that has finished", run("SCHEDULED", outcome=Kind.FINISH), Act.SET_STATE, "COMPLETED"),
    ("all agree", run("COMPLETED", outcome=Kind.FINISH), Act.NOTHING, ""),
]


@pytest.mark.parametrize(("facts", "act", "state"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_table(facts: Facts, act: Act, state: str) -> None:
    plan = reconcile(facts)
    assert (plan.act, plan.state) == (act, state), plan.why
    assert plan.why


def test_where_only_a_person_can_help() -> None:
    for alone in (run(None, live=JOBS), run(None, leader=RELEASED), run(elsewhere="n7"), Facts(prepared=False)):
        assert reconcile(alone).person, reconcile(alone).why
    for helped in (run(None, leader=LIVES), run(None, outcome=Kind.FAIL), run(live=JOBS), run(leader=LIVES)):
        assert not reconcile(helped).person


def test_what_is_settled() -> None:
    assert reconcile(run("COMPLETED", outcome=Kind.FINISH)).settled
    assert reconcile(Facts(outcome=Kind.FAIL)).settled
    for other in (
        run("COMPLETED", outcome=Kind.FINISH, live=JOBS),
        run(None, outcome=Kind.FINISH, answers=False),
        run(None, outcome=Kind.FINISH),
        run("SCHEDULED", outcome=Kind.FAIL),
        run("COMPLETED", leader=LIVES),
    ):
        assert not reconcile(other).settled


flows = st.builds(
    lambda state, at, age_s, startable, cancelled: FlowState(
        state, at, age_s, startable, cancelled or 10.0 * (state in CANCELS)
    ),
    st.sampled_from(STATES),
    st.sampled_from([0.0, 10.0, 30.0]),
    st.sampled_from([0.0, 3600.0]),
    st.booleans(),
    st.sampled_from([0.0, 10.0, 30.0]),
).map(lambda value: value if value.state in (*CANCELS, "CRASHED", "FAILED") else replace(value, cancelled=0.0))
facts = st.builds(
    Facts,
    others=st.sampled_from(["", "", "", "of bob"]),
    flow_run=st.sampled_from(["", ID]),
    answers=st.booleans(),
    flow=st.none() | flows,
    prepared=st.booleans(),
    outcome=st.none() | st.sampled_from(list(TRUTH)),
    age_s=st.sampled_from([0.0, 3600.0]),
    leader=st.sampled_from(list(Leader)),
    live=st.sampled_from([(), JOBS]),
    jobs_known=st.booleans(),
    elsewhere=st.sampled_from(["", "", "n7"]),
    batch=st.booleans(),
    cancel=st.sampled_from(["", "alice: enough"]),
    sweep=st.sampled_from(["", "", "bob: enough"]),
    cells=st.sampled_from([(), ("c00", "c01")]),
    unasked=st.sampled_from([(), ("c01",)]),
    resumed_at=st.sampled_from([0.0, 20.0]),
    leads=st.integers(0, 6),
    lead_age_s=st.sampled_from([0.0, 3600.0]),
    seen_s=st.sampled_from([0.0, 60.0, 3600.0]),
).map(
    lambda run: replace(
        run, flow=run.flow if run.flow_run and run.answers else None, unasked=run.unasked if run.cells else ()
    )
)


def applied(run: Facts) -> Facts:
    """The run after its plan was carried out."""
    plan = reconcile(run)
    ended = {"live": (), "leader": Leader.RELEASED, "seen_s": 0.0}
    match plan.act:
        case Act.ASK_TO_STOP:
            return replace(run, cancel="Prefect: cancelled")
        case Act.ASK_CELLS:
            return replace(run, cancel="Prefect: cancelled", unasked=(), leader=Leader.RELEASED, seen_s=0.0)
        case Act.CANCEL:
            return replace(run, outcome=Kind.CANCELLED, cancel="Prefect: cancelled", **ended)
        case Act.FAIL:
            return replace(run, outcome=Kind.FAIL, **ended)
        case Act.STOP_JOBS:
            return replace(run, **ended)
        case Act.SET_STATE:
            assert run.flow is not None
            return replace(run, flow=FlowState(plan.state, 40.0, 0.0, run.flow.startable, run.flow.cancelled))
        case Act.LEAD_BY_FLOW:
            return replace(run, flow=FlowState("SCHEDULED", 40.0, 0.0), leads=run.leads + 1, lead_age_s=0.0, seen_s=0.0)
        case Act.LEAD_HERE:
            return replace(run, leader=Leader.LIVES, leads=run.leads + 1, lead_age_s=0.0, seen_s=0.0)
    return run


@given(facts)
def test_applied_to_its_own_result_it_does_nothing(run: Facts) -> None:
    for _ in range(3):
        if reconcile(run).act is Act.NOTHING:
            return
        run = applied(run)
    assert reconcile(run).act is Act.NOTHING


@given(facts)
def test_it_never_acts_on_what_is_not_ours(run: Facts) -> None:
    assert reconcile(replace(run, others="of bob")).act is Act.NOTHING
    if run.flow_run:
        assert reconcile(replace(run, answers=True, flow=None)).act is Act.NOTHING


@given(facts)
def test_a_run_that_has_ended_never_starts_again(run: Facts) -> None:
    plan = reconcile(run)
    if run.outcome is not None:
        assert plan.act in (Act.NOTHING, Act.STOP_JOBS, Act.SET_STATE)
        assert plan.state != "RUNNING"
        if plan.state == "SCHEDULED":  # a person's start, which a worker has dropped
            assert run.flow is not None
            assert run.flow.state == "PENDING"


@given(facts)
def test_a_led_run_gets_no_second_leader_and_loses_no_job(run: Facts) -> None:
    if run.leader in (Leader.LIVES, Leader.UNSURE):
        assert reconcile(run).act in (Act.NOTHING, Act.ASK_TO_STOP, Act.SET_STATE)


@given(facts)
def test_out_of_a_cancel_no_other_state_is_set(run: Facts) -> None:
    """A crash that is forced on a cancelled run would start it again."""
    plan = reconcile(run)
    if run.flow is not None and run.flow.state in CANCELS:
        assert plan.act is not Act.LEAD_BY_FLOW
        assert plan.state in ("", "CANCELLED")
    if run.flow is not None and run.flow.cancelled > run.resumed_at:
        assert plan.act not in (Act.LEAD_BY_FLOW, Act.LEAD_HERE)


@given(facts)
def test_what_is_asked_to_stop_is_never_started_and_a_sweep_ends_after_its_cells(run: Facts) -> None:
    plan = reconcile(run)
    if run.outcome is None and (run.cancel or run.sweep):
        assert plan.act not in (Act.LEAD_BY_FLOW, Act.LEAD_HERE)
    if run.cells and plan.act is Act.CANCEL:
        raise AssertionError(plan.why)


@given(facts)
def test_leaders_that_die_are_replaced_so_many_times(run: Facts) -> None:
    """Whatever the world does in between, without a new step there are no more than so many."""
    started = 0
    for _ in range(20):
        plan = reconcile(run)
        if plan.act in (Act.LEAD_BY_FLOW, Act.LEAD_HERE):
            started += 1
        run = replace(applied(run), leader=Leader.NONE, seen_s=3600.0, lead_age_s=3600.0)
        if run.flow is not None and run.outcome is None and run.flow.state in ("SCHEDULED", "PENDING"):
            run = replace(run, flow=replace(run.flow, state="CRASHED", age_s=3600.0))
    assert started <= run.max_leads


@pytest.mark.parametrize(
    ("state", "seen_s", "starts", "act"),
    [
        ("RUNNING", 0, 1, Act.NOTHING),
        ("RUNNING", LOST_S, 1, Act.LEAD_BY_FLOW),
        ("PENDING", PENDING_S, 0, Act.LEAD_BY_FLOW),
        ("CRASHED", 0, 1, Act.LEAD_BY_FLOW),
        ("CRASHED", 0, 4, Act.NOTHING),
        ("CANCELLED", LOST_S, 1, Act.NOTHING),
    ],
)
def test_a_flow_run_without_a_folder(state: str, seen_s: float, starts: int, act: Act) -> None:
    assert without_folder(flow(state), seen_s, starts, 3).act is act
    assert without_folder(flow(state, age_s=1.0), seen_s, starts, 3).act is (Act.NOTHING if state == "CRASHED" else act)
