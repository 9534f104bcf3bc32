"""The proof, from a run's own records, that every prompt of every epoch was settled exactly once. Pure.

A record of an attempt beyond the step that a later attempt's fence names is void. What remains must settle each prompt
once, count each step once, and agree with every checkpoint.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from math import ceil
from typing import Any

from slipstream.metrics.audit_steps import attempt_rows, step_findings
from slipstream.metrics.audit_types import Audit, CheckpointRecord, Fault, Finding, Line, RunRecords, ranges
from slipstream.run_folder import void_limits

SINGLE_TURN = "slipstream.rollout.loop:AsyncRolloutLoop"  # one sample a rollout; other loops may make several
OF_THE_PROMPT = frozenset({"filtered", "oversize_prompt"})  # outcomes of a prompt as a whole
LAG_SLACK = 4


def audit(records: RunRecords) -> Audit:
    """Judge a run by its records, whether it has finished or not."""
    counted, void, repeated = _counted(records)
    findings = [Finding(Fault.UNREADABLE, place) for attempt in records.attempts for place in attempt.unreadable]
    findings += _impossible(records, counted)
    findings += settled_twice(counted)
    findings += _never_settled(records, counted, void)
    findings += _outcomes(records, counted)
    findings += step_findings(records)
    for checkpoint in records.checkpoints:
        findings += _checkpoint(records, checkpoint)
    findings += _fences(records)
    expected, keys = _expected(records), {_key(line) for line in counted}
    waiting = set() if _ended_by_prompts(records) else _holes(keys, records.length)
    return Audit(
        finished=records.result is not None,
        settled=len(keys),
        expected=None if expected is None else len(expected),
        repeated=len(repeated),
        void=len(void),
        open_count=len(waiting),
        open=_names(waiting),
        attempts=tuple(attempt_rows(records)),
        findings=tuple(findings),
    )


def check_lines(lines: Iterable[Line], length: int, epochs: int | None = None) -> list[Finding]:
    """Check ledger lines alone, of which none is void; `epochs`: whole ones that must be there, None: any."""
    lines = list(lines)
    findings = settled_twice(lines)
    keys = {_key(line) for line in lines}
    missing = {(e, p) for e in range(epochs or 0) for p in range(length)} - keys
    return findings + ([Finding(Fault.NEVER, _names(missing))] if missing else [])


def settled_twice(lines: Iterable[Line]) -> list[Finding]:
    by_key: dict[tuple[int, int], list[Line]] = defaultdict(list)
    for line in lines:
        by_key[_key(line)].append(line)
    return [
        Finding(Fault.TWICE, f"{_names([key])}, by {'; '.join(map(_where, found))}")
        for key, found in sorted(by_key.items())
        if len(found) > 1
    ]


def _key(line: Line) -> tuple[int, int]:
    return int(line["epoch"]), int(line["prompt"])


def _where(line: Line) -> str:
    return f"attempt {line.get('attempt', '?')} at step {line.get('step', '?')}"


def _names(keys: Iterable[tuple[int, int]]) -> str:
    by_epoch: dict[int, list[int]] = defaultdict(list)
    for epoch, prompt in keys:
        by_epoch[epoch].append(prompt)
    return "; ".join(f"epoch {epoch}, prompt {ranges(prompts)}" for epoch, prompts in sorted(by_epoch.items()))


def _holes(keys: set[tuple[int, int]], length: int | None) -> set[tuple[int, int]]:
    """What is not settled although something later is. Without a length: something later in the same epoch."""
    if length:
        numbers = {epoch * length + prompt for epoch, prompt in keys}
        return {divmod(number, length) for number in set(range(max(numbers, default=0))) - numbers}
    sizes: dict[int, int] = defaultdict(int)
    for epoch, prompt in keys:
        sizes[epoch] = max(sizes[epoch], prompt + 1)
    return {(epoch, prompt) for epoch, size in sizes.items() for prompt in range(size)} - keys


def _of(records: RunRecords, upto: int | None = None) -> Iterator[tuple[Line, bool]]:
    """Ledger lines with their attempt, and whether they count by the fences of attempts up to `upto`."""
    fences = {a.number: a.fence for a in records.attempts if upto is None or a.number <= upto}
    limits = void_limits(fences, of_ledger=True)
    for attempt in records.attempts:
        if attempt.number in fences:
            limit = limits.get(attempt.number)
            for line in attempt.ledger:
                yield {**line, "attempt": attempt.number}, limit is None or int(line["step"]) <= limit


def _counted(records: RunRecords) -> tuple[list[Line], list[Line], list[Line]]:
    """Lines that count, void ones, and those of an iterable dataset's epoch that a later attempt began anew."""
    lines = list(_of(records))
    counted = [line for line, counts in lines if counts]
    void = [line for line, counts in lines if not counts]
    if not records.iterable:
        return counted, void, []
    begins = [(a.number, _first_epoch(records, a.number)) for a in records.attempts[1:]]

    def again(line: Line) -> bool:
        return any(number > line["attempt"] and line["epoch"] >= epoch for number, epoch in begins)

    return [line for line in counted if not again(line)], void, [line for line in counted if again(line)]


