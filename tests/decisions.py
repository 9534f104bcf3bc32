"""Observations and policies for tests of `cluster.decide`."""

from dataclasses import replace

from cluster import recovery
from cluster.decide import Beat, Decision, Kind, Observation, Policy, State, decide
from cluster.jobs import JobState, JobView
from cluster.recovery import Fault

POLICY = Policy(server_startup_s=100, learner_startup_s=200, step_s=50)
RUNNING, PENDING = JobView(JobState.RUNNING), JobView(JobState.PENDING)
UNKNOWN = JobView(JobState.UNKNOWN)
DEAD = JobView(JobState.FAILED, 3, "CUDA out of memory")
KILLED = JobView(JobState.FAILED, reason="killed")
LEFT = JobView(JobState.FINISHED, 0, "finished")
FOUR = ("n1", "n2", "n3", "n4")
TRAINING = {"server": Beat(5), "learner": Beat(5, (1.0, 1.0), training=True)}


def seen(server: JobView | None = RUNNING, learner: JobView | None = RUNNING, **values: object) -> Observation:
    jobs = {role: view for role, view in (("server", server), ("learner", learner)) if view is not None}
    return replace(Observation(now=0, jobs=jobs, endpoint=True, beats=TRAINING), **values)  # type: ignore[arg-type]


def cancels(decision: Decision) -> set[str | None]:
    return {action.role for action in decision.actions if action.kind is Kind.CANCEL}


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


HEALING = replace(POLICY, max_restarts=5, backoff_s=10, backoff_max_s=60, max_idle_s=300)


def view(state: JobState, reason: str = "", **values: object) -> JobView:
    return JobView(state, reason=reason, nodes=("n3",), **values)  # type: ignore[arg-type]


def fault(role: str = "learner", kind: str = recovery.DIED, step: int = 0, nodes: tuple[str, ...] = ()) -> Fault:
    return Fault(0.0, 1, role, kind, step, nodes, f"the {role} has ended")


def trains(now: float, counter: int, learner: JobView = RUNNING, step: int = 1, **values: object) -> Observation:
    beat = Beat(counter, (1.0, float(step)), training=True, phase="training", step=step)
    both: dict[str, object] = {"beats": {"server-0": Beat(counter), "learner": beat}}
    return at(now, seen(learner=learner, incarnations={"server": "s", "learner": "l"}, **(both | values)))
