"""The driver of a sweep on this machine: real runs of the doubles, killed drivers, failed cells, budgets, two at once."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.local_jobs import job_processes
from flows.reconciliation import supervise_detached
from slipstream.config_file import load_config
from slipstream.run_folder import read_json, write_json
from slipstream.sweep.schedule import Phase
from tasks.lease import sight
from tasks.outcome import NothingToResume
from tasks.stop import stop
from tasks.stored import all_jobs
from tasks.sweep import Look, SweepStopped, drive
from tasks.sweep_cells import LocalCells
from tasks.sweep_folder import SweepFolder
from tasks.sweep_stop import stop_sweep
from tests.doubles.events import PLAN
from tests.doubles.sweep import COMMAND, POLL_S, go_on, hold, is_held, make_sweep, remove_processes, write_base
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
SEEDS = {"trainer.seed": [0, 1]}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with base.toml; every process of the runs in it is gone afterwards."""
    write_base(tmp_path)
    yield tmp_path
    remove_processes(tmp_path / "runs")


def cells(sweep: SweepFolder) -> LocalCells:
    return LocalCells(sweep, COMMAND)


def states(look: Look) -> dict[str, str]:
    return {result.id: result.state for result in look.results}


def driver(sweep: SweepFolder, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.doubles.sweep", str(sweep.path), *flags]
    with open(sweep.path / "driver.log", "ab") as out:
        return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def at_once(sweep: SweepFolder) -> int:
    """Most cells that a driver saw active at the same time."""
    lines = (sweep.path / "driver.log").read_text().splitlines()
    return max(int(line.split()[-1]) for line in lines if line.startswith("c0"))


def steps_of(sweep: SweepFolder, cell: str) -> int:
    return max((int(line["step"]) for line in sweep.run(cell).merged_records("metrics.jsonl")), default=0)


def assert_whole(sweep: SweepFolder, cell: str, attempts: list[int]) -> None:
    """The cell has finished, no step is missing or in two, and nothing of it runs."""
    run = sweep.run(cell)
    assert (read_json(run.path / "outcome.json") or {})["kind"] == "finish"
    assert run.attempts() == attempts
    steps = [line["step"] for line in run.merged_records("metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert not [process for job in all_jobs(run) for process in job_processes(job)]


def test_a_killed_driver_is_followed_by_another_and_no_cell_is_run_twice(folder: Path) -> None:
    sweep = make_sweep(folder, {"trainer.seed": [0, 1, 2]}, cells_at_once=2)
    hold(folder / "runs", 3)
    first = driver(sweep)
    try:
        wait_until(lambda: is_held(sweep.run("c00")) and is_held(sweep.run("c01")), "two cells train")
        with pytest.raises(NothingToResume, match="is running"):
            drive(sweep, cells(sweep), poll_s=POLL_S)
    finally:
        first.kill()
        first.wait()
    assert not sweep.run("c02").path.exists()
    go_on(folder / "runs")
    second = driver(sweep)
    try:
        assert second.wait(180) == 0, (sweep.path / "driver.log").read_text()
    finally:
        second.kill()
    for cell in ("c00", "c01", "c02"):
        assert_whole(sweep, cell, [1])
        assert sweep.notes()[cell].starts == (0 if cell != "c02" else 1)
    assert at_once(sweep) == 2
    assert (sweep.outcome()["kind"], sweep.report_file.exists()) == ("finish", True)
    assert {path.name for path in sweep.path.glob("*.png")} == {
        "tokens_per_s.png", "staleness.png", "reward.png", "pareto.png", "time_to_reward.png",
    }  # fmt: skip
    best = load_config(sweep.path / "best.toml")
    assert (best.name, best.storage.root) == ("double", str(folder / "runs"))
    logs = {cell: sweep.log_file(cell).stat().st_size for cell in ("c00", "c01", "c02")}
    look = drive(sweep, cells(sweep), retry_failed=True, poll_s=POLL_S)
    assert set(states(look).values()) == {"finished"}
    assert logs == {cell: sweep.log_file(cell).stat().st_size for cell in logs}, "something was started again"


def test_what_reconciliation_starts_goes_on_with_a_stranded_sweep(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with one that a flow run has driven, which a person is told to retry there."""
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    sweep = make_sweep(folder, {"trainer.seed": [0]})
    write_json(sweep.path / "origin.json", {**(read_json(sweep.path / "origin.json") or {}), "flow_run": "f00d"})
    hold(folder / "runs", 3)
    first = driver(sweep)
    try:
        wait_until(lambda: is_held(sweep.run("c00")), "the cell trains")
    finally:
        first.kill()
        first.wait()
    second = psutil.Process(supervise_detached(sweep.as_run))
    try:
        wait_until(lambda: sight(sweep.as_run).term == 2, "another driver leads")
        go_on(folder / "runs")
        wait_until(lambda: sweep.outcome().get("kind") == "finish", "the sweep is done")
        with contextlib.suppress(psutil.NoSuchProcess):
            second.wait(60)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            second.kill()
    assert_whole(sweep, "c00", [1])
    assert "c00" in (sweep.path / "logs" / "supervise.log").read_text()


def test_a_failed_cell_ends_nothing_and_is_tried_again_only_when_asked(folder: Path) -> None:
    sweep = make_sweep(folder, {"model.name": ["double", "refused", "double"][:2], **SEEDS}, cells_at_once=2)
    # the first cell's learner dies in its first attempt; cells with the other model cannot even start
    fault = {"id": "f", "event": "step", "where": {"step": 3, "attempt": 1}, "deeds": ["raise"], "always": True}
    write_json(folder / "runs" / PLAN, [fault])
    look = drive(sweep, cells(sweep), poll_s=POLL_S)
    assert states(look) == {"c00": "failed", "c01": "failed", "c02": "failed", "c03": "failed"}
    reasons = {result.id: result.reason for result in look.results}
    assert "injected at step" in reasons["c00"]
    assert "there is no such model" in reasons["c02"]
    assert not sweep.run("c02").path.exists()
    assert (sweep.outcome()["kind"], sweep.is_over()) == ("fail", True)
    again = drive(sweep, cells(sweep), poll_s=POLL_S)
    assert states(again) == states(look)
    assert sweep.run("c00").attempts() == [1]
    write_json(folder / "runs" / PLAN, [])
    for cell in ("c02", "c03"):
        config = sweep.config_file(cell)
        config.write_text(config.read_text().replace('"refused"', '"double"'))
    mended = drive(sweep, cells(sweep), retry_failed=True, poll_s=POLL_S)
    assert set(states(mended).values()) == {"finished"}
    assert_whole(sweep, "c00", [1, 2])
    assert_whole(sweep, "c02", [1])


class Interrupting:
    """Raises KeyboardInterrupt, as Ctrl-C does, once the condition holds."""

    def __init__(self, condition: Any) -> None:
        self.condition = condition

    def __call__(self, look: Look, _plan: Any) -> None:
        if self.condition is not None and self.condition(look):
            self.condition = None
            raise KeyboardInterrupt


def test_ctrl_c_stops_the_cells_and_the_next_call_continues_them(folder: Path) -> None:
    sweep = make_sweep(folder, SEEDS, cells_at_once=2)
    hold(folder / "runs", 5)
    # the second cell may not even have begun
    interrupt = Interrupting(lambda look: is_held(sweep.run("c00")))
    with pytest.raises(KeyboardInterrupt):
        drive(sweep, cells(sweep), tell=interrupt, poll_s=POLL_S)
    assert (read_json(sweep.run("c00").path / "outcome.json") or {})["kind"] == "cancelled"
    assert sweep.outcome()["kind"] == "cancelled"
    for cell in ("c00", "c01"):
        assert not [process for job in all_jobs(sweep.run(cell)) for process in job_processes(job)]
    go_on(folder / "runs")
    look = drive(sweep, cells(sweep), poll_s=POLL_S)
    assert states(look) == {"c00": "finished", "c01": "finished"}
    assert_whole(sweep, "c00", [1, 2])
    assert sweep.run("c00").fence(2)["step"] == 4, "it goes on from its newest checkpoint"


def test_a_budget_stops_the_sweep_and_a_larger_one_continues_it(folder: Path) -> None:
    sweep = make_sweep(folder, SEEDS, gpu_hours=1e-6)
    hold(folder / "runs", 2)
    look = drive(sweep, cells(sweep), poll_s=POLL_S)
    assert states(look) == {"c00": "stopped", "c01": "waiting"}
    assert "budget of 1e-06 GPU hours is spent" in look.results[0].reason
    assert look.results[0].gpu_hours > 1e-6
    assert (sweep.outcome()["left"], sweep.is_over(), sweep.run("c01").path.exists()) == (True, False, False)
    go_on(folder / "runs")
    sweep.write_spec(sweep.spec().model_copy(update={"gpu_hours": 100.0}))
    look = drive(sweep, cells(sweep), poll_s=POLL_S)
    assert states(look) == {"c00": "finished", "c01": "finished"}


def test_one_cell_can_be_stopped_alone_and_the_whole_sweep_from_outside(folder: Path) -> None:
    sweep = make_sweep(folder, {"trainer.seed": [0, 1, 2]}, cells_at_once=2)
    hold(folder / "runs", 2)
    seen: list[Look] = []

    def one_after_the_other() -> None:
        wait_until(lambda: is_held(sweep.run("c00")), "the first cell trains")
        stop(sweep.run("c00"), "anna", "this one is hopeless")
        wait_until(lambda: is_held(sweep.run("c02")), "the third cell takes its place")
        stop_sweep(sweep, "anna", "enough")

    acting = threading.Thread(target=one_after_the_other)
    acting.start()
    with pytest.raises(SweepStopped, match="anna: enough"):
        drive(sweep, cells(sweep), tell=lambda look, plan: seen.append(look), poll_s=POLL_S)
    acting.join(60)
    assert set(states(seen[-1]).values()) == {"stopped"}
    look = drive(sweep, cells(sweep), poll_s=POLL_S)
    assert states(look) == {"c00": "stopped", "c01": "finished", "c02": "finished"}
    assert look.states["c00"].phase is Phase.STOPPED
    assert look.results[0].reason == "anna: this one is hopeless"


def test_a_cell_whose_leader_was_killed_is_led_again(folder: Path) -> None:
    sweep = make_sweep(folder, {"trainer.seed": [0]})
    hold(folder / "runs", 2)
    killed: list[int] = []

    def kill_leader(look: Look, _plan: Any) -> None:
        if not killed and is_held(sweep.run("c00")):
            killed.append(sweep.notes()["c00"].pid)
            os.kill(killed[0], signal.SIGKILL)
            go_on(folder / "runs")

    look = drive(sweep, cells(sweep), tell=kill_leader, poll_s=POLL_S)
    assert states(look) == {"c00": "finished"}
    assert killed
    assert sweep.notes()["c00"].pid != killed[0]
    assert_whole(sweep, "c00", [1])


def test_a_hopeless_cell_is_stopped_early_and_not_continued(folder: Path) -> None:
    rates = {"trainer.learning_rate": [1e-6, 1e-7]}  # which the doubles' reward is in proportion to
    sweep = make_sweep(folder, rates, halving={"first_rung": 2, "factor": 2}, metric="reward")

    def hold_the_second(look: Look, _plan: Any) -> None:
        if states(look)["c00"] == "finished" and not sweep.run("c01").path.exists():
            hold(folder / "runs", 3)

    look = drive(sweep, cells(sweep), tell=hold_the_second, poll_s=POLL_S)
    assert states(look) == {"c00": "finished", "c01": "stopped early"}
    assert look.results[1].reason.startswith("place 2 of 2 at step 2 (0.019); the best 1 go on")
    assert 2 <= steps_of(sweep, "c01") < steps_of(sweep, "c00")
    log = sweep.log_file("c01").stat().st_size
    look = drive(sweep, cells(sweep), poll_s=POLL_S)
    assert (states(look)["c01"], sweep.log_file("c01").stat().st_size) == ("stopped early", log)
