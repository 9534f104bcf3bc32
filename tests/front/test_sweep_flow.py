"""Sweeps on a real Prefect server: a parent in a pool of its own, a cell a flow run, what a person sees and may do."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.local_jobs import job_processes
from flows.names import care_pool, runs_pool
from slipstream.run_folder import RunFolder, read_json
from tasks.leads import read_leads
from tasks.stored import all_jobs
from tasks.sweep_folder import SweepFolder
from tests.doubles.sweep import go_on, hold, is_held
from tests.front_door import INSTANCE, Front, flow_processes, kill
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

DEPLOYMENT = f"sweep/{INSTANCE}.sweep"
CELLS_S = 600.0


def form(front: Front, **more: Any) -> dict[str, Any]:
    return {"name": "s", "base": str(front.preset), "max_staleness": [4, 8], "metric": "reward", **more}


def begin(front: Front, **more: Any) -> tuple[str, SweepFolder]:
    """Submit the form; the flow run and its sweep folder once it is there."""
    flow_run = front.submit(DEPLOYMENT, settings=form(front, **more))
    folder = SweepFolder(front.root / f"{more.get('name', 's')}-{flow_run.replace('-', '')[-12:]}")

    def there() -> bool:
        state = front.flow_run(flow_run)["state"]
        assert state["type"] not in ("FAILED", "CRASHED"), state
        return folder.sweep_file.exists()

    wait_until(there, "the sweep's folder is there", CELLS_S)
    return flow_run, folder


def cell_runs(front: Front, sweep: SweepFolder) -> list[dict[str, Any]]:
    tags = {"tags": {"all_": [f"slipstream.sweep:{sweep.sweep_id}"]}}
    return list(front.ask("POST", "flow_runs/filter", {"flow_runs": tags, "sort": "EXPECTED_START_TIME_ASC"}))


def ended_runs(front: Front, sweep: SweepFolder) -> list[dict[str, Any]]:
    """The cells' flow runs once each has told Prefect its end, which a sweep reads off the run folders a little earlier."""
    for run in cell_runs(front, sweep):
        front.wait_state(run["id"], seconds=CELLS_S)
    return cell_runs(front, sweep)


def reconcile_until(front: Front, there: Callable[[], Any], what: str) -> None:
    """Again and again, as its timer does."""

    def done() -> bool:
        front.command("reconcile")
        return bool(there())

    wait_until(done, what, CELLS_S)


def events_of(front: Front, run: RunFolder) -> set[str]:
    wanted = {"filter": {"resource": {"id": [f"slipstream.run.{run.run_id}"]}}}
    return {event["event"] for event in front.ask("POST", "events/filter", wanted)["events"]}


