"""What the progress displays say, from a run folder."""

import logging
from pathlib import Path

import pytest
from rich.console import Console

from flows.cli.logs import LateFileHandler
from flows.cli.progress import PlainPrinter, clock, phase_text, render, sparkline, window_line
from flows.cli.session import _what_is_left
from flows.cli.snapshot import Snapshot, held_out_before_after, take_snapshot
from flows.cli.summary import status, summary
from slipstream.run_folder import RunFolder, append_jsonl, write_atomic, write_json

WINDOW = {
    "step": 3, "time": 1.0, "reward": 0.5, "sample/staleness_mean": 1.25, "rollout/generated_tokens_per_s": 3456.7,
    "rollout/queue_size": 12.0,
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path, "r")
    write_atomic(folder.run_file, 'name = "r"\n')
    return folder


def beat(run: RunFolder, who: str, attempt: int = 1, **values: object) -> None:
    write_json(run.heartbeat_file(who), {"attempt": attempt, "counter": 1, **values})


def shown(snapshot: Snapshot, elapsed_s: float = 65.0) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(snapshot, elapsed_s))
    return console.export_text()


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.2]) == "▁"
    assert sparkline([0.0, 1.0, 0.5]) == "▁█▄"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert len(sparkline([float(i) for i in range(1000)], width=40)) == 40


def test_clock() -> None:
    assert [clock(s) for s in (0, 59.9, 61, 3600 + 62)] == ["0:00", "0:59", "1:01", "1:01:02"]


def test_a_window_as_a_plain_line() -> None:
    line = window_line(WINDOW, 60, 83.0)
    assert line == "[1:23] step 3/60  reward 0.500  staleness 1.25  generated tok/s 3,457  queue 12"
    said = window_line({**WINDOW, "verdict": "trainer-bound: generation waits."}, 60, 83.0)
    assert said == f"{line}  trainer-bound"
    assert window_line({"step": 0, "eval/reward": 0.31}, 0, 0) == "[0:00] step 0  held-out reward 0.310"


def test_several_reward_functions_are_shown_one_by_one(run: RunFolder) -> None:
    run.begin_attempt(None, 0)
    before = {"step": 0, "eval/reward": 0.3, "eval/rewards/right": 0.1, "eval/rewards/shape": 0.2}
    window = {"step": 1, "reward": 0.5, "rewards/right/mean": 0.15, "rewards/shape/mean": 0.35}
    after = {"step": 1, "eval/reward": 1.5, "eval/rewards/right": 0.55, "eval/rewards/shape": 0.95}
    for line in (before, window, after):
        append_jsonl(run.records(1) / "metrics.jsonl", line)
    assert window_line(window, 0, 0) == "[0:00] step 1  reward 0.500  right 0.150  shape 0.350"
    assert window_line(before, 0, 0) == "[0:00] step 0  held-out reward 0.300  right 0.100  shape 0.200"
    text = shown(take_snapshot(run))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "reward 0.500 ▁ held out 0.300 → 1.500" in lines
    assert "right 0.150 ▁ held out 0.100 → 0.550" in lines
    assert "shape 0.350 ▁ held out 0.200 → 0.950" in lines
    assert "    shape  0.200 → 0.950" in summary(run, ["slipstream"])


def test_one_reward_function_is_the_reward(run: RunFolder) -> None:
    run.begin_attempt(None, 0)
    window = {"step": 1, "reward": 0.5, "eval/rewards/right": 0.5, "rewards/right/mean": 0.4}
    append_jsonl(run.records(1) / "metrics.jsonl", window)
    assert "right" not in window_line(window, 0, 0) + shown(take_snapshot(run)) + summary(run, ["slipstream"])


def test_a_run_in_preparation_while_loading_and_while_training(run: RunFolder) -> None:
    assert phase_text(take_snapshot(run)) == "preparing"
    run.begin_attempt(None, 0)
    beat(run, "supervisor", phase="the server is starting")
    beat(run, "server-0", phase="starting")
    beat(run, "learner", phase="loading the model")
    assert phase_text(take_snapshot(run)) == "server: starting · learner: loading the model"
    write_json(run.endpoint_file(), {"attempt": 1, "url": "http://127.0.0.1:1"})
    beat(run, "supervisor", phase="training")
    beat(run, "learner", phase="waiting for rollouts", step=3, max_steps=60)
    append_jsonl(run.records(1) / "metrics.jsonl", {"step": 0, "eval/reward": 0.3})
    append_jsonl(run.records(1) / "metrics.jsonl", {**WINDOW, "verdict": "balanced: nobody waits."})
    snapshot = take_snapshot(run)
    assert (snapshot.server, snapshot.step, snapshot.max_steps) == ("ready", 3, 60)
    text = shown(snapshot)
    for word in (
        "waiting for rollouts",
        "3/60",
        "0.500",
        "0.300",
        "1:05",
        "staleness 1.25",
        "queue 12",
        "nobody waits",
    ):
        assert word in text