def _first_epoch(records: RunRecords, number: int) -> int:
    """The epoch of an iterable dataset that an attempt began anew."""
    attempt = next(a for a in records.attempts if a.number == number)
    for checkpoint in records.checkpoints:
        if checkpoint.path == attempt.fence.get("checkpoint"):
            return int(checkpoint.state.get("epoch", 0))
    if not attempt.fence.get("checkpoint"):
        return 0
    return min((int(line["epoch"]) for line in attempt.ledger), default=2**31)  # retention took the checkpoint


def _ended_by_prompts(records: RunRecords) -> bool:
    return records.result is not None and records.max_steps <= 0


def _expected(records: RunRecords) -> set[int] | None:
    """Numbers of the prompts that the finished run must have settled, where they are known."""
    if not _ended_by_prompts(records) or records.length is None:
        return None
    return set(range(ceil(Fraction(str(records.num_train_epochs)) * records.length)))


def _settled_by(records: RunRecords, checkpoint: CheckpointRecord) -> set[int]:
    """Prompt numbers that a checkpoint of a dataset with a length says are settled."""
    state = checkpoint.state
    first = int(state["epoch"]) * int(state["dataset_length"]) + int(state["prompt"])
    return set(range(first)) | {int(number) for number in state["settled_beyond"]}


def _never_settled(records: RunRecords, counted: Sequence[Line], void: Sequence[Line]) -> list[Finding]:
    keys = {_key(line) for line in counted}
    length = records.length
    if records.iterable:
        missing = _holes(keys, None) if _ended_by_prompts(records) else set()
        if _ended_by_prompts(records):
            missing |= {(epoch, 0) for epoch in range(int(records.num_train_epochs)) if (epoch, 0) not in keys}
    elif length:
        wanted = _expected(records) or set()
        if newest := _resume_point(records):
            wanted |= _settled_by(records, newest)
        missing = {divmod(number, length) for number in wanted} - keys
        if records.result is not None and not _ended_by_prompts(records):
            missing |= _lost(records, counted, length)
    else:
        missing = set()
    void_lines: dict[tuple[int, int], list[Line]] = defaultdict(list)
    for line in void:
        void_lines[_key(line)].append(line)
    only_void = [key for key in sorted(missing) if key in void_lines]
    findings = [
        Finding(Fault.VOID_ONLY, f"{_names([key])}, by {'; '.join(map(_where, void_lines[key]))}") for key in only_void
    ]
    if never := missing - set(only_void):
        findings.append(Finding(Fault.NEVER, _names(never)))
    return findings


def _lost(records: RunRecords, counted: Sequence[Line], length: int) -> set[tuple[int, int]]:
    """Prompts of a run bounded by steps that were not settled though they can no longer have been under way.

    Groups start in order, so one that was passed over started before any later one of its attempt; what is older than
    the staleness bound is dropped, with a line.
    """
    last = records.attempts[-1].number
    seen = [
        (int(line["epoch"]) * length + int(line["prompt"]), int(line["versions"][0]))
        for line in counted
        if line["attempt"] == last and line.get("versions")
    ]
    if not seen:
        return set()
    now = max(version for _, version in seen)
    horizon = now - 2 * records.max_staleness - LAG_SLACK
    old = [number for number, version in seen if version < horizon]
    return {
        key for key in _holes({_key(line) for line in counted}, length) if old and key[0] * length + key[1] < max(old)
    }


def _resume_point(records: RunRecords) -> CheckpointRecord | None:
    """The newest checkpoint that no fence has made void."""
    limits = void_limits({a.number: a.fence for a in records.attempts})
    valid = [c for c in records.checkpoints if c.step <= limits.get(c.attempt, c.step) and c.state]
    return max(valid, key=lambda c: (c.step, c.attempt), default=None)


def _outcomes(records: RunRecords, lines: Sequence[Line]) -> list[Finding]:
    """Each rollout of a group has exactly one outcome, or the prompt as a whole has."""
    states = [checkpoint.state for checkpoint in records.checkpoints]
    sizes = {records.num_generations}
    sizes |= {int(s["settings"]["num_generations"]) for s in states if s.get("settings", {}).get("num_generations")}
    exact = all(state.get("loop", SINGLE_TURN) == SINGLE_TURN for state in states)
    findings = []
    for line in lines:
        outcomes = {str(k): int(v) for k, v in line["outcomes"].items()}
        total = sum(outcomes.values())
        whole = total == 1 and set(outcomes) <= OF_THE_PROMPT
        if whole or total in sizes or (not exact and total > min(sizes)):
            continue
        counts = ", ".join(f"{name} {count}" for name, count in sorted(outcomes.items())) or "none"
        of = " or ".join(map(str, sorted(sizes)))
        findings.append(
            Finding(Fault.OUTCOMES, f"{_names([_key(line)])}, by {_where(line)}: {counts}; a group has {of} rollouts")
        )
    return findings


