"""What a chaos run is judged by: roles started again, steps made again, how soon all ended after a cancel."""

from collections import Counter

import pytest

from tests.chaos.again import wrong_restarts
from tests.chaos.ending import late
from tests.chaos.faults import BY_NAME, FAULTS, ONE, SEPARATE
from tests.chaos.plan import plan, scenario_of


def judged(fault: str, shape: str = SEPARATE, redone: int = 0, **found: int) -> list[str]:
    return wrong_restarts(Counter(found), redone, scenario_of(fault, shape), [fault])


@pytest.mark.parametrize(
    ("fault", "right"),
    [
        ("server node loses power", {"server": 1}),
        ("rank stopped", {"learner": 1}),
        ("rollout process hangs", {}),
        ("supervisor killed before its record", {}),
        ("accounting away", {}),
        ("short partition of the learner", {}),
        ("preemption of the learner", {"server": 1, "learner": 1}),
        ("cancelled by a person", {}),
        ("storage full", {}),
        ("over quota", {}),
    ],
)
def test_one_fault_starts_again_what_the_table_says_and_nothing_else(fault: str, right: dict[str, int]) -> None:
    assert judged(fault, **right) == []
    for role in ("server", "learner"):
        assert judged(fault, **{**right, role: right.get(role, 0) + 1}), f"a needless start of the {role}"
    for role in right:
        assert judged(fault, **{other: count for other, count in right.items() if other != role}), (
            f"no start of the {role}"
        )


def test_one_allocation_starts_again_as_a_whole() -> None:
    assert judged("server process killed", ONE, allocation=1) == []
    assert judged("server process killed", ONE) == ["started again: nothing, not allocation"]
    assert judged("rollout process killed", ONE, allocation=1) == ["started again: 1 x allocation, not nothing"]


def test_a_fault_for_ever_is_bounded() -> None:
    fault = "reward that always raises"
    assert judged(fault, learner=3) == []
    assert judged(fault, learner=6) == ["started again: 6 x learner, not up to 5 x learner"]
    assert judged(fault, learner=3, server=1)


def test_steps_that_are_made_again() -> None:
    most = scenario_of("rank 0 killed", SEPARATE).save_steps
    assert judged("rank 0 killed", redone=most, learner=1) == []
    assert judged("rank 0 killed", redone=most + 1, learner=1) == [
        f"{most + 1} steps were made again, at most {most} had to be"
    ]
    assert judged("time limit of the learner", redone=1, learner=1) == ["1 steps were made again, at most 0 had to be"]
    assert judged("preemption of the learner", redone=1, learner=1, server=1)
    assert judged("server process killed", redone=1, server=1), "no step is lost"
    assert judged("long partition of the learner", redone=99, learner=1) == [], "the cut-off half's do not count"


def of_two(first: str, second: str, redone: int = 0, **found: int) -> list[str]:
    scenario = next(
        one for one in map(plan, range(FAULTS.index(BY_NAME[first]), 60_000, len(FAULTS)))
        if one.shape == SEPARATE and one.names == f"{first} + {second}"
    )  # fmt: skip
    return wrong_restarts(Counter(found), redone, scenario, [first, second])


def test_of_two_faults_only_what_neither_explains_is_wrong() -> None:
    assert of_two("supervisor killed", "rollout process killed", learner=1)
    assert of_two("supervisor killed", "rollout process killed") == []
    assert of_two("rank 0 killed", "server leader killed", server=1, learner=2) == []
    assert of_two("rank 0 killed", "server leader killed", server=1, learner=3)
    assert of_two("rank 0 killed", "supervisor killed", server=1, learner=1), "the server is kept"
    assert of_two("rank 0 killed", "server node loses power while it recovers", learner=2) == [], "it met the learner's"


def test_a_cancel_is_late_well_above_what_is_promised() -> None:
    assert late(None, 0.0, 1.0) == []
    assert late(14.9, 15.0, 1.0) == []
    assert late(15.1, 15.0, 1.0) == [
        "the last process ended 15.1 s after the cancel, not within 15 s (load 1.0 per core)"
    ]
    assert late(29.0, 15.0, 2.0) == []
    assert late(31.0, 15.0, 2.0)
