"""The recovery table: one fault at a time, the real supervisor on a real SLURM, doubles of learner and server."""

import sys

import pytest

from slurm.bed import Bed
from tests.chaos.drive import run_scenario
from tests.chaos.faults import ONE, SEPARATE
from tests.chaos.plan import scenario_of

pytestmark = [pytest.mark.slurm, pytest.mark.integration]

ROWS = [
    ("server process killed", SEPARATE),
    ("server node loses power", SEPARATE),
    ("learner node loses power", ONE),
    ("rollout process killed", SEPARATE),
    ("rollout process stopped", ONE),
    ("rank killed", SEPARATE),
    ("rank stopped", SEPARATE),
    ("collective stuck", ONE),
    ("learner node loses power", SEPARATE),
    ("learner node drained, then a rank killed", SEPARATE),
    ("short partition of the learner", SEPARATE),
    ("long partition of the learner", SEPARATE),
    ("time limit of the learner", SEPARATE),
    ("preemption of the learner", SEPARATE),
    ("supervisor killed", SEPARATE),
    ("supervisor stopped longer than its lease", SEPARATE),
    ("supervisor killed before its record", SEPARATE),
    ("controller away", SEPARATE),
    ("accounting away", SEPARATE),
    ("slurmd restarted", SEPARATE),
    ("killed during a save", SEPARATE),
    ("checkpoint truncated", SEPARATE),
    ("storage full", SEPARATE),
    ("over quota", SEPARATE),
    ("storage runs full", None),
    ("storage refuses writes", None),
    ("cancelled by a person", SEPARATE),
    ("job cancelled by a person", SEPARATE),
    ("reward that always raises", SEPARATE),
]


@pytest.mark.parametrize(("fault", "shape"), ROWS, ids=lambda value: str(value).replace(" ", "-"))
def test_recovery(bed: Bed, fault: str, shape: str | None) -> None:
    """The end state, the audit, and that no process or job is left; see `tests.chaos.checks`."""
    result = run_scenario(bed, scenario_of(fault, shape))
    ended = f"ended after {result.ended_after_s} s, load {result.load}" if result.ended_after_s is not None else "ended"
    print(f"{fault}: {result.recovery_s or ended}", file=sys.stderr)
    assert result.met == [fault]
    assert result.problems == []


@pytest.mark.parametrize(
    ("fault", "second"),
    [("rank 0 killed", " + "), ("server node loses power", "cancelled by a person while it recovers")],
)
def test_a_second_fault_while_it_recovers(bed: Bed, fault: str, second: str) -> None:
    result = run_scenario(bed, scenario_of(fault, second=second))
    assert result.met
    assert result.problems == []
