"""What to do next about a run: a pure function of what was observed. No clock, no files, no processes inside.

Contract of `decide(observation, policy, state)`:

1. A decision that ends the run (FINISH, FAIL, CANCELLED) comes with a CANCEL for every job that is still live, and with
   nothing else. Exactly one of the three ends a run.
2. A cancel that was requested wins over everything, also over a failure that it caused. A job that a person cancelled is
   such a request.
3. A result that the learner wrote counts once the learner has left (or has had `exit_grace_s` to leave).
4. A part that is dead or hung is given up (STOP with a `Fault`) and then started again (START): a server in the same
   attempt, a learner or a whole allocation in a new one. The server outranks the learner as the cause.
5. Restarts are bounded by `strikes`, wait as `delay_s` says, and a part that says that a restart cannot help gets none.
6. Deadlines run on the observer's monotonic clock, from the moment the observer first saw a phase; a job that waits in
   the cluster's queue, is suspended, or of which the scheduler says nothing, has none.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from cluster import recovery
from cluster.hang import EVALUATES, Beat, hung
from cluster.jobs import JobState, JobView
from cluster.memory import State
from cluster.recovery import Fault
from slipstream.nodes import blamed

__all__ = ["ENDINGS", "ROLES", "Action", "Beat", "Decision", "Kind", "Observation", "Policy", "State", "decide"]

ROLES = ("server", "learner")
LEARNERS = ("learner", "allocation")
# states of a job for which the other role's nodes stand idle, in words
WAITING = {JobState.PENDING: "queued", JobState.HELD: "held", JobState.SUSPENDED: "suspended"}


class Kind(StrEnum):
    WAIT = "wait"
    START = "start"
    STOP = "stop"  # one job; the run goes on
    LEAVE = "leave"  # ask the learner to save and leave
    CANCEL = "cancel"  # one job of a run that ends
    FINISH = "finish"
    FAIL = "fail"
    CANCELLED = "cancelled"


ENDINGS = frozenset({Kind.FINISH, Kind.FAIL, Kind.CANCELLED})


@dataclass(frozen=True)
class Action:
    kind: Kind
    role: str | None = None


@dataclass(frozen=True)
class Observation:
    """One look at a run.

    Args:
        now: the observer's monotonic clock, in seconds.
        time: seconds since the epoch.
        jobs: the job of each role that counts; a role without a job is absent.
        incarnations: of these jobs.
        beats: newest heartbeat of these jobs by writer: server-0, learner, learner-1, rollout…
        endpoint: whether the address of this server is on storage.
        result: whether the learner of this attempt has written its result.
        cancel: who asked to stop and why; empty if nobody did.
        hopeless: role -> why its pending job will never start; roles without such a reason are absent.
        step: optimizer steps that the run has done, over all attempts.
        attempt: the newest.
        faults: of the run so far, oldest first.
        told_to_leave: roles whose jobs we have asked to give their nodes back.
    """

    now: float
    time: float = 0.0
    jobs: dict[str, JobView] = field(default_factory=dict)
    incarnations: dict[str, str] = field(default_factory=dict)
    beats: dict[str, Beat] = field(default_factory=dict)
    endpoint: bool = False
    result: bool = False
    cancel: str = ""
    hopeless: dict[str, str] = field(default_factory=dict)
    step: int = 0
    attempt: int = 1
    faults: tuple[Fault, ...] = ()
    told_to_leave: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Policy:
    """Deadlines in seconds. `roles`: those that run as jobs of ours (not the server where `server.url` names one)."""

    server_startup_s: float
    learner_startup_s: float
    step_s: float
    sync_s: float = 1800.0
    save_s: float = 1800.0
    roles: tuple[str, ...] = ROLES
    max_restarts: int = 0
    backoff_s: float = 10.0
    backoff_max_s: float = 600.0
    max_idle_s: float = 1800.0
    # Beats come every 2 s. A beat may be late on a busy machine or a slow file system, but not by minutes.
    heartbeat_s: float = 180.0
    # A learner that has written its result only has to close its process group and its files.
    exit_grace_s: float = 120.0
    # A scheduler may show a job as pending with a hopeless reason for moments while it is set up.
    hopeless_s: float = 60.0


@dataclass(frozen=True)
class Decision:
    actions: tuple[Action, ...]
    reason: str
    state: State
    role: str | None = None
    fault: Fault | None = None

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
    learner = next((seen.jobs[role] for role in LEARNERS if role in seen.jobs), None)
    if seen.result and learner is not None:
        if learner.state.ended:
            return end(Kind.FINISH, "the learner has finished")
        if state.age("result", seen.now) > policy.exit_grace_s:
            return end(Kind.FINISH, f"the learner has its result, but did not exit within {policy.exit_grace_s:.0f} s")
    for role, view in sorted(seen.jobs.items()):
        if view.state is JobState.CANCELLED and not seen.result:
            return end(Kind.CANCELLED, f"the {role}'s job was cancelled from outside (scancel)")
    for role, why in seen.hopeless.items():
        if state.age(f"{role} hopeless", seen.now) >= policy.hopeless_s:
            return end(Kind.FAIL, f"the {role}'s job will never start: {why}", role)
    found = _fault(seen, policy, state)
    if found is not None:
        fault, final = found
        if final:
            return end(Kind.FAIL, fault.reason, fault.role)
        count = recovery.strikes((*seen.faults, fault), seen.step)
        if count > policy.max_restarts:
            return end(Kind.FAIL, fault.reason + _given_up(policy, count), fault.role)
        again = "starting it again" if fault.role == "server" else "resuming from the newest checkpoint"
        return Decision((Action(Kind.STOP, fault.role),), f"{fault.reason}: {again}", state, fault.role, fault)
    if idle := _idle(seen, policy, state):
        return Decision(*idle[:2], state, idle[2].role if idle[2] else None, idle[2])
    if refused := _refused(seen, policy):
        return end(Kind.FAIL, refused.reason, refused.role)
    starts, why = _starts(seen, policy, state)
    if starts:
        return Decision(tuple(Action(Kind.START, role) for role in starts), why, state)
    return Decision((Action(Kind.WAIT),), why or _waiting_for(seen, state), state)


def _given_up(policy: Policy, count: int) -> str:
    if policy.max_restarts == 0:
        return ""
    return f" ({count} strikes without a new step; recovery.max_restarts = {policy.max_restarts})"


def _remember(seen: Observation, policy: Policy, state: State) -> State:
    now = seen.now
    for role in (*ROLES, "allocation"):
        view = seen.jobs.get(role)
        state = state.owned(role, seen.incarnations.get(role, "") if view else None)
        state = state.first(f"{role} absent", now, view is None)
        state = state.first(f"{role} waits", now, view is not None and view.state in WAITING)
        runs = view is not None and view.state is JobState.RUNNING
        state = state.first(f"{role} running", now, runs)
        state = state.first(f"{role} loads", now, runs and not seen.endpoint)
        state = state.first(f"{role} hopeless", now, role in seen.hopeless)
    for name, beat in seen.beats.items():
        state = state.changed(f"{name} beat", now, beat.counter)
    for gone in [key for key in state.seen if key.endswith(" beat") and key.removesuffix(" beat") not in seen.beats]:
        state = state.forget(gone)
    running = any(f"{role} running" in state.since for role in LEARNERS)
    external = policy.roles == ("learner",)
    mine = seen.beats.get("learner")
    evaluates = mine is not None and mine.phase == EVALUATES
    state = state.first("learner may load", now, running and (seen.endpoint or external) and not evaluates)
    state = state.first("result", now, seen.result)
    # a beat that cannot be read takes back nothing
    trains = state.seen.get("training") is True or (mine is not None and mine.training)
    state = state.changed("training", now, trains)
    state = state.changed("phase", now, (mine.phase, mine.step) if mine else None)
    state = state.changed("work", now, tuple(seen.beats[name].work for name in sorted(seen.beats)))
    if any(view.state is JobState.SUSPENDED for view in seen.jobs.values()):
        state = state.restart(now, "phase", "work", "learner may load")
    return state


def _fault(seen: Observation, policy: Policy, state: State) -> tuple[Fault, bool] | None:
    """What is wrong, most likely cause first, and whether a restart cannot help; None while nothing is."""

    def fault(role: str, kind: str, reason: str, nodes: tuple[str, ...] = ()) -> Fault:
        job = seen.incarnations.get(role, "")
        return Fault(seen.time, seen.attempt, role, kind, seen.step, nodes, reason, job)

    learner_failed = any(role in seen.jobs and seen.jobs[role].state.ended for role in LEARNERS)
    for role in ("server", *LEARNERS):
        view = seen.jobs.get(role)
        if view is None or not view.state.ended or seen.result:
            continue
        if role == "server" and learner_failed and view.state is JobState.FINISHED:
            continue  # it left after its learner
        kind, reason = _how_it_ended(role, view)
        if kind == recovery.LEFT and role in seen.told_to_leave:
            kind = recovery.RELEASED
        return fault(role, kind, reason, _at_fault(view)), view.final
    if any(view.state is JobState.UNKNOWN for view in seen.jobs.values()):
        return None  # nothing can be stopped or started either
    if seen.result:
        return None
    stuck = hung(seen.beats, seen.jobs, seen.endpoint, policy, state, seen.now)
    if stuck is None:
        return None
    nodes = recovery.among(stuck.hosts, seen.jobs[stuck.role].nodes)
    return fault(stuck.role, recovery.HUNG, stuck.reason, nodes), False


def _at_fault(view: JobView) -> tuple[str, ...]:
    """Nodes of an ended job that are to blame: the one its leader names, those the scheduler lost, or the only one."""
    if host := blamed(view.reason):
        return recovery.among([host], view.nodes)
    return view.lost or (view.nodes if len(view.nodes) == 1 else ())


def _how_it_ended(role: str, view: JobView) -> tuple[str, str]:
    who = {"allocation": "the run's allocation"}.get(role, f"the {role}")
    if view.left is not None:
        return recovery.LEFT, f"{who} {view.reason or f'saved at step {view.left} and left'}"
    if view.state is JobState.FINISHED and role != "server":
        return recovery.DIED, f"{who} exited without an error, but it wrote no result"
    kind = recovery.KINDS.get(view.state, recovery.DIED)
    if kind == recovery.DIED and blamed(view.reason):
        kind = recovery.NOT_CHECKED
    how = "" if kind in (recovery.DIED, recovery.NOT_CHECKED) else f" ({view.state})"
    code = "" if view.returncode is None else f" with exit code {view.returncode}"
    return kind, f"{who} has ended{how}{code}" + (f": {view.reason}" if view.reason else "")


def _idle(seen: Observation, policy: Policy, state: State) -> tuple[tuple[Action, ...], str, Fault | None] | None:
    """Nodes that wait for the other's job (queued, held or suspended) are given back after a while."""
    server, learner = seen.jobs.get("server"), seen.jobs.get("learner")
    if server is None or learner is None:
        return None
    waits = min(state.age("server running", seen.now), state.age("learner waits", seen.now))
    if waits > policy.max_idle_s and seen.endpoint:
        how = WAITING[learner.state]
        why = f"the server has waited {waits / 60:.0f} minutes for a learner that is {how}: its nodes are given back"
        job = seen.incarnations.get("server", "")
        fault = Fault(seen.time, seen.attempt, "server", recovery.RELEASED, seen.step, (), why, job)
        return (Action(Kind.STOP, "server"),), why, fault
    waits = min(state.age("learner running", seen.now), state.age("server waits", seen.now))
    if waits > policy.max_idle_s:
        how = WAITING[server.state]
        why = f"the learner has waited {waits / 60:.0f} minutes for a server that is {how}: it saves and leaves"
        return (Action(Kind.LEAVE, "learner"),), why, None
    return None


