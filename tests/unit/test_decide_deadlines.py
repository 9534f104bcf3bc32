"""Deadlines of the decision: what hangs, what only takes its time."""

from dataclasses import replace

import pytest

from cluster import recovery
from cluster.decide import Action, Beat, Kind, Observation
from cluster.jobs import JobState, JobView
from tests.decisions import (
    DEAD,
    FOUR,
    HEALING,
    PENDING,
    RUNNING,
    UNKNOWN,
    after,
    at,
    beats,
    cancels,
    seen,
    trains,
)


def test_server_start_up_deadline_runs_from_the_running_job_not_from_the_queue() -> None:
    queued = seen(server=PENDING, learner=PENDING, endpoint=False, beats={})
    loading = seen(endpoint=False, beats={})
    assert after([at(0, queued), at(1000, queued), at(1001, loading), at(1100, loading)]).ending is None
    late = after([at(0, queued), at(1000, queued), at(1001, loading), at(1102, loading)])
    assert (late.ending, late.role) == (Kind.FAIL, "server")
    assert "server.startup_timeout = 100" in late.reason


def test_learner_start_up_deadline_runs_from_the_ready_server() -> None:
    loading = [at(0, seen(endpoint=False, beats={})), at(90, seen(beats={}))]
    assert after([*loading, at(289, seen(beats={}))]).ending is None
    late = after([*loading, at(291, seen(beats={}))])
    assert (late.ending, late.role) == (Kind.FAIL, "learner")
    assert "learner.startup_timeout" in late.reason


def test_a_learner_that_beats_without_progress_is_stuck() -> None:
    looks = [at(t, seen(beats=beats(t, 7.0))) for t in range(0, 60, 10)]
    assert after(looks).ending is None
    stuck = after([*looks, at(51, seen(beats=beats(51, 7.0)))])
    assert (stuck.ending, stuck.role) == (Kind.FAIL, "learner")
    assert "learner.step_timeout = 50" in stuck.reason


def test_progress_of_any_part_is_progress() -> None:
    """A learner that waits on an empty queue is healthy while the server generates."""
    looks = [
        at(t, seen(beats={"server": Beat(t, (float(t), 0.0)), "learner": Beat(t, (7.0, 0.0), training=True)}))
        for t in range(0, 500, 10)
    ]
    assert after(looks).ending is None


def test_a_leader_that_stops_beating_has_failed() -> None:
    looks = [
        at(t, seen(beats={"server": Beat(3), "learner": Beat(t, (float(t), 0.0), True)})) for t in range(0, 180, 10)
    ]
    assert after(looks).ending is None
    silent = after([*looks, at(181, seen(beats={"server": Beat(3), "learner": Beat(181, (181.0, 0.0), True)}))])
    assert (silent.ending, silent.role) == (Kind.FAIL, "server")
    assert "heartbeat" in silent.reason


def test_a_scheduler_that_does_not_answer_ends_nothing() -> None:
    """Neither a death nor a deadline can be acted on, and the jobs go on."""

    def look(t: int, view: JobView) -> Observation:
        return at(t, seen(server=view, learner=view, beats=beats(5, 7.0)))

    lost = after([look(t, UNKNOWN) for t in range(0, 3600, 10)])
    assert lost.actions == (Action(Kind.WAIT),)
    assert "does not answer" in lost.reason
    back = after([*(look(t, UNKNOWN) for t in range(0, 3600, 10)), look(3600, RUNNING), look(3700, RUNNING)])
    assert back.ending is Kind.FAIL  # it was stuck all the time


def test_a_learner_with_a_result_gets_time_to_leave() -> None:
    done = seen(result=True)
    assert after([at(0, done), at(119, done)]).ending is None
    late = after([at(0, done), at(121, done)])
    assert late.ending is Kind.FINISH
    assert cancels(late) == {"server", "learner"}


@pytest.mark.parametrize(
    ("phase", "key"),
    [("training", "step_timeout = 50"), ("saving", "save_timeout = 70"), ("delivering weights", "sync_timeout = 60")],
)
def test_each_phase_has_its_deadline_though_everything_else_moves(phase: str, key: str) -> None:
    policy = replace(HEALING, save_s=70, sync_s=60)

    def look(t: int) -> Observation:
        moving = {"server-0": Beat(t, (float(t),)), "learner": Beat(t, (float(t), 3.0), True, phase, 3)}
        return at(t, seen(beats=moving))

    limit = int(key.rsplit(" ", 1)[1])
    assert after([look(t) for t in range(0, limit, 10)], policy).fault is None
    found = after([look(t) for t in range(0, limit + 20, 10)], policy).fault
    assert found is not None
    assert (found.role, found.kind) == ("learner", recovery.HUNG)
    assert f"learner.{key}" in found.reason


STARTS = ["loading the model", "probing the server", "delivering weights", "waiting for rollouts"]


@pytest.mark.parametrize("phase", STARTS)
def test_the_first_step_has_a_deadline_though_everything_else_moves(phase: str) -> None:
    def look(t: int, training: bool = False, endpoint: bool = True) -> Observation:
        moving = {"server-0": Beat(t, (float(t),)), "learner": Beat(t, (float(t), 3.0), training, phase, 3)}
        return at(t, seen(beats=moving, endpoint=endpoint))

    assert after([look(t) for t in range(0, 201, 10)], HEALING).fault is None
    found = after([look(t) for t in range(0, 211, 10)], HEALING).fault
    assert found is not None
    assert (found.role, found.kind) == ("learner", recovery.HUNG)
    assert "first step within learner.startup_timeout = 200 s" in found.reason
    again = [*(look(t) for t in range(0, 101, 10)), look(110, endpoint=False)]
    again += [look(t) for t in range(120, 321, 10)]
    assert after(again, HEALING).fault is None  # it waited for another server
    assert after([*again, look(330)], HEALING).fault is not None