def test_a_heartbeat_of_an_earlier_attempt_is_not_shown(run: RunFolder) -> None:
    run.begin_attempt(None, 0)
    beat(run, "learner", attempt=1, phase="training", step=9)
    run.begin_attempt("output/a1/checkpoint-5", 5)
    assert take_snapshot(run).step == 0
    assert take_snapshot(run).attempt == 2


def test_the_plain_printer_says_each_thing_once() -> None:
    lines: list[str] = []
    printer = PlainPrinter(lines.append)
    loading = Snapshot("r", 1, phase="starting", server="starting", learner="loading")
    training = Snapshot("r", 1, phase="training", learner="training", windows=[WINDOW], max_steps=60)
    more = Snapshot("r", 1, phase="training", learner="saving", windows=[WINDOW, {**WINDOW, "step": 4}], max_steps=60)
    for snapshot in (loading, loading, training, training, more, more):
        printer.show(snapshot, 1.0)
    assert [line.split("  ")[0] for line in lines] == [
        "[0:01] server: starting · learner: loading",
        "[0:01] step 3/60",
        "[0:01] step 4/60",
    ]


def test_what_a_resume_finds_is_not_printed_again() -> None:
    lines: list[str] = []
    printer = PlainPrinter(lines.append, [WINDOW])
    for windows in ([WINDOW], [WINDOW, {**WINDOW, "step": 4}]):
        printer.show(Snapshot("r", 2, phase="training", learner="training", windows=windows), 1.0)
    assert [line.split("  ")[0] for line in lines if "step" in line] == ["[0:01] step 4"]


def test_windows_after_a_recovery_are_printed_though_there_are_fewer() -> None:
    lines: list[str] = []
    printer = PlainPrinter(lines.append)
    first = [{**WINDOW, "step": step, "attempt": 1} for step in range(1, 6)]
    printer.show(Snapshot("r", 1, phase="training", learner="training", windows=first), 1.0)
    second = [*first[:2], {**WINDOW, "step": 3, "attempt": 2}]
    for _ in range(2):
        printer.show(Snapshot("r", 2, phase="training", learner="training", windows=second), 1.0)
    assert [line.split("  ")[0] for line in lines if "step" in line][5:] == ["[0:01] step 3"]


def test_summary_and_status(run: RunFolder) -> None:
    run.begin_attempt(None, 0)
    write_json(run.path / "origin.json", {"cwd": "/", "time": 1000.0})
    for step, value in ((0, 0.31), (30, 0.6), (60, 0.85)):
        append_jsonl(run.records(1) / "metrics.jsonl", {"step": step, "eval/reward": value, "reward": value})
    assert held_out_before_after(run) == (0.31, 0.85)
    assert "state     server: starting · learner: starting" in status(run)
    write_json(run.path / "result.json", {"attempt": 1, "steps": 60})
    write_json(run.path / "outcome.json", {"attempt": 1, "kind": "finish", "reason": "the end", "time": 1125.0})
    text = summary(run, ["slipstream", "demo", "--seed", "1"])
    for part in (
        "0.310 → 0.850",
        "60",
        "2:05",
        str(run.output(1)),
        "metrics.jsonl",
        "report.html",
        "  slipstream demo --seed 1",
    ):
        assert part in text
    assert "state     finish: the end" in status(run)


def test_a_log_that_cannot_be_written_is_kept_and_prints_nothing(tmp_path, capsys):
    path = tmp_path / "flow.log"
    path.mkdir()  # stands for a disk that is full for a while
    handler = LateFileHandler(path)
    handler.emit(logging.LogRecord("prefect", logging.INFO, "", 0, "one", (), None))
    path.rmdir()
    handler.emit(logging.LogRecord("prefect", logging.INFO, "", 0, "two", (), None))
    assert capsys.readouterr().err == ""
    assert [line.split(": ")[1] for line in path.read_text().splitlines()] == ["one", "two"]


def test_a_run_that_was_stopped_before_it_began_is_not_to_be_resumed(tmp_path):
    folder = RunFolder(tmp_path / "r")
    assert _what_is_left(folder) == "nothing had been started yet"
    folder = RunFolder.create(tmp_path, "r")
    folder.begin_attempt(None, 0)
    assert _what_is_left(folder).endswith(f"Continue with: slipstream resume {folder.path}")