def _refused(seen: Observation, policy: Policy) -> Fault | None:
    """The refusal of a job that has been submitted often enough."""
    last = seen.faults[-1] if seen.faults else None
    if last is None or last.kind != recovery.REFUSED or last.role in seen.jobs:
        return None
    return last if recovery.strikes(seen.faults, seen.step) > policy.max_restarts else None


def _starts(seen: Observation, policy: Policy, state: State) -> tuple[list[str], str]:
    """Roles to start now; or why an absent one is not started yet."""
    absent = [role for role in policy.roles if role not in seen.jobs]
    if not absent:
        return [], ""
    wait = recovery.delay_s(recovery.strikes(seen.faults, seen.step), policy.backoff_s, policy.backoff_max_s)
    ready, why = [], ""
    for role in absent:
        left = wait - state.age(f"{role} absent", seen.now)
        last = next((fault for fault in reversed(seen.faults) if fault.role == role), None)
        if why_not := _waits_for_the_other(role, last, seen, policy, state):
            why = why_not
            continue
        if last is not None and left > 0:
            why = f"{last.reason}: starting again in {left:.0f} s"
            continue
        ready.append(role)
    if ready:
        return ready, f"{' and '.join(ready)} not started yet"
    return [], why


def _waits_for_the_other(role: str, last: Fault | None, seen: Observation, policy: Policy, state: State) -> str:
    """Why nodes for `role` would only wait for the other's; '' if they would not."""
    learner = seen.jobs.get("learner")
    if role == "server" and recovery.released(seen.faults, role) and learner is not None:
        if learner.state is not JobState.RUNNING:
            return "waiting for the cluster: the server starts once the learner's nodes are there"
    if role == "learner" and last is not None and last.kind in (recovery.LEFT, recovery.RELEASED):
        if state.age("server waits", seen.now) > policy.max_idle_s:
            return "waiting for the cluster: the learner starts once the server's nodes are there"
    return ""


def _waiting_for(seen: Observation, state: State) -> str:
    unknown = sorted(role for role, view in seen.jobs.items() if view.state is JobState.UNKNOWN)
    if unknown:
        return f"the scheduler does not answer: nothing is known of {' and '.join(unknown)}"
    for role, view in sorted(seen.jobs.items()):
        if view.state is JobState.HELD:
            return f"the {role}'s job is held ({view.queue_reason or 'no reason given'}): release it, or stop the run"
        if view.state is JobState.SUSPENDED:
            return f"the {role}'s job is suspended"
    pending = {role: view.queue_reason for role, view in sorted(seen.jobs.items()) if view.state is JobState.PENDING}
    if pending:
        reasons = ", ".join(f"{role}: {reason}" for role, reason in pending.items() if reason)
        return f"waiting for the cluster ({reasons})" if reasons else "waiting for the cluster"
    if not seen.endpoint:
        restarted = state.seen.get("training") is True
        return "the server is starting again" if restarted else "the server is starting"
    beat = seen.beats.get("learner")
    if beat is None or not beat.training:
        return "the learner is starting"
    return "closing down" if seen.result else "training"