def _impossible(records: RunRecords, lines: Sequence[Line]) -> list[Finding]:
    findings = []
    begins = {a.number: int(a.fence.get("step") or 0) for a in records.attempts}
    for line in lines:
        what = f"{_names([_key(line)])}, by {_where(line)}"
        if int(line["step"]) <= begins[line["attempt"]]:
            findings.append(Finding(Fault.LINE, f"{what}: the attempt began from step {begins[line['attempt']]}"))
        if records.length and int(line["number"]) != line["epoch"] * records.length + line["prompt"]:
            text = f"{what}: its number is {line['number']}, of {records.length} prompts an epoch"
            findings.append(Finding(Fault.LINE, text))
    return findings


def _checkpoint(records: RunRecords, checkpoint: CheckpointRecord) -> list[Finding]:
    """Compare a checkpoint with the lines that counted when it was written."""
    state = checkpoint.state

    def finding(text: str) -> Finding:
        return Finding(Fault.CHECKPOINT, f"{checkpoint.path}: {text}")

    if not state:
        return [finding("it has no readable rollout state")]
    if (int(state["attempt"]), int(state["step"])) != (checkpoint.attempt, checkpoint.step):
        return [finding(f"its state is of attempt {state['attempt']}, step {state['step']}")]
    then = [line for line, counts in _of(records, checkpoint.attempt) if counts]
    own = checkpoint.attempt
    known = [line for line in then if line["attempt"] != own or int(line["step"]) <= checkpoint.known]
    if state.get("dataset_length") is None:
        known = [line for line in known if line["attempt"] == own]  # numbers begin anew with each attempt
        first = sum(line["epoch"] < int(state["epoch"]) for line in known) + int(state["prompt"])
        settled = set(range(first)) | {int(number) for number in state["settled_beyond"]}
    else:
        settled = _settled_by(records, checkpoint)
    by_ledger = {int(line["number"]) for line in known}
    findings = []
    if missing := settled - by_ledger:
        findings.append(finding(f"it has prompt number {ranges(missing)} settled, the ledger does not"))
    if extra := by_ledger - settled:
        findings.append(finding(f"the ledger has prompt number {ranges(extra)} settled by then, it does not"))
    return findings + [finding(text) for text in _split(records, checkpoint, settled)]


def _split(records: RunRecords, checkpoint: CheckpointRecord, settled: set[int]) -> list[str]:
    """Groups of which some samples are trained by then: the rest must be in the checkpoint."""
    state = checkpoint.state
    if state.get("outcomes") is None or state.get("dataset_length") is None:
        return []  # an older version's, or one whose resume generates them again
    split = {int(number): entry for number, entry in state["split"].items()}
    problems = []
    if both := set(split) & settled:
        problems.append(f"prompt number {ranges(both)} is both settled and split")
    if unlike := set(split) ^ set(checkpoint.held):
        problems.append(f"of the split prompt number {ranges(unlike)} it does not hold the rest of the samples")
    size = int(state.get("settings", {}).get("num_generations") or records.num_generations)
    for number in set(split) & set(checkpoint.held):
        total = sum(split[number]["outcomes"].values()) + checkpoint.held[number]
        if state.get("loop", SINGLE_TURN) == SINGLE_TURN and total != size:
            problems.append(f"of the split prompt number {number} it has {total} of {size} rollouts")
    return problems


def _fences(records: RunRecords) -> list[Finding]:
    findings = []
    found = {checkpoint.path: checkpoint for checkpoint in records.checkpoints}
    for attempt in records.attempts:
        fence, step = attempt.fence, int(attempt.fence.get("step", 0))
        checkpoint = found.get(str(fence.get("checkpoint")))
        what = f"attempt {attempt.number} begins from step {step}"
        if not fence.get("checkpoint"):
            if step:
                findings.append(Finding(Fault.FENCE, f"{what}, but from no checkpoint"))
        elif checkpoint is not None:  # else retention has deleted it since
            findings += [
                Finding(Fault.FENCE, f"{what}, {text}") for text in _fence(records, attempt.number, checkpoint)
            ]
    return findings


def _fence(records: RunRecords, number: int, checkpoint: CheckpointRecord) -> Iterator[str]:
    fences: dict[int, Any] = {a.number: a.fence for a in records.attempts if a.number <= number}
    fence = fences[number]
    if int(fence.get("step", 0)) != checkpoint.step:
        yield f"its checkpoint {checkpoint.path} is of step {checkpoint.step}"
    if fence.get("ledger") and list(fence["ledger"]) != [checkpoint.attempt, checkpoint.known]:
        yield f"with the ledger of attempt and step {fence['ledger']}; {checkpoint.path} says {checkpoint.known}"
    earlier = void_limits({k: v for k, v in fences.items() if k < number})
    if checkpoint.step > earlier.get(checkpoint.attempt, checkpoint.step):
        yield f"but {checkpoint.path} was void: attempt {checkpoint.attempt} counts to step {earlier[checkpoint.attempt]}"
