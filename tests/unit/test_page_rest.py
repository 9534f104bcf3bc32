"""What reconciliation shows and removes on a Prefect server, without prefect."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.decide import Kind
from flows.page.rest import RestPage, show_end
from flows.prefect_rest import FlowRun, PrefectAway, PrefectRest
from slipstream.run_folder import RunFolder
from slipstream.sweep.spec import parse_sweep
from tasks.outcome import Outcome, write_outcome
from tasks.sweep_folder import SweepFolder
from tasks.sweep_prepare import create, resolve

FLOW = FlowRun("f00d", "FAILED", called="s-1", tags=("slipstream",))
BASE = '[model]\nname = "m"\n[data]\nsource = "d"\n[storage]\nroot = "{root}"\n'


class Rest(PrefectRest):
    """Keeps artifacts and events; `status`: what it answers to each call, 0 for none."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9/api")
        self.artifacts: dict[str, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.calls: list[tuple[str, str, Any]] = []
        self.status = 0

    def call(self, method: str, route: str, body: Any = None) -> Any:
        self.calls.append((method, route, body))
        if self.status:
            away = PrefectAway(f"it answers {self.status}")
            away.status = self.status
            raise away
        match method, route:
            case "POST", "artifacts/filter":
                return list(self.artifacts.values())
            case "POST", "artifacts/":
                own = f"a{len(self.artifacts)}"
                self.artifacts[own] = {**body, "id": own, "created": "2026-01-01"}
                return {"id": own}
            case "PATCH", _:
                self.artifacts[route.partition("/")[2]] |= body
            case "POST", "events":
                self.events += body
            case "POST", "flow_runs/filter":
                return [{"id": "old"}, {"id": "older"}]
        return None


@pytest.fixture
def sweep(tmp_path: Path) -> SweepFolder:
    (tmp_path / "b.toml").write_text(BASE.format(root=tmp_path / "runs"))
    spec = parse_sweep({"name": "s", "base": "b.toml", "axes": {"trainer.seed": [1, 2]}})
    return create(resolve(spec, tmp_path, {}), "s-1")


@pytest.mark.parametrize(("kind", "told"), [(Kind.FAIL, ["slipstream.sweep.finished"]), (Kind.CANCELLED, [])])
def test_the_end_of_a_sweep(sweep: SweepFolder, kind: Kind, told: list[str]) -> None:
    rest = Rest()
    write_outcome(sweep.as_run, Outcome(kind, "enough"), 0)
    assert show_end(rest, sweep.as_run, FLOW)
    assert show_end(rest, sweep.as_run, FLOW)
    (table,) = rest.artifacts.values()
    assert table["key"] == "sweep-table"
    assert "c01" in table["data"]
    assert [event["event"] for event in rest.events] == told * 2
    assert len({event["id"] for event in rest.events}) == len(told), "of one id the server keeps one"


def test_the_end_of_a_run(tmp_path: Path) -> None:
    rest, run = Rest(), RunFolder.create(tmp_path, "r")
    run.begin_attempt(None, 0)
    write_outcome(run, Outcome(Kind.CANCELLED, "anna: enough"), 1)
    assert show_end(rest, run, FLOW)
    assert "slipstream.cancelled" in {event["event"] for event in rest.events}
    assert "anna: enough" in next(one for one in rest.artifacts.values() if one["key"] == "slipstream-run")["data"]


def test_a_server_that_is_away_costs_nothing(sweep: SweepFolder, tmp_path: Path) -> None:
    rest = Rest()
    rest.status = 500
    write_outcome(sweep.as_run, Outcome(Kind.FAIL, "enough"), 0)
    assert not show_end(rest, sweep.as_run, FLOW)
    assert not show_end(rest, RunFolder.create(tmp_path, "r"), FLOW)
    with pytest.raises(PrefectAway):
        RestPage(rest).update("a0", "", "")
    rest.status = 404
    assert not RestPage(rest).update("a0", "", "")


def test_which_flow_runs_go() -> None:
    rest = Rest()
    assert rest.remove_ended("d0", "Uneventful", keep=10, most=50) == 2
    (_, _, body), *deleted = rest.calls
    assert (body["offset"], body["limit"]) == (10, 50)
    assert body["flow_runs"]["deployment_id"] == {"any_": ["d0"]}
    assert body["flow_runs"]["state"] == {"type": {"any_": ["COMPLETED"]}, "name": {"any_": ["Uneventful"]}}
    assert [call[:2] for call in deleted] == [("DELETE", "flow_runs/old"), ("DELETE", "flow_runs/older")]


def test_neither_needs_prefect() -> None:
    script = "import sys, flows.reconciliation; assert 'matplotlib' not in sys.modules, 'light'\n"
    script += "import flows.page.rest; sys.exit('prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
