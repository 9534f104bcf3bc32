"""The driver of a sweep where storage or report fail it: the cells go on."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from cluster.decide import Kind
from slipstream.config_file import dump_config, load_config
from slipstream.run_folder import RunFolder
from slipstream.sweep.schedule import Phase, Plan
from tasks import sweep as driving
from tasks.outcome import Outcome, read_outcome, write_outcome
from tasks.sweep import Look, drive
from tasks.sweep_cells import LocalCells, View
from tasks.sweep_folder import Note, SweepFolder
from tasks.sweep_report import write_report
from tasks.sweep_stop import stop_sweep
from tests.unit.test_sweep_folder import make


class Instant:
    """Cells that have finished as soon as they are started. `troubles`: what the next looks raise."""

    def __init__(self, sweep: SweepFolder, *troubles: Exception) -> None:
        self._sweep = sweep
        self._troubles = list(troubles)

    def look(self, cells: Sequence[str], notes: Mapping[str, Note]) -> dict[str, View]:
        if self._troubles:
            raise self._troubles.pop(0)
        return {cell: View() for cell in cells}

    def start(self, cell: str, note: Note) -> None:
        run = self._sweep.run(cell)
        if not run.run_file.exists():
            run = RunFolder.create(self._sweep.path.parent, run.run_id)
            run.run_file.write_text(dump_config(self._sweep.config(cell)))
        write_outcome(run, Outcome(Kind.FINISH, "done"), run.begin_attempt(None, 0))

    def stop(self, cell: str, note: Note, why: str) -> None:
        raise AssertionError("nothing is to be stopped")


def test_storage_that_stumbles_stops_no_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = make(tmp_path)
    stale = OSError(116, "Stale file handle", "state.json")
    look = drive(sweep, Instant(sweep, stale, stale), poll_s=0.0, by_person=False)
    assert {result.state for result in look.results} == {"finished"}
    assert sweep.outcome()["kind"] == "finish"
    assert capsys.readouterr().err.count(": Stale file handle: the sweep goes on once") == 1


class Begun(Instant):
    """Cells that begin, and that nobody leads."""

    def start(self, cell: str, note: Note) -> None:
        super().start(cell, note)
        (self._sweep.run(cell).path / "outcome.json").unlink()

    def stop(self, cell: str, note: Note, why: str) -> None:
        pass


def test_a_full_disk_keeps_nobody_from_stopping_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be written nowhere is not waited for: no job is left, and the command ends."""
    sweep, stopped = make(tmp_path), list[str]()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def stop_jobs(run: RunFolder) -> None:
        stopped.append(run.run_id)

    monkeypatch.setattr("tasks.stop.write_json", full)
    monkeypatch.setattr(driving, "stop_unled", full)
    monkeypatch.setattr(driving, "stop_jobs", stop_jobs)
    monkeypatch.setattr(driving, "STOP_PATIENCE_S", 5.0)

    def interrupt(look: Look, plan: Plan) -> None:
        if look.states["c00"].phase is Phase.RUNNING and not stopped and plan.start:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drive(sweep, Begun(sweep), tell=interrupt, poll_s=0.0)
    assert stopped == ["s-0-c00"]


def test_a_report_that_cannot_be_drawn_stops_no_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("no such colour")

    monkeypatch.setattr(driving, "write_report", fails)
    sweep = make(tmp_path)
    look = drive(sweep, Instant(sweep), poll_s=0.0)
    assert {result.state for result in look.results} == {"finished"}
    assert "the report could not be written: ValueError: no such colour" in capsys.readouterr().err


def test_files_that_are_damaged_meanwhile_concern_their_cell_alone(tmp_path: Path) -> None:
    sweep = make(tmp_path)

    def harm(*_: object) -> None:
        sweep.sweep_file.write_text("no TOML")
        (sweep.path / "cells.json").write_text("no JSON")
        if (run := sweep.run("c00")).run_file.exists():
            (run.path / "outcome.json").write_text("[1]")

    look = drive(sweep, Instant(sweep), tell=harm, poll_s=0.0)
    assert {result.id: result.state for result in look.results} == {"c00": "failed", "c01": "finished"}
    assert "outcome.json is damaged" in look.results[0].reason


