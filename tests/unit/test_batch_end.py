"""Whether a run inside an sbatch job has ended, and with which code."""

from typing import Any

import pytest

from cluster.decide import Kind
from cluster.recovery import LEFT, NODE, PREEMPTED, Fault
from slipstream.config_file import parse_config
from tasks.batch import wrong_shape
from tasks.batch_end import judge, restarted

CRASHED = {"returncode": 3, "reason": "out of luck"}
LEAVES = {"returncode": 0, "left": 7}


def end(code: int, record: dict | None = None, **changes: Any) -> Any:
    given = {
        "result": False,
        "cancel": "",
        "state": "RUNNING",
        "preempted": False,
        "time_up": False,
        "nodes_answer": True,
    }
    return judge(code, record or {}, **{**given, **changes})


@pytest.mark.parametrize(
    ("ended", "kind", "code", "requeue"),
    [
        (end(0, {"returncode": 0}, result=True, cancel="late"), Kind.FINISH, 0, ""),
        (end(143, CRASHED, cancel="me: enough"), Kind.CANCELLED, 130, ""),
        (end(143, state="CANCELLED"), Kind.CANCELLED, 130, ""),
        (end(143, state="TIMEOUT"), Kind.FAIL, 1, ""),
        (end(143, state="COMPLETING"), None, 1, ""),
        (end(0, LEAVES, time_up=True), None, 0, LEFT),
        (end(0, LEAVES, preempted=True), None, 0, PREEMPTED),
        (end(0, LEAVES), Kind.CANCELLED, 130, ""),  # a person's signal
        (end(0, LEAVES, time_up=True, state="CANCELLED"), Kind.CANCELLED, 130, ""),  # no requeue brings it back
        (end(0), Kind.FAIL, 1, ""),
        (end(1, CRASHED), Kind.FAIL, 3, ""),
        (end(1, CRASHED, nodes_answer=False), None, 1, NODE),
        (end(1, {**CRASHED, "final": True}, nodes_answer=False), Kind.FAIL, 3, ""),
        (end(137), Kind.FAIL, 137, ""),
    ],
)
def test_what_the_end_of_an_attempt_means(ended: Any, kind: Kind | None, code: int, requeue: str) -> None:
    assert (ended.kind, ended.code, ended.requeue) == (kind, code, requeue)


def fault(step: int, job: str) -> Fault:
    return Fault(1.0, 1, "allocation", "", step, job=job)


def test_restarts_without_progress_are_bounded() -> None:
    faults: list[Fault] = []
    for number in range(3):
        found = restarted(fault(4, f"j{number}"), {}, faults, max_restarts=3)
        assert found.given_up == ""
        faults.append(found.fault)
    assert "4 strikes" in restarted(fault(4, "j3"), {}, faults, 3).given_up
    assert restarted(fault(5, "j3"), {}, faults, 3).given_up == ""  # a new step


def test_a_fault_that_is_on_record_counts_once() -> None:
    known = restarted(fault(4, "j0"), {"left": 4}, [], 1).fault
    assert known.kind == LEFT
    assert restarted(fault(4, "j0"), {"left": 4}, [known], 1).given_up == ""
    assert restarted(fault(4, "j1"), {"left": 4}, [known], 1).given_up


def test_an_allocation_that_does_not_fit() -> None:
    config = parse_config(
        {
            "model": {"name": "m"},
            "data": {"source": "d"},
            "server": {"gpus": 2, "tensor_parallel_size": 2},
            "learner": {"nodes": 2, "gpus": 1},
        }
    )
    assert wrong_shape(config, 3, 2) == ""
    assert "sbatch --nodes=3" in wrong_shape(config, 2, 2)
    assert "--gpus-per-node=2" in wrong_shape(config, 3, 1)
