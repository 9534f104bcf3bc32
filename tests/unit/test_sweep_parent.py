"""A sweep whose driver is dead, as reconciliation sees it, and what its cancel means to its cells."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.decide import Kind
from slipstream.run_folder import RunFolder, read_json, write_json
from slipstream.sweep.spec import parse_sweep
from tasks.observe import cancel_request
from tasks.origin import origin_file, origin_here, write_origin
from tasks.outcome import Outcome, read_outcome, write_outcome
from tasks.reconcile import Memory, do, look
from tasks.reconcile_policy import Act, reconcile
from tasks.records import forgive
from tasks.stop import request_cancel
from tasks.sweep_folder import SweepFolder
from tasks.sweep_parent import progress, sweep_cancelled
from tasks.sweep_prepare import create, resolve

BASE = '[model]\nname = "m"\n[data]\nsource = "d"\n[storage]\nroot = "{root}"\n[recovery]\nmax_restarts = 7\n'


@pytest.fixture(autouse=True)
def instance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_INSTANCE", "me")
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tasks.reconcile.finish", lambda run: None)


@pytest.fixture
def sweep(tmp_path: Path) -> SweepFolder:
    (tmp_path / "b.toml").write_text(BASE.format(root=tmp_path / "runs"))
    spec = parse_sweep({"name": "s", "base": "b.toml", "axes": {"trainer.seed": [1, 2, 3]}})
    return create(resolve(spec, tmp_path, {}), "s")


def begun(sweep: SweepFolder, cell: str, step: int = 0) -> RunFolder:
    run = RunFolder.create(sweep.path.parent, sweep.run_id(cell))
    write_origin(run, origin_here(sweep=sweep.sweep_id))
    run.run_file.write_text(sweep.config_file(cell).read_text())
    run.begin_attempt(None, 0)
    write_json(run.heartbeat_file("learner"), {"attempt": 1, "step": step})
    return run


def acts(run: RunFolder, memory: Memory) -> list[str]:
    """As one pass does, without Prefect."""
    found = []
    while (plan := reconcile((seen := look(run, memory)).facts)).act is not Act.NOTHING:
        found.append(str(plan.act.name))
        if plan.act is Act.LEAD_HERE:
            break
        assert do(seen, plan)
    return found


def test_its_progress_is_that_of_its_cells(sweep: SweepFolder) -> None:
    assert progress(sweep) == 0
    first, second = begun(sweep, "c00", 3), begun(sweep, "c01", 2)
    assert progress(sweep) == 5
    write_outcome(first, Outcome(Kind.FINISH, "done"), 1)
    assert progress(sweep) == 6
    (second.path / "outcome.json").write_text("{torn")
    assert progress(sweep) == 4, "a damaged cell hides no other"


def test_a_stranded_one_is_seen_whole(sweep: SweepFolder, tmp_path: Path) -> None:
    begun(sweep, "c00", 3)
    found = look(sweep.as_run, Memory(tmp_path))
    assert (found.facts.prepared, found.facts.max_leads, found.step) == (True, 7, 3)
    assert (found.facts.cells, found.facts.unasked, found.facts.elsewhere) == (("c00",), ("c00",), "")
    assert acts(sweep.as_run, Memory(tmp_path)) == ["LEAD_HERE"]


@pytest.mark.parametrize(("flow_run", "elsewhere"), [("", "n7"), ("f00d", "")])
def test_commands_of_another_host_cannot_be_led_here(
    sweep: SweepFolder, tmp_path: Path, flow_run: str, elsewhere: str
) -> None:
    origin: dict[str, Any] = json.loads(origin_file(sweep.as_run).read_text())
    write_json(origin_file(sweep.as_run), {**origin, "host": "n7", "flow_run": flow_run})
    assert look(sweep.as_run, Memory(tmp_path)).facts.elsewhere == elsewhere


def test_a_cancel_ends_its_cells_first(sweep: SweepFolder, tmp_path: Path) -> None:
    run, finished = begun(sweep, "c00"), begun(sweep, "c01")
    write_outcome(finished, Outcome(Kind.FINISH, "done"), 1)
    request_cancel(sweep.as_run, "anna", "enough")
    memory = Memory(tmp_path)
    assert acts(sweep.as_run, memory) == ["ASK_CELLS"]
    assert (cancel_request(run), cancel_request(finished)) == ("sweep s: anna: enough", "")
    assert sweep.outcome() == {}
    assert acts(run, memory) == ["CANCEL"]
    assert acts(sweep.as_run, memory) == ["CANCEL"]
    assert (sweep.outcome()["kind"], sweep.outcome()["reason"]) == ("cancelled", "anna: enough")
    assert acts(sweep.as_run, memory) == []


def test_a_cell_that_its_sweep_did_not_reach_is_not_led(sweep: SweepFolder, tmp_path: Path) -> None:
    """It was being prepared when the sweep was cancelled."""
    request_cancel(sweep.as_run, "anna", "enough")
    write_outcome(sweep.as_run, Outcome(Kind.CANCELLED, "anna: enough"), 0)
    run = begun(sweep, "c02")
    assert acts(run, Memory(tmp_path)) == ["CANCEL"]
    assert (
        read_json(
            run.cancel_file,
        )["who"]
        == "sweep s"
    )  # type: ignore[index]
    ended = read_outcome(run)
    assert ended is not None
    assert ended.reason == "sweep s: anna: enough"


def test_what_a_cancelled_sweep_means_to_a_cell(sweep: SweepFolder) -> None:
    run = begun(sweep, "c00")
    assert sweep_cancelled(run, "s") == sweep_cancelled(run, "") == sweep_cancelled(run, "gone") == ""
    write_outcome(sweep.as_run, Outcome(Kind.FINISH, "all have ended"), 0)
    assert sweep_cancelled(run, "s") == ""
    write_outcome(sweep.as_run, Outcome(Kind.CANCELLED, "interrupted"), 0)
    assert sweep_cancelled(run, "s") == "interrupted"
    request_cancel(sweep.as_run, "anna", "enough")
    assert sweep_cancelled(run, "s") == "anna: enough"
    forgive(run, 2)
    assert sweep_cancelled(run, "s") == "", "a person has resumed it since"