def artifacts(front: Front, flow_run: str) -> dict[str, dict[str, Any]]:
    """By key; of no key there are two."""
    found = front.ask("POST", "artifacts/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
    assert len({one["key"] for one in found}) == len(found)
    return {one["key"]: one for one in found}


def flow_process(front: Front, flow_run: str) -> int | None:
    for pid in flow_processes(front.home):
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"PREFECT__FLOW_RUN_ID={flow_run}".encode() in words:
            return pid
    return None


def test_two_by_two_cells_are_flow_runs_of_their_own_and_the_page_has_their_numbers(front: Front) -> None:
    flow_run, sweep = begin(
        front, name="grid", token_budget=[64, 128], cells_at_once=2, settings=["data.shuffle = false"]
    )
    ended = front.wait_state(flow_run, seconds=CELLS_S)
    assert ended["state"]["type"] == "COMPLETED", ended["state"]
    assert ended["name"] == sweep.sweep_id
    assert ended["state"]["message"].startswith("4 of 4 cells have finished")
    runs = ended_runs(front, sweep)
    assert [run["state"]["type"] for run in runs] == ["COMPLETED"] * 4
    assert {run["name"] for run in runs} == {sweep.run_id(f"c0{n}") for n in range(4)}
    parents = {run["parent_task_run_id"] for run in runs}
    assert len(parents) == 4
    assert None not in parents
    for run in runs:
        assert set(run["tags"]) >= {"slipstream", f"slipstream:{INSTANCE}"}
        origin = read_json(front.root / run["name"] / "origin.json") or {}
        assert (origin["flow_run"], origin["sweep"]) == (run["id"], sweep.sweep_id)
    shown = artifacts(front, flow_run)
    table = shown["sweep-table"]["data"]
    assert "| cell | max_staleness | token_budget |" in table
    assert table.count("| finished |") == 4
    assert shown["sweep-pictures"]["data"].count("](data:image/png;base64,") == 5
    assert sweep.report_file.exists()
    assert "token_budget = " in (sweep.path / "best.toml").read_text()

    def event() -> list[Any]:
        wanted = {"filter": {"event": {"name": ["slipstream.sweep.finished"]}}}
        return list(front.ask("POST", "events/filter", wanted)["events"])

    (found,) = wait_until(event, "the event of the sweep's end")
    assert found["payload"]["states"] == {"finished": 4}
    assert f"prefect.flow-run.{flow_run}" in {related["prefect.resource.id"] for related in found["related"]}


def test_a_killed_parent_is_started_again_and_no_cell_is_run_twice(front: Front, tmp_path: Path) -> None:
    """Nor is one whose flow dies before it has a folder: it is the same flow run that is started again.

    By then the sweep's base may be gone.
    """
    hold(front.root, 3)
    base = Path(shutil.copy(front.preset, tmp_path / "base.toml"))
    flow_run, sweep = begin(front, name="killed", base=str(base))
    base.unlink()
    front.die_in_prepare("quick")  # the parent has looked at its cells by now
    wait_until(lambda: is_held(sweep.run("c00")), "the first cell trains", CELLS_S)
    pid = flow_process(front, flow_run)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    go_on(front.root)
    reconcile_until(front, lambda: read_leads(sweep.as_run), "its flow run is asked to start again")
    ended = front.wait_state(flow_run, "COMPLETED", seconds=CELLS_S)
    assert ended["run_count"] >= 2
    assert {lead.flow_run for lead in read_leads(sweep.as_run)} == {flow_run}
    runs = ended_runs(front, sweep)
    assert [run["state"]["type"] for run in runs] == ["COMPLETED"] * 2
    assert [run["run_count"] for run in runs] == [2, 1]
    assert [sweep.run(cell).attempts() for cell in ("c00", "c01")] == [[1], [1]]
    assert sweep.outcome()["kind"] == "finish"
    assert set(artifacts(front, flow_run)) == {"sweep-table", "sweep-pictures"}


def test_a_cancelled_parent_takes_its_cells_with_it_and_a_retry_goes_on(front: Front) -> None:
    hold(front.root, 5)
    flow_run, sweep = begin(front, name="cancelled")
    wait_until(lambda: is_held(sweep.run("c00")), "the first cell trains", CELLS_S)
    front.ask("POST", f"flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING"}})
    ended = front.wait_state(flow_run, seconds=CELLS_S)
    assert ended["state"]["type"] == "CANCELLED", ended["state"]
    run = sweep.run("c00")
    (cell,) = cell_runs(front, sweep)
    assert front.wait_state(cell["id"])["state"]["type"] == "CANCELLED"
    assert (read_json(run.path / "outcome.json") or {})["kind"] == "cancelled"
    assert not [process for job in all_jobs(run) for process in job_processes(job)]
    assert not sweep.run("c01").path.exists()
    go_on(front.root)
    state = {"type": "SCHEDULED", "name": "AwaitingRetry"}
    front.ask("POST", f"flow_runs/{flow_run}/set_state", {"state": state, "force": True})
    wait_until(lambda: sweep.outcome().get("kind") == "finish", "the sweep is done", CELLS_S)
    assert [(read_json(sweep.run(c).path / "outcome.json") or {})["kind"] for c in ("c00", "c01")] == ["finish"] * 2
    assert sweep.run("c00").attempts() == [1, 2]


