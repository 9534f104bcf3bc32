"""The steps of a run in an audit: each counted once, and what each attempt redid. Pure."""

from collections import defaultdict
from collections.abc import Iterator

from slipstream.metrics.audit_types import Attempt, AttemptRecords, Fault, Finding, RunRecords, ranges
from slipstream.run_folder import void_limits


def step_findings(records: RunRecords) -> list[Finding]:
    """Steps that no line of metrics.jsonl tells of, and those that several tell of; without void lines."""
    limits = void_limits({a.number: a.fence for a in records.attempts})
    told: dict[int, list[int]] = defaultdict(list)
    for attempt in records.attempts:
        for step in _trained_steps(attempt):
            if step <= limits.get(attempt.number, step):
                told[step].append(attempt.number)
    findings = [
        Finding(Fault.STEP_TWICE, f"step {step}, by attempt {' and '.join(map(str, attempts))}")
        for step, attempts in sorted(told.items())
        if len(attempts) > 1
    ]
    last = max([0, *told, *(int(a.fence.get("step", 0)) for a in records.attempts)])
    if records.result is not None:
        last = int(records.result.get("steps", last))
        if beyond := [step for step in told if step > last]:
            findings.append(Finding(Fault.STEP_TWICE, f"step {ranges(beyond)}, beyond the result's {last} steps"))
        if last and last not in told:
            findings.append(Finding(Fault.STEP_MISSING, f"step {last}, the last one of the result"))
    every = records.logging_steps
    if missing := set(range(every, last + 1, every)) - set(told):
        findings.append(Finding(Fault.STEP_MISSING, f"step {ranges(missing)}"))
    return findings


def attempt_rows(records: RunRecords) -> Iterator[Attempt]:
    """The table of attempts."""
    before = 0
    for attempt in records.attempts:
        began = int(attempt.fence.get("step", 0))
        reached = _reached(attempt)
        yield Attempt(attempt.number, began, reached, max(0, before - began), attempt.why, tuple(attempt.faults))
        before = reached


def _trained_steps(attempt: AttemptRecords) -> list[int]:
    return [int(line["step"]) for line in attempt.metrics if "loss" in line]


def _reached(attempt: AttemptRecords) -> int:
    """The last optimizer step of which a record says that it has finished."""
    trained = [int(line["step"]) for line in attempt.ledger if set(line["outcomes"]) == {"trained"}]
    saved = [checkpoint.step for checkpoint in attempt.checkpoints]
    return max([int(attempt.fence.get("step", 0)), attempt.left or 0, *_trained_steps(attempt), *trained, *saved])
