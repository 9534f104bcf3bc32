"""The deployment of reconciliation: a flow run every minute, of which few are kept."""

import contextlib
from typing import Any

import psutil
import pytest

from flows.reconcile import KEPT, UNEVENTFUL
from flows.up.run import flow_processes as listed_processes
from tests.front_door import INSTANCE, Front, flow_processes
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

PATIENCE_S = 400
EXTRA = 4


def test_a_pass_that_did_nothing_removes_earlier_ones(front: Front) -> None:
    own = front.find_deployment(f"reconcile/{INSTANCE}.reconcile")["id"]
    others = front.find_deployment()["id"]

    def made(deployment: str, name: str) -> str:
        state = {"type": "COMPLETED", "name": name}
        return str(front.ask("POST", f"deployments/{deployment}/create_flow_run", {"state": state})["id"])

    def left() -> set[str]:
        found: list[dict[str, Any]] = front.ask(
            "POST", "flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
        )
        return {one["id"] for one in found}

    front.wait_passes(1)  # nearly a minute until the next
    eventful, another = made(own, "Completed"), made(others, UNEVENTFUL)
    quiet = {made(own, UNEVENTFUL) for _ in range(KEPT + EXTRA)}
    assert quiet | {eventful, another} <= left()
    wait_until(lambda: len(quiet & left()) <= KEPT, "a pass of the schedule has removed some", PATIENCE_S)
    now = left()
    assert {eventful, another} <= now
    assert len(quiet & now) >= KEPT - 2, "the newest stay"


def test_a_pass_is_no_run_to_whoever_ends_slipstream_up(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(front.home))

    def passes() -> set[int]:
        found = set()
        for pid in flow_processes(front.home):
            with contextlib.suppress(psutil.Error):
                if psutil.Process(pid).environ().get("PREFECT__FLOW_NAME") == "reconcile":
                    found.add(pid)
        return found

    def both() -> tuple[set[int], set[int]] | None:
        before = passes()
        listed = set(listed_processes())
        there = before & passes()
        return (there, listed) if there else None

    there, listed = wait_until(both, "a pass works", PATIENCE_S)
    assert not there & listed
