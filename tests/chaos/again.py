"""Which roles a run has started again, and which it should have. Pure but for the run folder."""

from collections import Counter
from collections.abc import Sequence

from cluster.jobs import read_jobs
from slipstream.run_folder import RunFolder
from tests.chaos.faults import BY_NAME, LEARNER, NOTHING, ONE, SERVER, Fault
from tests.chaos.plan import WHILE, Scenario

MAX_RESTARTS = 5  # recovery.max_restarts as it is by default


def restarts(run: RunFolder) -> Counter[str]:
    """By role, how often a job of it was submitted again."""
    jobs = Counter(job.role for attempt in run.attempts() for job in read_jobs(run, attempt))
    return Counter({role: count - 1 for role, count in jobs.items() if count > 1})


def wrong_restarts(found: Counter[str], redone: int, scenario: Scenario, met: Sequence[str]) -> list[str]:
    """What is wrong with the restarts of a run and with the steps that it had to make again. Pure.

    Args:
        found: restarts by role.
        redone: optimizer steps that a later attempt made again.
        met: names of the faults that were met, as the scenario has them.
    """
    told = ", ".join(f"{count} x {role}" for role, count in sorted(found.items())) or "nothing"
    if len(met) == 1 and len(scenario.injections) == 1:
        wrong = _of_one(found, BY_NAME[met[0]], scenario)
    else:
        wrong = _of_several(found, met, scenario)
    problems = [f"started again: {told}, not {wrong}"] if wrong else []
    redoes = [BY_NAME[name.removesuffix(WHILE)].redoes for name in met]
    attempts = sum(found[role] for role in ("learner", "allocation"))
    most = attempts * scenario.save_steps if any(redoes) else 0
    if redone > most and None not in redoes:
        problems.append(f"{redone} steps were made again, at most {most} had to be")
    return problems


def _in_shape(roles: frozenset[str], shape: str) -> frozenset[str]:
    return frozenset({"allocation"}) if roles and shape == ONE else roles


def _of_one(found: Counter[str], fault: Fault, scenario: Scenario) -> str:
    """What should have been started again, in words; empty where it was. Each role once, of a fault for ever up to the bound."""
    roles = _in_shape(fault.again, scenario.shape)
    most = MAX_RESTARTS if fault.always else 1
    if set(found) == roles and all(count <= most for count in found.values()):
        return ""
    often = f"up to {most} x " if most > 1 else ""
    return often + (" and ".join(sorted(roles)) or "nothing")


def _of_several(found: Counter[str], met: Sequence[str], scenario: Scenario) -> str:
    """The same of two faults, of which one may hide the other or prolong it: only what neither of them can explain."""
    possible = [_may_start_again(name) for name in met]
    roles = frozenset().union(*possible)
    if sum("server" in may for may in possible) > 1:  # away for so long that the learner gives up
        roles |= LEARNER
    roles = _in_shape(roles, scenario.shape)
    if set(found) <= roles and all(count <= len(met) for count in found.values()):
        return ""
    return f"at most {len(met)} x " + (" and ".join(sorted(roles)) or "nothing") if roles else "nothing"


def _may_start_again(name: str) -> frozenset[str]:
    """Roles that a fault may have ended. While a run recovers it strikes whoever is starting just then."""
    fault = BY_NAME[name.removesuffix(WHILE)]
    if not name.endswith(WHILE) or fault.again == NOTHING:
        return fault.again
    return SERVER | LEARNER
