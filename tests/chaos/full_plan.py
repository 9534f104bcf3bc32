"""From a seed to a run of the full stack. Pure. Faults are injected from outside, at what can be seen from there."""

import random
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.faults import BOTH, LEARNER, NOTHING, ONE, SEPARATE, SERVER, End

TWO_FAULTS = 0.3
STEPS = (3, 12)  # at which a fault may strike; a run has about three times as many


@dataclass(frozen=True)
class FullFault:
    """
    Attributes:
        act: a method of `tests.chaos.full_acts.FullActs`; empty where `plan` does it.
        at: "step" (metrics have reached it), "save" (a checkpoint is begun and not sealed) or "delivery" (the learner says
            that it delivers its weights), each at or after a step that is drawn; "plan": the supervisor has met `plan`.
        again: the roles that must be started again because of it, in separate jobs; None: not to be judged.
        saves: checkpoints that must be there before.
        settings: of the cluster profile that it needs.
        redoes: whether steps may have to be made again.
        plan: a fault that the supervisor's process injects into itself (`tests.doubles.events`).
        storage: of the bed that the run lies on, where that is not the shared one.
        reason: what the outcome must say where the run fails.
    """

    name: str
    act: str = ""
    at: str = "step"
    end: End = End.FINISHED
    again: frozenset[str] | None = LEARNER
    shapes: tuple[str, ...] = BOTH
    second: bool = True
    saves: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    redoes: bool = True
    plan: dict[str, Any] = field(default_factory=dict)
    storage: str = ""
    reason: str = ""


FULL_FAULTS = (
    FullFault("server process killed", "kill_server", again=SERVER),
    FullFault("rank 0 killed", "kill_rank_0"),
    FullFault("learner node loses power", "power_off_learner"),
    FullFault("supervisor killed", "kill_supervisor", again=NOTHING),
    FullFault("time limit of the learner", "limit_time", redoes=False),
    FullFault("preemption of the learner", "preempt", second=False, settings={"partition": "spot"}, redoes=False),
    FullFault("rollout process killed", "kill_rollout", again=NOTHING),
    FullFault("another rank killed", "kill_rank"),
    FullFault("rank stopped", "stop_rank"),
    FullFault("server node loses power", "power_off_server", again=SERVER),
    FullFault("server process stopped", "stop_server", again=SERVER),
    FullFault("server killed during a delivery", "kill_server", at="delivery", again=SERVER),
    FullFault("killed during a delivery", "kill_rank_0", at="delivery"),
    FullFault("killed during a save", "kill_rank_0", at="save"),
    FullFault("checkpoint truncated", "truncate_checkpoint", saves=2),
    FullFault("rollout process stopped", "stop_rollout", again=NOTHING),
    FullFault("learner leader killed", "kill_learner_leader"),
    FullFault("server leader killed", "kill_server_leader", again=SERVER),
    FullFault("learner node drained, then a rank killed", "drain_and_kill"),
    FullFault("short partition of the learner", "partition_short", again=NOTHING),
    FullFault("long partition of the learner", "partition_long", again=None),
    FullFault("short partition of the server", "partition_short_server", again=NOTHING),
    FullFault("long partition of the server", "partition_long_server", again=SERVER),
    FullFault("supervisor stopped longer than its lease", "stop_supervisor", again=NOTHING),
    FullFault("controller away", "controller_away", again=NOTHING),
    FullFault("accounting away", "accounting_away", again=NOTHING),
    FullFault("slurmd restarted", "restart_slurmd", again=NOTHING),
    FullFault(
        "supervisor killed before its record",
        at="plan",
        again=NOTHING,
        second=False,
        plan={"event": "supervisor.record", "deeds": ["kill"]},
    ),
    FullFault("storage runs full", "storage_full", again=None, second=False, storage="limited"),
    FullFault("storage refuses writes", "storage_refuses", again=None, second=False, storage="limited"),
    FullFault(
        "reward that always raises",
        "spoil_reward",
        end=End.FAILED,
        again=None,
        second=False,
        reason="could not convert string to float",
    ),
    FullFault("cancelled by a person", "cancel", end=End.CANCELLED, again=NOTHING),
    FullFault("job cancelled by a person", "scancel", end=End.CANCELLED, again=NOTHING),
)


@dataclass(frozen=True)
class Strike:
    """One fault of a scenario. `step`: at or after which; `attempt`: in or after which, so that a later one meets a recovery."""

    fault: FullFault
    step: int
    attempt: int = 1


@dataclass(frozen=True)
class FullScenario:
    seed: int
    shape: str
    nodes: int
    ranks: int
    save_steps: int
    strikes: tuple[Strike, ...]

    @property
    def names(self) -> str:
        return " + ".join(strike.fault.name for strike in self.strikes)

    @property
    def storage(self) -> str:
        return self.strikes[0].fault.storage or "shared"

    @property
    def profile(self) -> dict[str, Any]:
        return {key: value for strike in self.strikes for key, value in strike.fault.settings.items()}

    @property
    def end(self) -> End:
        return next((s.fault.end for s in self.strikes if s.fault.end is not End.FINISHED), End.FINISHED)


def full_plan(seed: int, faults: tuple[FullFault, ...] = FULL_FAULTS) -> FullScenario:
    """The scenario of a seed. Seeds in a row go through all faults; everything else is drawn."""
    draw = random.Random(seed)
    first = faults[seed % len(faults)]
    shape = draw.choice([shape for shape in (SEPARATE, SEPARATE, ONE) if shape in first.shapes])
    nodes, ranks = draw.choice([(1, 2), (2, 1)])
    save_steps = draw.randint(2, 5)
    strikes = [Strike(first, max(draw.randint(*STEPS), first.saves * save_steps + 1))]
    if first.end is End.FINISHED and draw.random() < TWO_FAULTS:
        second = draw.choice(
            [fault for fault in faults if fault.second and fault is not first and shape in fault.shapes]
        )
        recovers = bool(first.again) and draw.random() < 0.5
        strikes.append(Strike(second, 0 if recovers else draw.randint(STEPS[1], 2 * STEPS[1]), 2 if recovers else 1))
    return FullScenario(seed, shape, nodes, ranks, save_steps, tuple(strikes))
