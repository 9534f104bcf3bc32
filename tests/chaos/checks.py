"""What must hold after a chaos run. Reads the run folder; pure but for that."""

import contextlib
from typing import Any

from slipstream.learner.checkpoint import latest_complete
from slipstream.metrics.audit_records import audit_run
from slipstream.metrics.audit_types import Audit
from slipstream.run_folder import RunFolder, read_json
from tests.chaos.again import restarts, wrong_restarts
from tests.chaos.faults import End
from tests.chaos.plan import Scenario
from tests.doubles.events import FOLDER

REASONS = {"storage full": "No space left", "over quota": "quota exceeded", "reward that always raises": "out of luck"}


def met(run: RunFolder, scenario: Scenario) -> dict[str, dict[str, Any]]:
    """The faults that were met, by id of their injection: what the event said."""
    found = {}
    for injection in scenario.injections:
        with contextlib.suppress(ValueError):
            if value := read_json(run.path / FOLDER / f"reached-{injection.id}.json"):
                found[injection.id] = value
    return found


def expected_end(run: RunFolder, scenario: Scenario) -> set[End]:
    """How the run may have ended. Of two faults the one that ends a run may come too late."""
    reached = met(run, scenario)
    ends = [injection.end for injection in scenario.injections if injection.id in reached]
    final = {end for end in ends if end is not End.FINISHED}
    return final or {End.FINISHED}


def end_of(run: RunFolder) -> tuple[str, str]:
    """(kind, reason) of the run's outcome; empty where there is none."""
    with contextlib.suppress(ValueError):
        outcome = read_json(run.path / "outcome.json") or {}
        return str(outcome.get("kind", "")), str(outcome.get("reason", ""))
    return "", ""


def problems_of(run: RunFolder, scenario: Scenario) -> tuple[list[str], Audit]:
    """What is wrong with the run's end and its records."""
    kind, reason = end_of(run)
    allowed = expected_end(run, scenario)
    problems = []
    if kind not in {str(end) for end in allowed}:
        problems.append(f"ended as {kind or 'nothing'} ({reason}), not as {' or '.join(sorted(allowed))}")
    for injection in scenario.injections:
        text = REASONS.get(injection.fault)
        if text and kind == End.FAILED and text not in reason:
            problems.append(f"failed without its cause: {reason}")
    audit = audit_run(run)
    problems += [f"audit: {finding}" for finding in audit.findings]
    if kind == End.FINISHED and not audit.finished:
        problems.append("it is said to have finished, without a result")
    if kind == End.FINISHED and audit.settled != scenario.prompts * scenario.epochs:
        problems.append(f"{audit.settled} of {scenario.prompts * scenario.epochs} prompts settled")
    names = {injection.id: injection.fault for injection in scenario.injections}
    struck = [names[name] for name in met(run, scenario)]
    if not struck:
        problems.append("no fault was met")
    problems += wrong_restarts(restarts(run), audit.redone, scenario, struck)
    if kind == End.FAILED and latest_complete(run) is None and audit.attempts[-1].reached >= 2 * scenario.save_steps:
        problems.append("no complete checkpoint is left")
    return problems, audit


def recovery_times(events: list[dict[str, Any]], reached: dict[str, dict[str, Any]]) -> dict[str, float]:
    """By injection, seconds from the fault to the first step that the run had not done before; only where there is one."""
    steps = [(line["time"], line["step"]) for line in events if line["event"] == "step"]
    found = {}
    for name, at in reached.items():
        before = max((step for when, step in steps if when <= at["time"]), default=0)
        later = [when for when, step in steps if when > at["time"] and step > before]
        if later:
            found[name] = min(later) - at["time"]
    return found