def test_the_first_steps_deadline_waits_for_a_server_that_is_suspended() -> None:
    def look(t: int, server: JobState) -> Observation:
        learner = Beat(t, (float(t), 0.0), False, "waiting for rollouts", 0)
        return at(t, seen(server=JobView(server), beats={"learner": learner}))

    looks = [look(t, JobState.SUSPENDED if t < 150 else JobState.RUNNING) for t in range(0, 341, 10)]
    assert after(looks, HEALING).fault is None
    assert after([*looks, look(350, JobState.RUNNING)], HEALING).fault is not None


def test_after_the_first_step_has_begun_its_deadline_is_over() -> None:
    def look(t: int) -> Observation:
        learner = Beat(t, (float(t), 0.0), t >= 100, "training" if t == 100 else "waiting for rollouts", 0)
        return at(t, seen(beats={"server-0": Beat(t), "learner": learner}))

    assert after([look(t) for t in range(0, 1000, 10)], HEALING).fault is None


def test_an_evaluation_before_the_first_step_only_has_to_go_on() -> None:
    def look(t: int, work: float | None = None, phase: str = "evaluating") -> Observation:
        learner = Beat(t, (float(t) if work is None else work, 0.0), False, phase, 0)
        return at(t, seen(beats={"server-0": Beat(t), "learner": learner}))

    going = [look(t, phase="delivering weights") for t in range(0, 150, 10)] + [look(t) for t in range(150, 1001, 10)]
    assert after(going, HEALING).fault is None
    assert after([*going, *(look(t, 1.0) for t in range(1010, 1061, 10))], HEALING).fault is None
    stuck = after([*going, *(look(t, 1.0) for t in range(1010, 1071, 10))], HEALING).fault
    assert stuck is not None
    assert "learner.step_timeout = 50" in stuck.reason
    first = [look(t, phase="waiting for rollouts") for t in range(1010, 1211, 10)]
    assert after([*going, *first], HEALING).fault is None
    assert after([*going, *first, look(1220, phase="waiting for rollouts")], HEALING).fault is not None


def test_a_rank_that_stopped_is_named_with_its_node() -> None:
    def look(t: int) -> Observation:
        frozen = Beat(3, (3.0, 3.0), True, "training", 3, "n2.cluster.local")
        moving = {
            "server-0": Beat(t),
            "learner": Beat(t, (float(t), float(t)), True, "training", t),
            "learner-1": frozen,
        }
        return at(t, seen(learner=JobView(JobState.RUNNING, nodes=FOUR), beats=moving))

    found = after([look(t) for t in range(0, 200, 10)], HEALING).fault
    assert found is not None
    assert (found.role, found.nodes) == ("learner", ("n2",))
    assert "rank 1 of the learner on n2.cluster.local has not written a heartbeat" in found.reason


def test_what_is_known_of_a_dead_server_is_not_held_against_the_next() -> None:
    policy = replace(HEALING, server_startup_s=100)
    first = seen(endpoint=False, beats={}, incarnations={"server": "a", "learner": "l"})
    second = replace(first, incarnations={"server": "b", "learner": "l"})
    looks = [at(0, first), at(90, first), at(99, second), at(190, second)]
    assert after(looks, policy).fault is None
    assert after([*looks, at(200, second)], policy).fault is not None


def test_a_beat_that_cannot_be_read_once_takes_nothing_back() -> None:
    looks = [trains(t, t, step=t // 20) for t in range(0, 1000, 10)]
    missed = at(1000, seen(beats={"server-0": Beat(1000)}, incarnations={"server": "s", "learner": "l"}))
    assert after([*looks, missed], HEALING).actions == (Action(Kind.WAIT),)
    assert after([*looks, missed, trains(1010, 1010, step=50)], HEALING).actions == (Action(Kind.WAIT),)


@pytest.mark.parametrize("silent", ["learner", "server"])
def test_what_was_suspended_begins_its_deadlines_anew(silent: str) -> None:
    suspended = {silent: JobView(JobState.SUSPENDED)}
    looks = [trains(t, t) for t in range(0, 40, 10)]
    paused = [trains(t, t) for t in range(40, 4000, 10)]
    paused = [replace(one, jobs={**one.jobs, **suspended}) for one in paused]
    again = [trains(t, t) for t in range(4000, 4050, 10)]
    assert after([*looks, *paused, *again], HEALING).actions == (Action(Kind.WAIT),)
    stuck = after([*looks, *paused, *again, trains(4060, 4060)], HEALING)
    assert stuck.actions == (Action(Kind.STOP, "learner"),)


def test_a_server_that_takes_its_address_back_is_not_one_that_never_was_ready() -> None:
    looks = [trains(t, t, step=t // 20) for t in range(0, 1000, 10)]
    ending = [trains(t, t, step=t // 20, endpoint=False) for t in range(1000, 1040, 10)]
    assert after([*looks, *ending], HEALING).actions == (Action(Kind.WAIT),)
    ended = replace(trains(1040, 1040, step=50, endpoint=False), jobs={"server": DEAD, "learner": RUNNING})
    assert "CUDA out of memory" in after([*looks, *ending, ended], HEALING).reason
    never = [trains(t, t, step=t // 20, endpoint=False) for t in range(1000, 1120, 10)]
    assert "was not ready" in after([*looks, *never], HEALING).reason
