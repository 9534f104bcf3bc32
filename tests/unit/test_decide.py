"""The decision table: what is observed, what is decided."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import recovery
from cluster.decide import ENDINGS, Action, Beat, Kind, Observation, State, decide
from cluster.jobs import JobState, JobView
from cluster.recovery import Fault
from tests.decisions import (
    DEAD,
    FOUR,
    HEALING,
    KILLED,
    LEFT,
    PENDING,
    POLICY,
    RUNNING,
    UNKNOWN,
    after,
    at,
    beats,
    cancels,
    fault,
    seen,
    view,
)


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


VIEWS = st.sampled_from([None, RUNNING, PENDING, UNKNOWN, DEAD, KILLED, LEFT, *map(JobView, JobState)])
BEATS = st.dictionaries(
    st.sampled_from(["server-0", "learner", "learner-1", "rollout"]),
    st.builds(
        Beat,
        st.integers(0, 3),
        st.tuples(st.floats(0, 3), st.floats(0, 3)),
        st.booleans(),
        st.sampled_from(["", "training", "saving", "delivering weights", "waiting for the server"]),
    ),
)
FAULTS = st.lists(
    st.builds(
        Fault,
        st.floats(0, 1e4),
        st.integers(1, 3),
        st.sampled_from(["server", "learner"]),
        st.sampled_from([recovery.DIED, recovery.RELEASED, recovery.LEFT, recovery.REFUSED]),
        st.integers(0, 2),
    ),
    max_size=4,
).map(tuple)
LOOKS = st.lists(
    st.tuples(
        st.builds(
            seen,
            VIEWS,
            VIEWS,
            beats=BEATS,
            endpoint=st.booleans(),
            result=st.booleans(),
            cancel=st.sampled_from(["", "", "", "anna: enough"]),
            faults=FAULTS,
            step=st.integers(0, 3),
            hopeless=st.sampled_from([{}, {}, {"learner": "no such partition"}]),
        ),
        st.floats(0, 400),
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=150)
@given(LOOKS, st.sampled_from([("server", "learner"), ("learner",)]), st.integers(0, 5))
def test_whatever_is_seen(looks: list[tuple[Observation, float]], roles: tuple[str, ...], most: int) -> None:
    policy, state, now = replace(POLICY, roles=roles, max_restarts=most), State(), 0.0
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
            assert not {Kind.START, Kind.STOP, Kind.LEAVE, Kind.WAIT} & set(kinds)
        else:
            assert not cancels(decision)
            assert set(kinds) in ({Kind.WAIT}, {Kind.START}, {Kind.STOP}, {Kind.LEAVE})
            starts = {action.role for action in decision.actions if action.kind is Kind.START}
            assert starts.isdisjoint(observation.jobs)  # nothing runs twice
        if Kind.STOP in kinds:
            assert decision.fault is not None
            assert decision.fault.role in observation.jobs
            if decision.fault.kind != recovery.RELEASED:
                assert recovery.strikes((*observation.faults, decision.fault), observation.step) <= most
            assert not any(view.state is JobState.UNKNOWN for view in observation.jobs.values()) or any(
                view.state.ended for view in observation.jobs.values()
            )
        scancelled = any(view.state is JobState.CANCELLED for view in observation.jobs.values())
        if Kind.CANCELLED in endings:
            assert observation.cancel or scancelled
        if observation.cancel:
            assert endings == [Kind.CANCELLED]
        if Kind.FINISH in endings:
            assert observation.result
        state = decision.state


# -- recovery: every state and transition a row ------------------------------------------------------------------------

STATES = [
    (JobState.FAILED, recovery.DIED, "has ended: killed"),
    (JobState.GONE, recovery.DIED, "has ended"),
    (JobState.OUT_OF_MEMORY, recovery.DIED, "has ended"),
    (JobState.NODE_FAIL, recovery.NODE, "has ended (node failed)"),
    (JobState.BOOT_FAIL, recovery.NODE, "has ended (boot failed)"),
    (JobState.TIMEOUT, recovery.TIME, "has ended (out of time)"),
    (JobState.DEADLINE, recovery.TIME, "has ended (deadline)"),
    (JobState.PREEMPTED, recovery.PREEMPTED, "has ended (preempted)"),
]


@pytest.mark.parametrize(("state", "kind", "words"), STATES)
@pytest.mark.parametrize("role", ["server", "learner"])
def test_an_ended_job_is_started_again(role: str, state: JobState, kind: str, words: str) -> None:
    ended = view(state, "killed" if state is JobState.FAILED else "")
    decision = decide(seen(**{role: ended}), HEALING, State())  # type: ignore[arg-type]
    assert decision.actions == (Action(Kind.STOP, role),)
    assert decision.fault is not None
    assert (decision.fault.role, decision.fault.kind) == (role, kind)
    assert f"the {role} {words}" in decision.fault.reason
    assert decision.fault.nodes == ("n3",)
    other = "learner" if role == "server" else "server"
    assert other not in {action.role for action in decision.actions}
    assert decide(seen(**{role: ended}), POLICY, State()).ending is Kind.FAIL  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (JobState.PENDING, "waiting for the cluster (learner: Priority)"),
        (JobState.HELD, "is held (Priority): release it"),
        (JobState.SUSPENDED, "is suspended"),
        (JobState.COMPLETING, "training"),
        (JobState.RUNNING, "training"),
    ],
)
def test_a_job_that_has_not_ended_is_waited_for(state: JobState, words: str) -> None:
    looks = [at(t, seen(learner=replace(view(state), queue_reason="Priority"))) for t in (0, 40)]
    decision = after(looks, HEALING)
    assert decision.actions == (Action(Kind.WAIT),)
    assert words in decision.reason


@pytest.mark.parametrize("role", ["server", "learner"])
def test_what_a_person_cancelled_is_not_submitted_again(role: str) -> None:
    decision = decide(seen(**{role: view(JobState.CANCELLED)}), HEALING, State())  # type: ignore[arg-type]
    assert decision.ending is Kind.CANCELLED
    assert f"the {role}'s job was cancelled from outside" in decision.reason
    assert cancels(decision) == {"server", "learner"} - {role}


def test_a_learner_that_saved_and_left_is_resumed() -> None:
    left = view(JobState.FINISHED, "saved at step 12 and left: SIGUSR2", returncode=0, left=12)
    decision = decide(seen(learner=left), HEALING, State())
    assert decision.fault is not None
    assert decision.fault.kind == recovery.LEFT
    assert "saved at step 12" in decision.reason


def test_a_learner_that_left_because_we_asked_for_its_nodes_is_no_strike() -> None:
    left = view(JobState.FINISHED, "left before the first step: no server", returncode=0, left=0)
    found = decide(replace(seen(learner=left), told_to_leave=frozenset({"learner"})), HEALING, State()).fault
    assert found is not None
    assert found.kind == recovery.RELEASED
    assert recovery.strikes([replace(found, job=str(i)) for i in range(20)], 0) == 0


def test_what_a_restart_cannot_help_ends_the_run() -> None:
    decision = decide(seen(learner=view(JobState.FAILED, "the disk is full", final=True)), HEALING, State())
    assert decision.ending is Kind.FAIL
    assert "the disk is full" in decision.reason


def test_a_failed_node_check_blames_its_node() -> None:
    found = decide(seen(learner=view(JobState.FAILED, "node n3: 7 of 8 GPUs", returncode=1)), HEALING, State()).fault
    assert found is not None
    assert (found.kind, found.nodes) == (recovery.NOT_CHECKED, ("n3",))


@pytest.mark.parametrize(
    ("state", "reason", "lost", "kind", "blames"),
    [
        (JobState.FAILED, "node n2: 7 of 8 GPUs", (), recovery.NOT_CHECKED, ("n2",)),
        (JobState.FAILED, "node N2.cluster.local: 7 of 8 GPUs", (), recovery.NOT_CHECKED, ("n2",)),
        (JobState.FAILED, "node n2: the leader of node 1 died without a word", (), recovery.NOT_CHECKED, ("n2",)),
        (JobState.FAILED, "node 1 (n2) ended: rank 3: CUDA error", (), recovery.NOT_CHECKED, ("n2",)),
        (JobState.FAILED, "node 1 (n2) ended: x (here: gloo)", (), recovery.NOT_CHECKED, ("n2",)),
        (JobState.NODE_FAIL, "node n2: the leader of node 1 died", ("n3",), recovery.NODE, ("n2",)),
        (JobState.FAILED, "node n22: 7 of 8 GPUs", (), recovery.NOT_CHECKED, ()),  # no node of the job
        (JobState.FAILED, "node 0 did not say where it is in 5 s: see x", (), recovery.DIED, ()),
        (JobState.FAILED, "node number 1: rank 2 did not come", (), recovery.DIED, ()),
        (JobState.FAILED, "rank 3: ValueError: node n2: x", (), recovery.DIED, ()),
        (JobState.NODE_FAIL, "SLURM: NODE_FAIL", ("n3",), recovery.NODE, ("n3",)),
        (JobState.NODE_FAIL, "SLURM: NODE_FAIL", (), recovery.NODE, ()),
        (JobState.PREEMPTED, "node n2: the leader of node 1 died", (), recovery.PREEMPTED, ("n2",)),
    ],
)
def test_of_several_nodes_only_the_one_at_fault_is_blamed(
    state: JobState, reason: str, lost: tuple[str, ...], kind: str, blames: tuple[str, ...]
) -> None:
    ended = JobView(state, 1, reason, nodes=FOUR, lost=lost)
    found = decide(seen(learner=ended), HEALING, State()).fault
    assert found is not None
    assert (found.kind, found.nodes) == (kind, blames)
    again = recovery.excluded([found, found], found.time + 1, 60)
    assert again == (blames if kind in recovery.BLAMES_THE_NODE else ())


def test_the_whole_allocation_is_resubmitted() -> None:
    policy = replace(HEALING, roles=("allocation",))
    whole = replace(seen(None, None), jobs={"allocation": view(JobState.NODE_FAIL)})
    decision = decide(whole, policy, State())
    assert decision.actions == (Action(Kind.STOP, "allocation"),)
    gone = replace(seen(None, None), faults=(decision.fault,))  # type: ignore[arg-type]
    assert decide(gone, policy, decision.state).actions == (Action(Kind.START, "allocation"),)
    hangs = [
        at(t, replace(seen(None, None, beats=beats(5, 7.0)), jobs={"allocation": view(JobState.RUNNING)}))
        for t in (0, 51)
    ]
    assert after(hangs, policy).actions == (Action(Kind.STOP, "allocation"),)


def test_the_first_restart_is_at_once_and_later_ones_back_off() -> None:
    once = seen(learner=None, faults=(fault(step=3),), step=3)
    assert after([at(0, once)], HEALING).actions == (Action(Kind.START, "learner"),)
    twice = seen(learner=None, faults=(fault(step=3), fault("server", step=3)), step=3)
    assert after([at(0, twice)], HEALING).actions == (Action(Kind.WAIT),)
    assert "starting again in 10 s" in after([at(0, twice)], HEALING).reason
    assert after([at(0, twice), at(9, twice)], HEALING).actions == (Action(Kind.WAIT),)
    assert after([at(0, twice), at(11, twice)], HEALING).actions == (Action(Kind.START, "learner"),)


def test_restarts_are_bounded_and_progress_resets_them() -> None:
    faults: tuple[Fault, ...] = ()
    for _ in range(20):
        decision = decide(seen(learner=DEAD, faults=faults, step=7), HEALING, State())
        if decision.ending:
            break
        assert decision.fault is not None
        faults = (*faults, decision.fault)
    assert len(faults) == 3  # one strike, then two for each that comes again at the same step
    assert decision.ending is Kind.FAIL
    assert "recovery.max_restarts = 5" in decision.reason
    assert "CUDA out of memory" in decision.reason
    assert decide(seen(learner=DEAD, faults=faults, step=8), HEALING, State()).ending is None


def test_a_job_that_the_scheduler_refuses_is_bounded_too() -> None:
    faults = tuple(fault(kind=recovery.REFUSED) for _ in range(6))
    assert after([at(0, seen(learner=None, faults=faults[:3]))], HEALING).ending is None
    assert after([at(0, seen(learner=None, faults=faults))], HEALING).ending is Kind.FAIL


def test_a_hopeless_reason_is_named_and_a_passing_one_is_not() -> None:
    hopeless = seen(learner=PENDING, hopeless={"learner": "the partition does not exist"})
    assert after([at(0, hopeless)], HEALING).ending is None
    late = after([at(0, hopeless), at(61, hopeless)], HEALING)
    assert late.ending is Kind.FAIL
    assert "the learner's job will never start: the partition does not exist" in late.reason
    assert after([at(0, hopeless), at(30, seen(learner=PENDING)), at(61, hopeless)], HEALING).ending is None


WAITS = [(JobState.PENDING, "queued"), (JobState.HELD, "held"), (JobState.SUSPENDED, "suspended")]


@pytest.mark.parametrize(("state", "word"), WAITS)
def test_an_idle_server_is_given_back_and_comes_again_with_its_learner(state: JobState, word: str) -> None:
    held = JobView(state)
    waiting = seen(learner=held, beats={"server-0": Beat(1)})
    looks = [at(t, replace(waiting, beats={"server-0": Beat(t)})) for t in range(0, 302, 10)]
    assert after(looks[:-1], HEALING).ending is None
    idle = after([*looks, at(302, waiting)], HEALING)
    assert idle.actions == (Action(Kind.STOP, "server"),)
    assert f"for a learner that is {word}" in idle.reason
    assert idle.fault is not None
    assert idle.fault.kind == recovery.RELEASED
    alone = seen(server=None, learner=held, endpoint=False, faults=(idle.fault,))
    assert after([at(0, alone), at(900, alone)], HEALING).actions == (Action(Kind.WAIT),)
    there = seen(server=None, endpoint=False, beats={}, faults=(idle.fault,))
    assert after([at(0, there)], HEALING).actions == (Action(Kind.START, "server"),)


def test_a_job_that_is_queued_and_then_held_idles_the_other_all_the_time() -> None:
    states = [JobState.PENDING, JobState.HELD, JobState.PENDING, JobState.HELD]
    looks = [at(100 * i, seen(learner=JobView(state), beats={"server-0": Beat(i)})) for i, state in enumerate(states)]
    assert after(looks, HEALING).fault is None
    assert after([*looks, at(301, looks[-1])], HEALING).actions == (Action(Kind.STOP, "server"),)


@pytest.mark.parametrize(("state", "word"), WAITS)
def test_a_learner_that_waits_for_a_server_saves_and_leaves(state: JobState, word: str) -> None:
    waiting = seen(
        server=JobView(state), endpoint=False, beats={"learner": Beat(1, (1.0, 5.0), True, "waiting for the server")}
    )
    looks = [at(t, replace(waiting, beats={"learner": Beat(t, (1.0, 5.0), True, "waiting for the server")})) for t in
             range(0, 302, 10)]  # fmt: skip
    found = after([*looks, at(302, waiting)], HEALING)
    assert found.actions == (Action(Kind.LEAVE, "learner"),)
    assert f"for a server that is {word}" in found.reason
    for kind in (recovery.LEFT, recovery.RELEASED):
        gone = seen(server=JobView(state), learner=None, endpoint=False, faults=(fault(kind=kind, step=5),), step=5)
        assert after([at(0, gone), at(301, gone)], HEALING).actions == (Action(Kind.WAIT),)


@settings(deadline=None)
@given(FAULTS, st.integers(0, 5))
def test_strikes_never_shrink_without_a_new_step(faults: tuple[Fault, ...], step: int) -> None:
    before = recovery.strikes(faults, step)
    assert 0 <= before <= 2 * len(faults)
    if step > max((f.step for f in faults if f.kind != recovery.RELEASED), default=-1):
        assert before == 0
    else:
        again = replace(faults[-1], kind=recovery.DIED, role="learner", step=min(step, faults[-1].step))
        assert recovery.strikes((*faults, again), step) >= before


def test_a_node_at_fault_twice_is_left_out_for_a_while() -> None:
    faults = [replace(fault(kind=recovery.NODE, nodes=("n3",)), time=t) for t in (100.0, 200.0)]
    once = [replace(fault(kind=recovery.DIED, nodes=("n1",)), time=200.0)] * 2
    assert recovery.excluded([*faults, *once], 300.0, 600) == ("n3",)
    assert recovery.excluded(faults, 750.0, 600) == ()
    assert recovery.excluded(faults[:1], 150.0, 600) == ()


def test_the_end_of_a_job_counts_once_though_two_leaders_recorded_it() -> None:
    one = Fault(1.0, 1, "learner", recovery.DIED, 5, (), "", "job-a")
    assert recovery.strikes((one, one), 5) == recovery.strikes((one,), 5) == 1
    assert recovery.strikes((one, replace(one, job="job-b")), 5) == 3
