"""From a seed to a scenario. Pure: the same seed gives the same run and the same faults."""

import itertools
import random
from dataclasses import asdict, dataclass
from typing import Any

from tests.chaos.faults import BY_NAME, FAULTS, ONE, RECORD, RECOVERING, SEPARATE, End, Fault
from tests.doubles.outcomes import num_steps

GROUP = 3
LEAST_STEP_S, MOST_STEP_S = 0.05, 14.0
TWO_FAULTS = 0.3
CANCEL_WHILE_RECOVERING = 0.08
WHILE = " while it recovers"  # in the name of an injection


@dataclass(frozen=True)
class Injection:
    """One fault of a scenario, as a plan of `tests.doubles.events` has it, and what the driver does then."""

    id: str
    fault: str
    plan: dict[str, Any]
    act: str
    end: End


@dataclass(frozen=True)
class Scenario:
    """
    Attributes:
        injections: in the order in which they may come.
        profile: settings of the cluster profile besides the common ones.
        steps: optimizer steps that the run has.
        step_s: seconds that each takes.
    """

    seed: int
    shape: str
    learner_nodes: int
    ranks: int
    server_nodes: int
    prompts: int
    epochs: int
    save_steps: int
    steps: int
    step_s: float
    profile: dict[str, Any]
    storage: str
    injections: tuple[Injection, ...]

    @property
    def world(self) -> int:
        return self.learner_nodes * self.ranks

    @property
    def plan(self) -> list[dict[str, Any]]:
        """The content of fault-plan.json."""
        return [injection.plan for injection in self.injections]

    @property
    def names(self) -> str:
        return " + ".join(injection.fault for injection in self.injections)

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


def plan(seed: int, faults: tuple[Fault, ...] = FAULTS) -> Scenario:
    """The scenario of a seed. Seeds in a row go through all faults; everything else is drawn."""
    draw = random.Random(seed)
    first = faults[seed % len(faults)]
    shape = draw.choice([shape for shape in (SEPARATE, SEPARATE, ONE) if shape in first.shapes])
    learner_nodes, ranks = draw.choice([(1, 1), (1, 2), (2, 1), (2, 2)])
    if first.where.get("rank") == "other rank" and learner_nodes * ranks == 1:
        ranks = 2
    prompts, epochs, save_steps = draw.randint(12, 24), draw.randint(1, 2), draw.randint(2, 5)
    steps = num_steps(prompts * epochs, GROUP)
    met = [first]
    made = [_injection("first", first, draw, steps, save_steps, learner_nodes * ranks)]
    if shape == ONE and first.event == RECORD:
        made[0].plan["count"] = 1  # all is one job
    chance = draw.random()
    if first.end is End.FINISHED and chance < TWO_FAULTS:
        others = [f for f in faults if f.second and f.name != first.name and shape in f.shapes]
        others = [f for f in others if f.where.get("rank") != "other rank" or learner_nodes * ranks > 1]
        second = draw.choice(others)
        met.append(second)
        made.append(_second(second, draw, steps, save_steps, learner_nodes * ranks))
    elif first.end is End.FINISHED and chance < TWO_FAULTS + CANCEL_WHILE_RECOVERING:
        made.append(_while_recovering(next(f for f in faults if f.act == "cancel"), draw))
    return Scenario(
        seed=seed,
        shape=shape,
        learner_nodes=learner_nodes,
        ranks=ranks,
        server_nodes=draw.choice([1, 1, 1, 2]),
        prompts=prompts,
        epochs=epochs,
        save_steps=save_steps,
        steps=steps,
        step_s=round(
            min(MOST_STEP_S, max(LEAST_STEP_S, sum(fault.lasts_s for fault in met) / (steps - steps // 3 - 1))), 2
        ),
        profile=dict(first.settings),
        storage=first.storage,
        injections=tuple(made),
    )


def scenario_of(fault: str, shape: str | None = None, second: str = "") -> Scenario:
    """The first scenario that meets this fault alone, or with `second` in its name."""
    faults = FAULTS if BY_NAME[fault] in FAULTS else (BY_NAME[fault],)
    for seed in itertools.count(faults.index(BY_NAME[fault]), len(faults)):
        found = plan(seed, faults)
        fits = second in found.names if second else len(found.injections) == 1
        if fits and shape in (None, found.shape):
            return found
    raise AssertionError("endless")


def _injection(name: str, fault: Fault, draw: random.Random, steps: int, save_steps: int, world: int) -> Injection:
    where = dict(fault.where)
    if where.get("rank") == "other rank":
        where["rank"] = draw.randint(1, world - 1)
    plan: dict[str, Any] = {"id": name, "event": fault.event}
    if fault.steps and fault.during_save:
        where["step"] = save_steps * draw.randint(1, max(1, (steps - 1) // save_steps))
    elif fault.steps:
        where["step"] = draw.randint(1, steps // 3 if fault.lasts_s else steps - 2)
    elif not fault.always:
        plan["count"] = draw.randint(1, 2 if fault.event == RECORD else steps // 2)
    deeds = [*(["block"] if fault.act else []), *fault.deeds]
    plan |= {"where": where, "deeds": deeds, "always": fault.always}
    return Injection(name, fault.name, plan, fault.act, fault.end)


def _second(fault: Fault, draw: random.Random, steps: int, save_steps: int, world: int) -> Injection:
    """Anywhere; or, where the driver or the learner can do it, while the run recovers from the first."""
    if fault.act and draw.random() < 0.5:
        return _while_recovering(fault, draw)
    return _injection("second", fault, draw, steps, save_steps, world)


def _while_recovering(fault: Fault, draw: random.Random) -> Injection:
    """At an event of a start that is not the first of its kind."""
    event = draw.choice([name for name in RECOVERING if not fault.deeds or name == "resume"])
    plan = {
        "id": "second",
        "event": event,
        "nth start": 2,
        "where": {},
        "deeds": ["block", *fault.deeds],
        "always": False,
    }
    return Injection("second", f"{fault.name}{WHILE}", plan, fault.act, fault.end)
