"""Runs that a worker started, and what becomes of them when worker, flow or Prefect die: real ones, with stand-ins of models."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from slipstream.run_folder import read_json, read_jsonl
from tasks.lease import newest_term
from tasks.origin import read_origin
from tests.front_runs import INSTANCE, Front
from tests.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    found = Front(tmp_path_factory.mktemp("front"))
    try:
        yield found.start()
    finally:
        found.close()


def acts(rows: list[dict[str, Any]]) -> list[str]:
    return [row["act"] for row in rows]


def now() -> str:
    return datetime.now(UTC).isoformat()


def test_a_killed_flow_is_started_again_by_itself(front: Front) -> None:
    """No hook runs in a process that is killed, and its jobs inherit none of its output: the worker sees it die."""
    flow, run = front.submit("killed")
    front.training(run)
    assert read_origin(run).flow_run == flow
    assert read_origin(run).deployment == front.deployment
    assert read_origin(run).instance == INSTANCE
    assert run.run_id in front.flow_run(flow)["name"]
    assert "nothing" in acts(front.reconcile()[run.run_id])
    jobs = run.assignment()
    front.kill_leader(run)
    front.wait_state(flow, "CRASHED")
    assert len(front.processes(run)) >= 6
    planned = front.reconcile("--dry-run")[run.run_id]
    assert acts(planned) == ["start its flow run again"]
    assert front.state(flow) == "CRASHED"
    front.reconcile()
    front.wait_state(flow, "RUNNING")
    wait_until(lambda: front.leader(run) is not None, "the second start leads")
    front.go(run)
    ended = front.wait_state(flow, "COMPLETED")
    assert ended["run_count"] == 2
    assert (run.attempts(), run.assignment(), front.processes(run)) == ([1], jobs, [])
    tasks = front.call("POST", "task_runs/filter", {"flow_runs": {"id": {"any_": [flow]}}})
    assert {task["state"]["name"] for task in tasks if task["name"].startswith("supervise")} <= {
        "Completed",
        "Crashed",
        "Running",
    }
    assert front.reconcile().get(run.run_id, [{"act": "nothing"}])[-1]["act"] == "nothing"
    assert run.run_id not in front.reconcile(), "a settled run is not looked at again"