def test_a_command_that_refuses_is_quoted_from_its_error_on(tmp_path: Path) -> None:
    sweep = make(tmp_path)
    log = sweep.log_file("c00")
    cells = LocalCells(
        sweep, ["sh", "-c", "printf 'warning: x\\nerror: c00.toml: 1 problem\\n  seed: no\\n    ^\\n'; exit 2; :"]
    )
    note = Note()
    cells.start("c00", note)
    cells._children["c00"].wait()
    view = cells.look(["c00"], {"c00": note})["c00"]
    assert view.problem == "it did not start (exit code 2): c00.toml: 1 problem\n  seed: no\n    ^", log.read_text()


def test_a_cell_whose_run_was_removed_after_its_end_is_not_run_again(tmp_path: Path) -> None:
    sweep = make(tmp_path)
    drive(sweep, Instant(sweep), poll_s=0.0)
    notes = sweep.notes()
    notes["c00"].gpu_hours = 1.5  # as a real run would have used
    sweep.write_notes(notes)
    shutil.rmtree(sweep.run("c00").path)
    write_outcome(sweep.run("c01"), Outcome(Kind.FAIL, "a node was lost"), 1)
    look = drive(sweep, Instant(sweep), retry_failed=True, poll_s=0.0)
    assert {result.id: result.state for result in look.results} == {"c00": "finished", "c01": "finished"}
    assert look.results[0].reason == f"{sweep.run('c00').path} was removed after it had ended"
    assert look.results[0].gpu_hours == 1.5, "what it has used still counts towards the budget"
    assert not sweep.run("c00").path.exists()
    assert sweep.notes()["c01"].starts == 1


def test_a_failed_cell_whose_run_was_removed_is_tried_again_where_that_is_asked_for(tmp_path: Path) -> None:
    sweep = make(tmp_path)
    drive(sweep, Instant(sweep), poll_s=0.0)
    write_outcome(sweep.run("c01"), Outcome(Kind.FAIL, "a node was lost"), 1)
    assert drive(sweep, Instant(sweep), poll_s=0.0).results[1].state == "failed"
    notes = sweep.notes()
    notes["c01"].gpu_hours = 6.0
    sweep.write_notes(notes)
    shutil.rmtree(sweep.run("c01").path)
    for _ in range(2):
        failed = drive(sweep, Instant(sweep), poll_s=0.0).results[1]
        assert (failed.state, failed.gpu_hours) == ("failed", 6.0)
    assert drive(sweep, Instant(sweep), retry_failed=True, poll_s=0.0).results[1].state == "finished"
    assert read_outcome(sweep.run("c01")) is not None


def test_a_sweep_whose_state_is_damaged_can_be_stopped(tmp_path: Path) -> None:
    sweep = make(tmp_path)
    begun = Begun(sweep)
    for cell in sweep.cell_ids():
        begun.start(cell, Note())
    (sweep.path / "state.json").write_text('{"c00": ')
    assert stop_sweep(sweep, "command line", "no time") == "stopped c00, c01"
    for cell in sweep.cell_ids():
        outcome = read_outcome(sweep.run(cell))
        assert outcome is not None
        assert outcome.kind is Kind.CANCELLED


def test_a_best_cell_that_was_removed_stays_the_best(tmp_path: Path) -> None:
    sweep = make(tmp_path)
    drive(sweep, Instant(sweep), poll_s=0.0)
    window = {"step": 1, "time": 10.0, "reward": 0.5, "perf/step_s": 1.0}
    records = sweep.run("c01").records(1)
    records.mkdir(parents=True)
    (records / "metrics.jsonl").write_text(json.dumps(window) + "\n")
    best = sweep.path / "best.toml"
    write_report(sweep)
    assert load_config(best).trainer.seed == 2, "there was none"
    best.write_text("that of c00")
    shutil.rmtree(sweep.run("c00").path)
    write_report(sweep)
    assert best.read_text() == "that of c00"
    assert "without records, so that they are compared with nothing: c00" in sweep.report_file.read_text()