def test_a_cancel_reaches_a_sweep_whose_workers_and_flows_are_dead(front: Front) -> None:
    """Its cell ends first, then the sweep; both pages show it. A cell that waited in the queue does not begin."""
    hold(front.root, 3)
    flow_run, sweep = begin(front, name="orphaned")
    run = sweep.run("c00")
    wait_until(lambda: is_held(run), "the first cell trains", CELLS_S)
    (cell,) = cell_runs(front, sweep)
    assert front.process is not None
    workers = [
        one.pid
        for one in psutil.Process(front.process.pid).children()
        if one.cmdline()[-1] in (runs_pool(INSTANCE), care_pool(INSTANCE))
    ]
    assert len(workers) == 2
    for pid in [*workers, *flow_processes(front.home)]:
        kill(pid)
    assert [process for job in all_jobs(run) for process in job_processes(job)]
    front.ask("POST", f"flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING"}})
    reconcile_until(front, lambda: sweep.outcome(), "the sweep has ended")
    assert sweep.outcome()["kind"] == "cancelled"
    assert (read_json(run.path / "outcome.json") or {})["kind"] == "cancelled"
    assert (read_json(run.cancel_file) or {})["who"] == f"sweep {sweep.sweep_id}"
    assert not [process for job in all_jobs(run) for process in job_processes(job)]
    assert not sweep.run("c01").path.exists()
    assert front.wait_state(flow_run)["state"]["type"] == "CANCELLED"
    assert "sweep-table" in artifacts(front, flow_run)
    reconcile_until(front, lambda: front.state(cell["id"]) == "CANCELLED", "Prefect is told of the cell")
    wait_until(lambda: "slipstream.cancelled" in events_of(front, run), "the event of the cell's end", CELLS_S)
    assert "cancelled" in artifacts(front, cell["id"])["slipstream-run"]["data"].lower()
    assert not read_leads(run)

    go_on(front.root)
    deployment = front.find_deployment(f"train/{INSTANCE}.custom")
    body = {
        "parameters": {"config": sweep.config("c01").to_plain(), "run_id": sweep.run_id("c01")},
        "tags": [f"slipstream.sweep:{sweep.sweep_id}"],
        "state": {"type": "SCHEDULED"},
    }
    queued = front.ask("POST", f"deployments/{deployment['id']}/create_flow_run", body)["id"]
    state = front.wait_state(queued, seconds=CELLS_S)["state"]
    assert state["type"] == "CANCELLED"
    assert "was cancelled before this cell began" in state["message"]
    assert not sweep.run("c01").path.exists()


def test_a_form_that_no_run_can_be_made_of_is_refused_with_the_reason(front: Front) -> None:
    wrong = form(front, name="wrong", more_axes=["trainer.max_stale = 1", "trainer.top_p = 2.0"])
    ended = front.wait_state(front.submit(DEPLOYMENT, settings=wrong))
    assert ended["state"]["type"] == "FAILED"
    assert "axes.trainer.max_stale = [1]: unknown key; did you mean trainer.max_staleness?" in ended["state"]["message"]
    assert not list(front.root.glob("wrong-*"))


def test_the_command_line_starts_it_there(front: Front, tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(f'name = "cli"\nbase = "{front.preset}"\nmetric = "reward"\n[axes]\n"trainer.seed" = [1]\n')
    done = front.command("sweep", str(file), "--prefect", "--set", "trainer.max_staleness=3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{front.url}/runs/flow-run/" in done.stdout
    flow_run = done.stdout.strip().rpartition("/")[2]
    assert front.wait_state(flow_run, seconds=CELLS_S)["state"]["type"] == "COMPLETED"
    (folder,) = front.root.glob("cli-*/sweep.toml")
    sweep = SweepFolder(folder.parent)
    assert sweep.config("c00").trainer.max_staleness == 3
    assert front.command("report", sweep.sweep_id, "--root", str(front.root)).stdout == f"{sweep.report_file}\n"
