"""The decision table: what is observed, what is decided."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.decide import ENDINGS, Action, Beat, Decision, Kind, Observation, Policy, State, decide
from cluster.jobs import JobState, JobView

POLICY = Policy(server_startup_s=100, learner_startup_s=200, step_s=50)
RUNNING, PENDING = JobView(JobState.RUNNING), JobView(JobState.PENDING)
UNKNOWN = JobView(JobState.UNKNOWN)
DEAD = JobView(JobState.FAILED, 3, "CUDA out of memory")
KILLED = JobView(JobState.FAILED, reason="killed")
LEFT = JobView(JobState.FINISHED, 0, "finished")
TRAINING = {"server": Beat(5), "learner": Beat(5, (1.0, 1.0), training=True)}


def seen(server: JobView | None = RUNNING, learner: JobView | None = RUNNING, **values: object) -> Observation:
    jobs = {role: view for role, view in (("server", server), ("learner", learner)) if view is not None}
    return replace(Observation(now=0, jobs=jobs, endpoint=True, beats=TRAINING), **values)  # type: ignore[arg-type]


def cancels(decision: Decision) -> set[str | None]:
    return {action.role for action in decision.actions if action.kind is Kind.CANCEL}


@pytest.mark.parametrize(
    ("observation", "ending", "role", "words"),
    [
        pytest.param(seen(), None, None, "training", id="healthy"),
        pytest.param(
            seen(server=PENDING, endpoint=False, beats={}), None, None, "waiting for the cluster", id="queued"
        ),
        pytest.param(seen(endpoint=False, beats={}), None, None, "the server is starting", id="server loads"),
        pytest.param(seen(beats={}), None, None, "the learner is starting", id="learner loads"),
        pytest.param(seen(server=DEAD), Kind.FAIL, "server", "exit code 3: CUDA out of memory", id="server died"),
        pytest.param(seen(server=KILLED), Kind.FAIL, "server", "killed", id="server killed"),
        pytest.param(seen(server=LEFT), Kind.FAIL, "server", "exit code 0", id="server left by itself"),
        pytest.param(seen(learner=DEAD), Kind.FAIL, "learner", "exit code 3", id="learner died"),
        pytest.param(seen(learner=LEFT), Kind.FAIL, "learner", "wrote no result", id="learner left without result"),
        pytest.param(
            seen(DEAD, DEAD), Kind.FAIL, "server", "the server has ended", id="both died: the server is the cause"
        ),
        pytest.param(
            seen(LEFT, DEAD), Kind.FAIL, "learner", "the learner has ended", id="server left after the learner"
        ),
        pytest.param(seen(learner=LEFT, result=True), Kind.FINISH, None, "finished", id="finished"),
        pytest.param(seen(DEAD, LEFT, result=True), Kind.FINISH, None, "finished", id="result outranks a dead server"),
        pytest.param(seen(DEAD, RUNNING, result=True), None, None, "closing down", id="result, learner still leaving"),
        pytest.param(seen(cancel="anna: enough"), Kind.CANCELLED, None, "anna: enough", id="cancelled"),
        pytest.param(
            seen(DEAD, DEAD, cancel="anna: enough"), Kind.CANCELLED, None, "anna", id="cancel outranks failure"
        ),
        pytest.param(
            seen(learner=LEFT, result=True, cancel="x"), Kind.CANCELLED, None, "x", id="cancel outranks result"
        ),
    ],
)
def test_one_look(observation: Observation, ending: Kind | None, role: str | None, words: str) -> None:
    decision = decide(observation, POLICY, State())
    assert decision.ending == ending
    assert decision.role == role
    assert words in decision.reason
    if ending is None:
        assert decision.actions == (Action(Kind.WAIT),)


def test_roles_without_a_job_are_started() -> None:
    assert decide(seen(None, None), POLICY, State()).actions == (
        Action(Kind.START, "server"),
        Action(Kind.START, "learner"),
    )
    external = replace(POLICY, roles=("learner",))
    assert decide(seen(None, None), external, State()).actions == (Action(Kind.START, "learner"),)
    assert decide(seen(None, RUNNING), external, State()).ending is None


def after(observations: list[Observation], policy: Policy = POLICY) -> Decision:
    """The decision on the last of several looks."""
    state = State()
    for observation in observations:
        decision = decide(observation, policy, state)
        state = decision.state
    return decision


def at(now: float, observation: Observation) -> Observation:
    return replace(observation, now=now)


def beats(counter: int, progress: float, training: bool = True) -> dict[str, Beat]:
    return {"server": Beat(counter), "learner": Beat(counter, (progress, 0.0), training)}


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


def test_a_job_that_stays_unknown_is_lost_and_one_that_comes_back_is_not() -> None:
    def look(t: int, view: JobView) -> Observation:
        return at(t, seen(learner=view, beats=beats(t, float(t))))

    assert after([look(t, UNKNOWN) for t in range(0, 300, 10)]).ending is None
    assert after([look(t, UNKNOWN) for t in range(0, 320, 10)]).role == "learner"
    flapping = [look(t, UNKNOWN if t % 200 else RUNNING) for t in range(0, 1000, 10)]
    assert after(flapping).ending is None


def test_a_learner_with_a_result_gets_time_to_leave() -> None:
    done = seen(result=True)
    assert after([at(0, done), at(119, done)]).ending is None
    late = after([at(0, done), at(121, done)])
    assert late.ending is Kind.FINISH
    assert cancels(late) == {"server", "learner"}


VIEWS = st.sampled_from([None, RUNNING, PENDING, UNKNOWN, DEAD, KILLED, LEFT])
BEATS = st.dictionaries(
    st.sampled_from(["server", "learner", "rollout"]),
    st.builds(Beat, st.integers(0, 3), st.tuples(st.floats(0, 3), st.floats(0, 3)), st.booleans()),
)
LOOKS = st.lists(
    st.builds(
        lambda server, learner, beats, endpoint, result, cancel, wait: (
            seen(server, learner, beats=beats, endpoint=endpoint, result=result, cancel=cancel),
            wait,
        ),
        VIEWS, VIEWS, BEATS, st.booleans(), st.booleans(), st.sampled_from(["", "", "", "anna: enough"]),
        st.floats(0, 400),
    ),
    min_size=1,
    max_size=12,
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(LOOKS, st.sampled_from([("server", "learner"), ("learner",)]))
def test_whatever_is_seen(looks: list[tuple[Observation, float]], roles: tuple[str, ...]) -> None:
    policy, state, now = replace(POLICY, roles=roles), State(), 0.0
    for observation, wait in looks:
        now += wait
        observation = replace(observation, now=now)
        decision = decide(observation, policy, state)
        assert decide(observation, policy, state) == decision
        kinds = [action.kind for action in decision.actions]
        endings = [kind for kind in kinds if kind in ENDINGS]
        live = {role for role, view in observation.jobs.items() if not view.state.ended}
        assert len(endings) <= 1
        if endings:
            assert cancels(decision) == live
            assert not {Kind.START, Kind.WAIT} & set(kinds)
        else:
            assert not cancels(decision)
            assert set(kinds) in ({Kind.WAIT}, {Kind.START})
            starts = {action.role for action in decision.actions if action.kind is Kind.START}
            assert starts.isdisjoint(observation.jobs)
        assert (Kind.CANCELLED in endings) == bool(observation.cancel)
        assert (Kind.FAIL in endings) <= (decision.role in ("server", "learner"))
        if Kind.FINISH in endings:
            assert observation.result
        state = decision.state
