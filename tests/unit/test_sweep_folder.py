"""The folder of a sweep, and what its cells have cost."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.decide import Kind
from flows.cli.own import HERE, own_command
from slipstream.config_file import ConfigError, load_config, parse_config
from slipstream.run_folder import DamagedFile, RunFolder, RunFolderError, write_json
from slipstream.sweep.schedule import BUDGET, INTERRUPT, Phase
from slipstream.sweep.spec import parse_sweep
from tasks.outcome import Outcome, write_outcome
from tasks.stop import request_cancel
from tasks.sweep_cells import View, gpu_hours, look_at, requester
from tasks.sweep_folder import Note, SweepFolder, is_sweep
from tasks.sweep_prepare import create, remarks, resolve, unfinished
from tasks.sweep_stop import stop_cells

BASE = '[model]\nname = "m"\n[data]\nsource = "d"\n[storage]\nroot = "{root}"\n'


@pytest.fixture
def sweep(tmp_path: Path) -> SweepFolder:
    return make(tmp_path)


def make(folder: Path, **more: object) -> SweepFolder:
    (folder / "b.toml").write_text(BASE.format(root=folder / "runs"))
    spec = parse_sweep({"name": "s", "base": "b.toml", "axes": {"trainer.seed": [1, 2]}, **more})
    return create(resolve(spec, folder, {}), f"s-{len(list((folder / 'runs').glob('*')))}")


def test_a_folder_is_whole_and_knows_its_cells(sweep: SweepFolder, tmp_path: Path) -> None:
    again = SweepFolder.open(sweep.path)
    assert [cell.id for cell in again.cells()] == ["c00", "c01"]
    assert again.config("c01").trainer.seed == 2
    assert again.config("c01").storage.root == str(tmp_path / "runs")
    assert again.spec().base == "base.toml"
    assert again.run("c01").path == tmp_path / "runs" / "s-0-c01"
    assert is_sweep(RunFolder(sweep.path))
    assert sweep.path.stat().st_mode & 0o777 == 0o700
    best = tmp_path / "best.toml"
    best.write_text(again.best_text("c00"))
    assert load_config(best).trainer.seed == 1
    with pytest.raises(RunFolderError, match="exists: continue it with `slipstream sweep"):
        create(resolve(again.spec(), sweep.path, {}), "s-0")


def test_the_newest_sweep_of_the_same_cells_that_is_not_over(tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path)
    other = parse_sweep({"name": "s", "base": "b.toml", "axes": {"trainer.seed": [1, 3]}})
    wanted = parse_sweep({"name": "s", "base": "b.toml", "axes": {"trainer.seed": [1, 2]}, "gpu_hours": 3.0})
    resolved = resolve(wanted, tmp_path, {})
    assert (found := unfinished(resolved)) is not None
    assert found.path == second.path
    write_json(second.outcome_file, {"kind": "finish"})
    assert (found := unfinished(resolved)) is not None
    assert found.path == first.path
    write_json(first.outcome_file, {"kind": "finish", "left": True})
    assert unfinished(resolved) is not None
    write_json(first.outcome_file, {"kind": "fail"})
    assert unfinished(resolved) is None
    assert unfinished(resolved, finished_too=True) is not None
    assert unfinished(resolve(other, tmp_path, {}), finished_too=True) is None
    (second.path / "made.json").write_text("{")
    assert (found := unfinished(resolved, finished_too=True)) is not None
    assert found.path == first.path, "a damaged one hides no other"


def test_settings_of_the_command_line_win_and_an_axis_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "b.toml").write_text(BASE.format(root="runs"))
    spec = parse_sweep({"base": "b.toml", "axes": {"trainer.seed": [1]}, "set": {"trainer.max_steps": 5}})
    resolved = resolve(spec, tmp_path, {}, ["trainer.max_steps=7"])
    assert resolved.configs["c00"].trainer.max_steps == 7
    with pytest.raises(ConfigError, match=r'trainer.seed = "7": is an axis'):
        resolve(spec, tmp_path, {}, ["trainer.seed=7"])
    with pytest.raises(ConfigError, match=r'base = "x": there is no such file .*not a preset \(demo\)'):
        resolve(spec.model_copy(update={"base": "x"}), tmp_path, {"demo": tmp_path / "b.toml"})
    assert resolve(spec.model_copy(update={"base": "demo"}), tmp_path / "no", {"demo": tmp_path / "b.toml"}).cells


def test_gpu_hours_are_those_of_leaders_and_a_queue_costs_nothing(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "r")
    config = parse_config(
        {"model": {"name": "m"}, "data": {"source": "d"}, "server": {"gpus": 4}, "learner": {"gpus": 0}}
    )
    assert gpu_hours(run, config) == 0.0
    times = {"started": 1000.0, "time": 1000.0 + 3600}
    write_json(run.heartbeat_file("server-0"), {"incarnation": "a", **times})
    write_json(run.heartbeat_file("learner"), {"incarnation": "b", "started": 1000.0, "time": 1900.0})
    write_json(run.heartbeat_file("learner-1"), {"incarnation": "b", **times})
    write_json(run.heartbeat_file("supervisor"), {"incarnation": "c", **times})
    assert gpu_hours(run, config) == pytest.approx(4 + 0.25)
    # an end is worth more than the newest beat; an earlier job counts too
    write_json(
        run.exit_file("learner", "b"), {"role": "learner", "incarnation": "b", "started": 1000.0, "time": 2800.0}
    )
    write_json(run.exit_file("learner.1", "b"), {"role": "learner.1", "incarnation": "b", **times})
    write_json(run.exit_file("server-0", "z"), {"role": "server-0", "incarnation": "z", **times})
    write_json(run.exit_file("server-0", "old"), {"role": "server-0", "incarnation": "old", "time": 9.0})
    assert gpu_hours(run, config) == pytest.approx(4 + 4 + 0.5 + 1)


def test_a_damaged_beat_costs_nothing_and_harms_nobody(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "r")
    config = parse_config({"model": {"name": "m"}, "data": {"source": "d"}})
    write_json(run.heartbeat_file("learner"), {"incarnation": "b", "started": "noon", "time": 9.0})
    assert gpu_hours(run, config) == 0.0


@pytest.mark.parametrize("text", [None, "{", "[1]", '[{"id": "c00"}]', "5"])
def test_a_sweep_without_its_cells_says_so_and_can_still_be_stopped(sweep: SweepFolder, text: str | None) -> None:
    path = sweep.path / "cells.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(DamagedFile, match=r"cells.json is .*: without it nobody knows .* --new"):
        sweep.cells()
    begun(sweep)
    assert stop_cells(sweep, "anna: enough") == ["c00"]


def test_what_a_note_cannot_be_counts_as_not_noted(sweep: SweepFolder) -> None:
    damaged = {"starts": "x", "pid": True, "host": 5, "serial": 7, "started": float("nan"), "again": 1, "more": 0}
    write_json(sweep.path / "state.json", {"c00": damaged, "c01": []})
    assert sweep.notes() == {"c00": Note(serial=7), "c01": Note()}


def test_a_base_that_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    spec = parse_sweep({"base": "b", "axes": {"trainer.seed": [1]}})
    for base, said in (("~nobody-of-that-name/x", "nobody knows that home"), ("a" * 5000, "File name too long")):
        with pytest.raises(ConfigError, match=f"base = .*{said}"):
            resolve(spec.model_copy(update={"base": base}), tmp_path, {})


def test_a_metric_that_nobody_measures_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "b.toml").write_text(BASE.format(root="runs"))
    spec = parse_sweep({"base": "b.toml", "axes": {"trainer.seed": [1]}, "metric": "accuracy"})
    (found,) = remarks(resolve(spec, tmp_path, {}))
    assert str(found).startswith('metric = "accuracy": no run records such a metric')
    assert not remarks(resolve(spec.model_copy(update={"metric": "reward"}), tmp_path, {}))


def begun(sweep: SweepFolder) -> RunFolder:
    run = RunFolder.create(sweep.path.parent, "s-0-c00")
    run.run_file.write_text("")
    run.begin_attempt(None, 0)
    return run


def test_how_a_cell_stands(sweep: SweepFolder) -> None:
    def phase(note: Note, view: View | None = None) -> Phase:
        return look_at(sweep, "c00", note, view or View(), 0.0)[0].phase

    none = Note()
    assert phase(none) is Phase.WAITING
    assert phase(none, View(alive=True)) is Phase.STARTING
    assert phase(none, View(problem="refused")) is Phase.FAILED
    assert phase(none, View(problem="by a person", cancelled=True)) is Phase.STOPPED
    assert phase(Note(stopped_for=BUDGET), View(problem="it was told to stop")) is Phase.WAITING
    run = begun(sweep)
    assert phase(none, View(led=True)) is Phase.RUNNING
    assert not look_at(sweep, "c00", none, View(), 0.0)[0].led
    assert phase(Note(problem="its flow run is Failed"), View(led=True)) is Phase.RUNNING, "it has begun all the same"
    request_cancel(run, requester(sweep), "started too often")
    assert phase(Note(problem="started too often"), View(led=True)) is Phase.FAILED
    write_outcome(run, Outcome(Kind.FAIL, "out of luck"), 1)
    assert look_at(sweep, "c00", none, View(alive=True), 0.0)[1] == "out of luck"
    assert phase(Note(attempt=1), View(alive=True)) is Phase.STARTING, "a resume is on its way"
    assert phase(Note(attempt=1), View(problem="no such model")) is Phase.FAILED
    write_outcome(run, Outcome(Kind.FINISH, "done"), 1)
    assert phase(Note(problem="started too often")) is Phase.FINISHED


def test_who_stopped_a_cell_decides_whether_it_goes_on(sweep: SweepFolder) -> None:
    run = begun(sweep)
    note = Note(stopped_for=BUDGET, why="the budget is spent")
    request_cancel(run, "anna", "enough")
    write_outcome(run, Outcome(Kind.CANCELLED, "anna: enough"), 1)
    state, why = look_at(sweep, "c00", note, View(), 0.0)
    assert (state.phase, state.stopped_for, why) == (Phase.STOPPED, "", "anna: enough")
    run.cancel_file.unlink()
    request_cancel(run, requester(sweep), "the budget is spent")
    state, why = look_at(sweep, "c00", note, View(), 0.0)
    assert (state.stopped_for, why) == (BUDGET, "the budget is spent")
    state, why = look_at(sweep, "c00", Note(), View(), 0.0)
    assert (state.stopped_for, why) == (INTERRUPT, "anna: enough"), "by reconciliation, its driver being dead"
    state, _ = look_at(sweep, "c00", Note(problem="started too often"), View(), 0.0)
    assert (state.phase, state.stopped_for) == (Phase.STOPPED, ""), "given up"


def test_a_command_is_started_again_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "slipstream"
    script.touch()
    main = SimpleNamespace(__spec__=None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", [str(script), "sweep"])
    assert own_command() == [sys.executable, str(script)]
    monkeypatch.setattr(sys, "argv", ["-c", "sweep"])
    assert own_command() == [sys.executable, "-c", HERE]
    main.__spec__ = SimpleNamespace(name="tests.doubles.cli")
    monkeypatch.setattr(sys, "argv", ["/x/cli.py", "sweep"])
    assert own_command() == [sys.executable, "-m", "tests.doubles.cli"]
