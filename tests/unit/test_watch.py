"""`slipstream watch` and the parts in `slipstream status`: what they show of a run that goes on and of one that has ended."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from rich.console import Console

from cluster.decide import Kind
from cluster.recovery import DIED, Fault
from flows.cli import watch as watching
from flows.cli.main import main
from flows.cli.parts import parts
from slipstream.config_file import dump_config, load_config
from slipstream.run_folder import RunFolder, append_jsonl, write_json
from tasks.outcome import Outcome, write_outcome
from tasks.records import assign, record_fault

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "demo.toml"


def beat(
    run: RunFolder, writer: str, incarnation: str, attempt: int, phase: str, age_s: float, **facts: object
) -> None:
    value = {
        "role": writer,
        "incarnation": incarnation,
        "attempt": attempt,
        "phase": phase,
        "host": f"node-of-{writer}",
    }
    write_json(run.heartbeat_file(writer), {**value, "counter": 3, "time": time.time() - age_s, **facts})


def window(run: RunFolder, step: int, reward: float) -> None:
    line = {"attempt": 2, "step": step, "loss": 0.5, "reward": reward, "time": time.time()}
    append_jsonl(run.records(2) / "metrics.jsonl", line)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run in its second attempt; what a rank of the first wrote last does not count."""
    run = RunFolder.create(tmp_path, "watched")
    run.run_file.write_text(dump_config(load_config(EXAMPLE)))
    write_json(run.path / "origin.json", {"time": time.time() - 60})
    run.begin_attempt(None, 0)
    run.begin_attempt(None, 0)
    assign(run, 2, server="s1", learner="l2")
    beat(run, "supervisor", "v1", 2, "training", 1)
    beat(run, "server-0", "s1", 1, "serving", 2)
    beat(run, "learner", "l2", 2, "training", 100, step=7, max_steps=20)
    beat(run, "learner-1", "l1", 1, "training", 500, step=5)
    beat(run, "rollout", "l2", 2, "generating", 3)
    fault = Fault(time.time(), 1, "learner", DIED, 5, (), "the learner has ended: rank 1 ended by SIGKILL", "l1")
    record_fault(run, fault)
    window(run, 6, 0.25)
    return run


def meanwhile(monkeypatch: pytest.MonkeyPatch, *events: Callable[[], None]) -> None:
    """Between two looks of the display one event after the other happens."""
    left = list(events)
    monkeypatch.setattr(watching, "time", SimpleNamespace(sleep=lambda _: left.pop(0)()))


def ends(run: RunFolder, kind: Kind, reason: str) -> Callable[[], None]:
    def end() -> None:
        for writer in ("learner", "rollout"):
            beat(run, writer, "l2", 2, "ended", 0, step=20, max_steps=20)
        write_outcome(run, Outcome(kind, reason, "learner"), 2)

    return end


def test_of_a_run_that_goes_on_new_windows_and_its_end(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    meanwhile(monkeypatch, lambda: window(run, 8, 0.75), ends(run, Kind.FAIL, "out of luck"))
    shown = CliRunner().invoke(main, ["watch", str(run.path)])
    assert shown.exit_code == 1
    assert "step 8/20" in shown.output
    assert "reward 0.750" in shown.output
    assert "step 6" not in shown.output, "it was there before"
    assert "the run failed: out of luck" in shown.output


def test_on_a_terminal_all_its_parts(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(watching, "Console", lambda: Console(file=screen, force_terminal=True, width=120, height=40))
    first: list[str] = []
    meanwhile(monkeypatch, lambda: first.append(screen.getvalue()), ends(run, Kind.FINISH, "the learner has finished"))
    assert watching.watch(run) == 0
    rows = {line.split()[0]: line for line in first[0].splitlines() if line.split()}
    assert "node-of-server-0" in rows["server-0"]
    assert "100 s ago" in first[0]
    assert "node-of-rollout" in first[0]
    assert "learner-1" not in first[0], "it is of a job that was given up"
    assert "attempt 1, step 5: the learner has ended: rank 1 ended by SIGKILL" in first[0]
    assert screen.getvalue().count("ended") > first[0].count("ended"), "the last picture is of the end"


def test_of_a_run_that_has_ended_only_its_end(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    ends(run, Kind.FINISH, "the learner has finished")()
    meanwhile(monkeypatch)  # nobody waits
    shown = CliRunner().invoke(main, ["watch", str(run.path)])
    assert shown.exit_code == 0
    assert shown.output == "watched has finished: the learner has finished\n"


def test_status_names_the_parts_that_count(run: RunFolder) -> None:
    lines = CliRunner().invoke(main, ["status", str(run.path)]).output.splitlines()
    shown = lines[lines.index("  parts") + 1 : lines.index("  started again")]
    assert [line.split()[:2] for line in shown] == [
        [name, f"node-of-{name}"] for name in ("learner", "rollout", "server-0", "supervisor")
    ]
    learner, rollout, server, _ = shown
    assert learner.split("ago")[1].split() == ["step", "7", "training"]
    assert server.split("ago")[1].split() == ["serving"]
    assert rollout.split("ago")[1].split() == ["generating"]
    assert "rank 1 ended by SIGKILL" in lines[-1]


def test_parts_of_a_run_that_has_ended(run: RunFolder) -> None:
    ends(run, Kind.FINISH, "the learner has finished")()
    found = {part.writer: part for part in parts(run)}
    assert found["learner"].age == "ended"
    assert [name for name, part in found.items() if not part.counts] == ["learner-1"]
    assert list(found)[-1] == "learner-1", "those that count come first"
