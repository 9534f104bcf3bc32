"""What to do next about a run: a pure function of what was observed. No clock, no files, no processes inside.

Contract of `decide(observation, policy, state)`:

1. A decision that ends the run (FINISH, FAIL, CANCELLED) comes with a CANCEL for every job that is still live, and with
   nothing else. Exactly one of the three ends a run.
2. A cancel that was requested wins over everything, also over a failure that it caused.
3. A result that the learner wrote counts once the learner has left (or has had `exit_grace_s` to leave).
4. A dead server outranks a dead learner as the cause, since a learner without its server dies of it.
5. Deadlines run on the observer's monotonic clock, from the moment the observer first saw a phase; a job that waits in
   the cluster's queue has no deadline. A beat proves life; only a *changed* progress or step proves work.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from cluster.jobs import JobState, JobView

ROLES = ("server", "learner")


class Kind(StrEnum):
    WAIT = "wait"
    START = "start"
    CANCEL = "cancel"
    FINISH = "finish"
    FAIL = "fail"
    CANCELLED = "cancelled"


ENDINGS = frozenset({Kind.FINISH, Kind.FAIL, Kind.CANCELLED})


@dataclass(frozen=True)
class Action:
    kind: Kind
    role: str | None = None


@dataclass(frozen=True)
class Beat:
    """What of a heartbeat decides: `counter` counts beats; `work` is any value that changes while work is done."""

    counter: int
    work: tuple[float, ...] = ()
    training: bool = False


@dataclass(frozen=True)
class Observation:
    """One look at a run.

    Args:
        now: the observer's monotonic clock, in seconds.
        jobs: newest job of each role in this attempt; a role without a job is absent.
        beats: newest heartbeat of this attempt by writer: server, learner, rollout.
        endpoint: whether the server's address of this attempt is on storage.
        result: whether the learner of this attempt has written its result.
        cancel: who asked to stop and why; empty if nobody did.
    """

    now: float
    jobs: dict[str, JobView] = field(default_factory=dict)
    beats: dict[str, Beat] = field(default_factory=dict)
    endpoint: bool = False
    result: bool = False
    cancel: str = ""


@dataclass(frozen=True)
class Policy:
    """Deadlines in seconds. `roles`: those that run as jobs of ours (not the server where `server.url` names one)."""

    server_startup_s: float
    learner_startup_s: float
    step_s: float
    roles: tuple[str, ...] = ROLES
    # Beats come every 2 s. A beat may be late on a busy machine or a slow file system, but not by minutes.
    heartbeat_s: float = 180.0
    # A learner that has written its result only has to close its process group and its files.
    exit_grace_s: float = 120.0
    # The scheduler may not answer for a while; a job that stays unknown is lost.
    unknown_s: float = 300.0


@dataclass(frozen=True)
class State:
    """What the decider remembers: since when it has seen what."""

    since: dict[str, float] = field(default_factory=dict)
    seen: dict[str, object] = field(default_factory=dict)

    def first(self, key: str, now: float, condition: bool) -> "State":
        """Remember `now` at the first time that `condition` holds; forget it when it does not."""
        if condition == (key in self.since):
            return self
        since = {k: v for k, v in self.since.items() if k != key}
        return replace(self, since={**since, key: now} if condition else since)

    def changed(self, key: str, now: float, value: object) -> "State":
        """Remember `now` whenever `value` differs from what was seen before."""
        if key in self.seen and self.seen[key] == value:
            return self
        return replace(self, since={**self.since, key: now}, seen={**self.seen, key: value})

    def age(self, key: str, now: float) -> float:
        """Seconds since `key` was remembered; 0 if it is not."""
        return now - self.since.get(key, now)


@dataclass(frozen=True)
class Decision:
    actions: tuple[Action, ...]
    reason: str
    state: State
    role: str | None = None

    @property
    def ending(self) -> Kind | None:
        return next((action.kind for action in self.actions if action.kind in ENDINGS), None)


def decide(seen: Observation, policy: Policy, state: State) -> Decision:
    state = _remember(seen, policy, state)

    def end(kind: Kind, reason: str, role: str | None = None) -> Decision:
        live = [role for role, view in sorted(seen.jobs.items()) if not view.state.ended]
        return Decision((*(Action(Kind.CANCEL, r) for r in live), Action(kind, role)), reason, state, role)

    if seen.cancel:
        return end(Kind.CANCELLED, seen.cancel)
    learner = seen.jobs.get("learner")
    if seen.result and learner is not None:
        if learner.state.ended:
            return end(Kind.FINISH, "the learner has finished")
        if state.age("result", seen.now) > policy.exit_grace_s:
            return end(Kind.FINISH, f"the learner has its result, but did not exit within {policy.exit_grace_s:.0f} s")
    failure = _failure(seen, policy, state)
    if failure:
        return end(Kind.FAIL, failure[1], failure[0])
    absent = [role for role in policy.roles if role not in seen.jobs]
    if absent:
        actions = tuple(Action(Kind.START, role) for role in absent)
        return Decision(actions, f"{' and '.join(absent)} not started yet", state)
    return Decision((Action(Kind.WAIT),), _waiting_for(seen), state)


def _remember(seen: Observation, policy: Policy, state: State) -> State:
    now = seen.now
    for role in ROLES:
        view = seen.jobs.get(role)
        state = state.first(f"{role} running", now, view is not None and view.state == JobState.RUNNING)
        state = state.first(f"{role} unknown", now, view is not None and view.state == JobState.UNKNOWN)
        beat = seen.beats.get(role)
        state = state.changed(f"{role} beat", now, beat.counter if beat else None)
    running = "learner running" in state.since
    state = state.first("learner may load", now, running and (seen.endpoint or "server" not in policy.roles))
    state = state.first("result", now, seen.result)
    training = state.seen.get("training") is True or _training(seen)
    state = state.changed("training", now, training)
    return state.changed("work", now, tuple(seen.beats[w].work for w in sorted(seen.beats)))


def _training(seen: Observation) -> bool:
    beat = seen.beats.get("learner")
    return beat is not None and beat.training


def _failure(seen: Observation, policy: Policy, state: State) -> tuple[str, str] | None:
    """(role, reason) of what is wrong, most likely cause first; None while nothing is."""
    now = seen.now
    server, learner = seen.jobs.get("server"), seen.jobs.get("learner")
    if server is not None and server.state.ended and not seen.result:
        learner_died = learner is not None and learner.state == JobState.FAILED
        if not (learner_died and server.state == JobState.FINISHED):
            return "server", f"the server has ended{_how(server)}"
    if learner is not None and learner.state == JobState.FAILED:
        return "learner", f"the learner has ended{_how(learner)}"
    if learner is not None and learner.state == JobState.FINISHED and not seen.result:
        return "learner", "the learner exited without an error, but it wrote no result"
    for role in ROLES:
        if state.age(f"{role} unknown", now) > policy.unknown_s:
            return role, f"the state of the {role}'s job has been unknown for {policy.unknown_s:.0f} s"
    if not seen.endpoint and state.age("server running", now) > policy.server_startup_s:
        return "server", (
            f"the server was not ready within server.startup_timeout = {policy.server_startup_s:g} s: "
            "look into its log, or raise the limit"
        )
    if seen.result:
        return None
    for role in ROLES:
        silent = state.age(f"{role} beat", now)
        if role in seen.beats and state.age(f"{role} running", now) >= silent > policy.heartbeat_s:
            return role, f"the {role}'s leader has not written a heartbeat for {silent:.0f} s"
    if state.seen.get("training") is not True:
        if state.age("learner may load", now) > policy.learner_startup_s:
            return "learner", (
                f"the learner did not begin to train within learner.startup_timeout = {policy.learner_startup_s:g} s: "
                "look into its log, or raise the limit"
            )
    elif min(state.age("work", now), state.age("training", now)) > policy.step_s:
        return "learner", f"no progress for learner.step_timeout = {policy.step_s:g} s: the run is stuck"
    return None


def _how(view: JobView) -> str:
    code = "" if view.returncode is None else f" with exit code {view.returncode}"
    return f"{code}: {view.reason}" if view.reason else code


def _waiting_for(seen: Observation) -> str:
    if any(view.state == JobState.PENDING for view in seen.jobs.values()):
        return "waiting for the cluster"
    if not seen.endpoint:
        return "the server is starting"
    if not _training(seen):
        return "the learner is starting"
    return "closing down" if seen.result else "training"
