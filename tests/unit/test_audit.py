"""The audit: runs that are right are clean, and one thing that is wrong is found."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.metrics.audit import audit, check_lines
from slipstream.metrics.audit_types import AttemptRecords, CheckpointRecord, Fault, RunRecords, ranges
from tests.audit_runs import GROUP, interrupted_run

SEEDS = st.integers(0, 2**32)


def counted_lines(run: RunRecords) -> list[tuple[int, int]]:
    """(attempt's index, line's index) of what counts, and of no epoch that a later attempt repeats."""
    steps = [int(a.fence["step"]) for a in run.attempts]
    ledger = [int(a.fence.get("ledger", (0, a.fence["step"]))[1]) for a in run.attempts]
    found = []
    for i, attempt in enumerate(run.attempts):
        for j, line in enumerate(attempt.ledger):
            limits = []
            for k in range(i + 1, len(run.attempts)):
                writer = run.attempts[k].fence.get("ledger", (0, 0))[0]
                limits.append(ledger[k] if attempt.number <= writer else steps[k])
            if all(line["step"] <= limit for limit in limits):
                found.append((i, j))
    return found


def changed(run: RunRecords, index: int, **fields: Any) -> RunRecords:
    attempts = list(run.attempts)
    attempts[index] = replace(attempts[index], **fields)
    return replace(run, attempts=attempts)


def without_line(run: RunRecords, i: int, j: int) -> RunRecords:
    lines = list(run.attempts[i].ledger)
    del lines[j]
    return changed(run, i, ledger=lines)


@settings(deadline=None, max_examples=300)
@given(SEEDS, st.booleans())
def test_a_right_run_is_clean(seed: int, iterable: bool) -> None:
    run = interrupted_run(random.Random(seed), iterable)
    found = audit(run)
    assert found.findings == ()
    assert found.finished == (run.result is not None)
    if found.finished and not iterable:
        assert found.settled == found.expected
        assert not found.open_count


def doubled_line(run: RunRecords, draw: random.Random) -> tuple[RunRecords, set[Fault]] | None:
    if not (lines := counted_lines(run)):
        return None
    i, j = draw.choice(lines)
    last = len(run.attempts) - 1
    line = {**run.attempts[i].ledger[j], "step": max(int(run.attempts[last].fence["step"]) + 1, 1)}
    return changed(run, last, ledger=[*run.attempts[last].ledger, line]), {Fault.TWICE}


def lost_line(run: RunRecords, draw: random.Random) -> tuple[RunRecords, set[Fault]] | None:
    if run.result is None or not (lines := counted_lines(run)):
        return None
    return without_line(run, *draw.choice(lines)), {Fault.NEVER, Fault.VOID_ONLY}


def void_line(run: RunRecords, draw: random.Random) -> tuple[RunRecords, set[Fault]] | None:
    """A prompt whose only record stands in an earlier attempt, beyond where the next one begins."""
    last = len(run.attempts) - 1
    lines = [(i, j) for i, j in counted_lines(run) if i == last]
    if run.result is None or not last or not lines:
        return None
    i, j = draw.choice(lines)
    line, before = run.attempts[i].ledger[j], run.attempts[last - 1]
    out = without_line(run, i, j)
    beyond = int(run.attempts[last].fence.get("ledger", (0, 0))[1]) + 100
    out = changed(out, last - 1, ledger=[*before.ledger, {**line, "step": beyond}])
    return out, {Fault.VOID_ONLY}


def lost_outcome(run: RunRecords, draw: random.Random) -> tuple[RunRecords, set[Fault]] | None:
    lines = [(i, j) for i, j in counted_lines(run) if sum(run.attempts[i].ledger[j]["outcomes"].values()) == GROUP]
    if not lines:
        return None
    i, j = draw.choice(lines)
    ledger = list(run.attempts[i].ledger)
    outcomes = dict(ledger[j]["outcomes"])
    outcomes[draw.choice(sorted(outcomes))] -= draw.choice([1, -1])
    ledger[j] = {**ledger[j], "outcomes": outcomes}
    return changed(run, i, ledger=ledger), {Fault.OUTCOMES}


def lost_step(run: RunRecords, draw: random.Random) -> tuple[RunRecords, set[Fault]] | None:
    """A step that counts, and is not the last of what was done."""
    last = len(run.attempts) - 1
    metrics = list(run.attempts[last].metrics)
    steps = [line for line in metrics if "loss" in line]
    if len(steps) < 2:
        return None
    metrics.remove(draw.choice(steps[:-1]))
    return changed(run, last, metrics=metrics), {Fault.STEP_MISSING}


def doubled_step(run: RunRecords, draw: random.Random) -> tuple[RunRecords, set[Fault]] | None:
    last = len(run.attempts) - 1
    metrics = list(run.attempts[last].metrics)
    if not metrics:
        return None
    line = {"step": draw.choice(metrics)["step"], "loss": 0.1}
    return changed(run, last, metrics=[*metrics, line]), {Fault.STEP_TWICE}


def another_checkpoint(change: Callable[[CheckpointRecord, random.Random], CheckpointRecord | None]) -> Any:
    def mutate(run: RunRecords, draw: random.Random) -> tuple[RunRecords, set[Fault]] | None:
        having = [i for i, attempt in enumerate(run.attempts) if attempt.checkpoints]
        if not having:
            return None
        i = draw.choice(having)
        checkpoints = list(run.attempts[i].checkpoints)
        j = draw.randrange(len(checkpoints))
        other = change(checkpoints[j], draw)
        if other is None:
            return None
        checkpoints[j] = other
        return changed(run, i, checkpoints=checkpoints), {Fault.CHECKPOINT}

    mutate.__name__ = change.__name__
    return mutate


@another_checkpoint
def checkpoint_ahead(found: CheckpointRecord, draw: random.Random) -> CheckpointRecord:
    """It says that a prompt is settled which is not."""
    state = dict(found.state)
    state["settled_beyond"] = [*state["settled_beyond"], 1000]
    return replace(found, state=state)


@another_checkpoint
def checkpoint_behind(found: CheckpointRecord, draw: random.Random) -> CheckpointRecord | None:
    """It would have a settled prompt generated again."""
    state = dict(found.state)
    if not state["settled_beyond"]:
        return None
    state["settled_beyond"] = state["settled_beyond"][:-1]
    return replace(found, state=state)


@another_checkpoint
def checkpoint_without_the_rest(found: CheckpointRecord, draw: random.Random) -> CheckpointRecord | None:
    if not found.held or found.state["dataset_length"] is None:
        return None
    return replace(found, held={})


@another_checkpoint
def checkpoint_of_another_step(found: CheckpointRecord, draw: random.Random) -> CheckpointRecord:
    return replace(found, state={**found.state, "step": found.step + 1})


MUTATIONS = [
    doubled_line,
    lost_line,
    void_line,
    lost_outcome,
    lost_step,
    doubled_step,
    checkpoint_ahead,
    checkpoint_behind,
    checkpoint_without_the_rest,
    checkpoint_of_another_step,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
def test_one_wrong_thing_is_found(mutate: Any) -> None:
    """In every one of many runs that it can happen to."""
    met = 0

    @settings(deadline=None, max_examples=150)
    @given(SEEDS)
    def every(seed: int) -> None:
        nonlocal met
        draw = random.Random(seed)
        made = mutate(interrupted_run(draw), draw)
        if made is None:
            return
        met += 1
        run, faults = made
        assert faults & {finding.fault for finding in audit(run).findings}

    every()
    assert met > 10


@pytest.mark.parametrize("mutate", [doubled_line, lost_outcome, checkpoint_ahead], ids=lambda m: m.__name__)
def test_one_wrong_thing_is_found_with_an_iterable_dataset(mutate: Any) -> None:
    met = 0

    @settings(deadline=None, max_examples=150)
    @given(SEEDS)
    def every(seed: int) -> None:
        nonlocal met
        draw = random.Random(seed)
        run = interrupted_run(draw, iterable=True)
        if len(run.attempts) > 1 or (made := mutate(run, draw)) is None:
            return  # what an epoch that is repeated holds is no proof
        met += 1
        assert made[1] & {finding.fault for finding in audit(made[0]).findings}

    every()
    assert met > 10


def line(number: int, step: int, **fields: Any) -> dict[str, Any]:
    known = {"number": number, "epoch": number // 4, "prompt": number % 4, "row": 0, "outcomes": {"trained": GROUP}}
    return {**known, "step": step, "versions": [step, step], **fields}


def checkpoint(attempt: int, step: int, settled: int, **state: Any) -> CheckpointRecord:
    known = {"step": step, "attempt": attempt, "dataset_length": 4, "epoch": settled // 4, "prompt": settled % 4}
    known |= {"settled_beyond": [], "outcomes": {}, "split": {}, "ledger_step": step, "settings": {}}
    return CheckpointRecord(attempt, step, f"output/a{attempt}/checkpoint-{step}", {**known, **state})


def steps(first: int, last: int) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 0.5} for step in range(first, last + 1)]


def two_attempts() -> list[AttemptRecords]:
    """A checkpoint at step 2, three steps more that are lost, and the rest by the second attempt."""
    fence = {"attempt": 2, "checkpoint": "output/a1/checkpoint-2", "step": 2, "ledger": [1, 2]}
    first = [line(number, number + 1) for number in range(5)]
    second = [line(number, number + 1) for number in range(2, 8)]
    return [
        AttemptRecords(1, {"checkpoint": None, "step": 0}, first, steps(1, 5), [checkpoint(1, 2, 2)], why="start"),
        AttemptRecords(2, fence, second, steps(3, 8), [checkpoint(2, 8, 8)], why="learner: killed"),
    ]


def test_the_table_says_what_each_recovery_redid_and_why() -> None:
    run = RunRecords(two_attempts(), GROUP, num_train_epochs=2, result={"steps": 8})
    found = audit(run)
    assert found.clean
    rows = [(row.number, row.began_from, row.reached, row.redone, row.why) for row in found.attempts]
    assert rows == [(1, 0, 5, 0, "start"), (2, 2, 8, 3, "learner: killed")]
    assert (found.settled, found.expected, found.void, found.redone) == (8, 8, 3, 3)


def test_findings_name_prompts_attempts_and_steps() -> None:
    first, second = two_attempts()
    lines = [*list(second.ledger)[1:], line(3, 7), line(6, 2)]
    run = RunRecords([first, replace(second, ledger=lines)], GROUP, num_train_epochs=2, result={"steps": 8})
    texts = [str(finding) for finding in audit(run).findings]
    assert texts == [
        "impossible ledger line: epoch 1, prompt 2, by attempt 2 at step 2: the attempt began from step 2",
        "settled twice: epoch 0, prompt 3, by attempt 2 at step 4; attempt 2 at step 7",
        "settled twice: epoch 1, prompt 2, by attempt 2 at step 7; attempt 2 at step 2",
        "settled by a void record only: epoch 0, prompt 2, by attempt 1 at step 3",
        "checkpoint disagrees with the ledger: output/a2/checkpoint-8: it has prompt number 2 settled, the ledger does not",
    ]


def test_what_is_open_in_an_unfinished_run_is_no_fault() -> None:
    lines = [line(0, 1), line(2, 1), line(3, 2), line(6, 2)]
    found = audit(RunRecords([AttemptRecords(1, {"step": 0}, lines, steps(1, 2), [])], GROUP))
    assert found.clean
    without = [checkpoint(1, 2, 1, settled_beyond=[2, 3, 6])]
    found = audit(RunRecords([AttemptRecords(1, {"step": 0}, lines, steps(1, 2), without)], GROUP))
    assert found.clean
    assert (found.open_count, found.open) == (3, "epoch 0, prompt 1; epoch 1, prompt 0-1")


def test_a_run_bounded_by_steps_may_end_with_prompts_under_way_but_loses_none() -> None:
    lines = [line(number, number + 1) for number in range(40) if number != 38]
    last = [checkpoint(1, 40, 38, settled_beyond=[39])]
    run = RunRecords([AttemptRecords(1, {"step": 0}, lines, steps(1, 40), last)], GROUP, 40, result={"steps": 40})
    found = audit(run)
    assert found.clean
    assert found.open == "epoch 9, prompt 2"
    lost = [checkpoint(1, 40, 3, settled_beyond=[*range(4, 38), 39])]
    run = changed(run, 0, ledger=[one for one in lines if one["number"] != 3], checkpoints=lost)
    assert [str(finding) for finding in audit(run).findings] == ["never settled: epoch 0, prompt 3"]


def test_a_fence_must_name_a_checkpoint_that_counts() -> None:
    first, second = two_attempts()
    later = {"attempt": 3, "checkpoint": "output/a1/checkpoint-5", "step": 5, "ledger": [1, 5]}
    saved = [*first.checkpoints, checkpoint(1, 5, 5)]
    records = [replace(first, checkpoints=saved), replace(second, ledger=[], metrics=[], checkpoints=[])]
    run = RunRecords([*records, AttemptRecords(3, later, [], [])], GROUP)
    assert [finding.text for finding in audit(run).findings if finding.fault is Fault.FENCE] == [
        "attempt 3 begins from step 5, but output/a1/checkpoint-5 was void: attempt 1 counts to step 2"
    ]


def test_a_loop_of_several_turns_may_make_more_samples_than_rollouts() -> None:
    def run(count: int, loop: str) -> RunRecords:
        lines = [line(0, 1, outcomes={"trained": count})]
        saved = [checkpoint(1, 1, 1, loop=loop)]
        return RunRecords([AttemptRecords(1, {"step": 0}, lines, steps(1, 1), saved)], GROUP)

    assert audit(run(GROUP + 2, "mine:Loop")).clean
    assert not audit(run(GROUP - 1, "mine:Loop")).clean
    assert not audit(run(GROUP + 2, "slipstream.rollout.loop:AsyncRolloutLoop")).clean


def test_lines_alone() -> None:
    lines = [{"epoch": 0, "prompt": p} for p in (0, 1, 1, 2)] + [{"epoch": 1, "prompt": p} for p in (0, 2)]
    assert [str(finding) for finding in check_lines(lines, 3, 2)] == [
        "settled twice: epoch 0, prompt 1, by attempt ? at step ?; attempt ? at step ?",
        "never settled: epoch 1, prompt 1",
    ]
    assert check_lines(lines[:2], 3) == [], "without whole epochs only doubles are faults"


def test_ranges_in_words() -> None:
    assert ranges([3, 1, 2, 7]) == "1-3, 7"
    assert ranges(range(0, 40, 2), most=2) == "0, 2 and 18 more"
