"""Whether a part that runs does no work any more. Pure: a sign of life is no proof of work."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.jobs import JobState, JobView
from cluster.memory import State

if TYPE_CHECKING:
    from cluster.decide import Policy

# Phases of the learner that have a bound of their own: key of the configuration, field of the policy.
BOUNDED = {
    "saving": ("learner.save_timeout", "save_s", "saving a checkpoint"),
    "delivering weights": ("learner.sync_timeout", "sync_s", "delivering its weights"),
    "training": ("learner.step_timeout", "step_s", "training one step"),
}
WAITS_FOR_OTHERS = "waiting for the server"


@dataclass(frozen=True)
class Beat:
    """What of a heartbeat decides: `counter` counts beats; `work` is any value that changes while work is done.

    `training`: the learner has begun to work (it does not load any more). `host`: where the writer runs.
    """

    counter: int
    work: tuple[float, ...] = ()
    training: bool = False
    phase: str = ""
    step: int = 0
    host: str = ""
    ended: bool = False


@dataclass(frozen=True)
class Stuck:
    role: str
    reason: str
    nodes: tuple[str, ...] = ()


def hung(
    beats: Mapping[str, Beat],
    jobs: Mapping[str, JobView],
    endpoint: bool,
    policy: "Policy",
    state: State,
    now: float,
) -> Stuck | None:
    """The first part that is hung, with the reason in words; None while all of them work or have no deadline."""
    whole = "allocation" if "allocation" in jobs else None
    running = {role for role, view in jobs.items() if view.state is JobState.RUNNING}
    owner = {"server": whole or "server", "learner": whole or "learner"}
    loads = state.age(f"{owner['server']} loads", now)  # one that takes its address back is ending, and says why
    if owner["server"] in running and not endpoint and loads > policy.server_startup_s:
        return Stuck(
            owner["server"],
            f"the server was not ready within server.startup_timeout = {policy.server_startup_s:g} s: "
            "look into its log, or raise the limit",
        )
    for name, beat in sorted(beats.items()):
        if name == "rollout":
            continue  # the learner watches over it, and starts it again
        role = owner["server" if name.startswith("server") else "learner"]
        silent = state.age(f"{name} beat", now)
        if role in running and not beat.ended and state.age(f"{role} running", now) >= silent > policy.heartbeat_s:
            who = _who(name, beat)
            return Stuck(
                role, f"{who} has not written a heartbeat for {silent:.0f} s", (beat.host,) if beat.host else ()
            )
    if owner["learner"] not in running:
        return None
    return _learner(beats, owner["learner"], policy, state, now)


def _who(name: str, beat: Beat) -> str:
    where = f" on {beat.host}" if beat.host else ""
    if name.startswith("learner"):
        rank = name.partition("-")[2] or "0"
        return f"rank {rank} of the learner{where}"
    return f"the server's leader{where}"


def _learner(beats: Mapping[str, Beat], role: str, policy: "Policy", state: State, now: float) -> Stuck | None:
    if state.seen.get("training") is not True:
        if state.age("learner may load", now) > policy.learner_startup_s:
            return Stuck(
                role,
                f"the learner did not begin to train within learner.startup_timeout = {policy.learner_startup_s:g} s: "
                "look into its log, or raise the limit",
            )
        return None
    beat = beats.get("learner")
    if beat is not None and beat.phase == WAITS_FOR_OTHERS:
        return None  # the server's own deadlines run, and the queue has none
    since_work = min(state.age("work", now), state.age("training", now))
    if beat is not None and beat.phase in BOUNDED:
        key, bound, doing = BOUNDED[beat.phase]
        limit = getattr(policy, bound)
        if min(state.age("phase", now), state.age("training", now)) > limit:
            slowest = _slowest(beats, state, now)
            return Stuck(role, f"the learner has been {doing} for {key} = {limit:g} s{slowest}", ())
    if since_work > policy.step_s:
        return Stuck(role, f"no progress for learner.step_timeout = {policy.step_s:g} s: the run is stuck")
    return None


def _slowest(beats: Mapping[str, Beat], state: State, now: float) -> str:
    """Names the rank whose beats are oldest, if that stands out."""
    ages = {name: state.age(f"{name} beat", now) for name in beats if name.startswith("learner")}
    if not ages:
        return ""
    name = max(ages, key=lambda key: ages[key])
    return f" ({_who(name, beats[name])} has not beaten for {ages[name]:.0f} s)" if ages[name] > 30 else ""
