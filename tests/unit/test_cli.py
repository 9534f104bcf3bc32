"""The command line: --dry-run, refusals, exit codes. Nothing is started here."""

import errno
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.decide import Kind
from flows.cli.main import main
from slipstream.config_file import load_config, parse_config
from slipstream.run_folder import RunFolder
from tasks.lease import release
from tasks.outcome import Outcome, RunFailed

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-value")
    monkeypatch.setenv("SLIPSTREAM_INSTANCE", "me")
    return CliRunner()


def normalised(text: str, root: Path) -> str:
    """Output without what differs from machine to machine."""
    for found, name in ((str(root), "ROOT"), (sys.executable, "PYTHON"), (str(ROOT), "REPO")):
        text = text.replace(found, name)
    return re.sub(r"\S*/bin/python\S*", "PYTHON", text)


def commands_of(text: str) -> str:
    return text[text.index("# --- server: job") :]


@pytest.mark.parametrize("example", ["demo", "qwen3_slurm_multinode"])
def test_dry_run_prints_every_command_and_writes_nothing(cli: CliRunner, tmp_path: Path, example: str) -> None:
    path = f"examples/{example}.toml"
    override = f"storage.root={tmp_path / 'runs'}"
    result = cli.invoke(main, ["train", path, "--set", override, "--dry-run"])
    assert result.exit_code == 0, result.output
    printed = result.output[: result.output.index("# --- server: job")]
    assert parse_config(tomllib.loads(printed)) == load_config(path, [override])
    golden = GOLDEN / f"dry_run_{example}.txt"
    text = normalised(commands_of(result.output), tmp_path)
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert "s3cret-value" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_demo_is_the_demo_configuration(cli: CliRunner) -> None:
    demo = cli.invoke(main, ["demo", "--seed", "7", "--dry-run"]).output
    train = cli.invoke(main, ["train", "examples/demo.toml", "--set", "trainer.seed=7", "--dry-run"]).output
    assert "seed = 7" in demo
    assert demo == train


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["train", "nowhere.toml"], "there is no such file"),
        (["train", "examples/demo.toml", "--set", "trainer.max_stepz=3"], "did you mean trainer.max_steps"),
        (["train", "examples/demo.toml", "--set", "trainer.max_steps=many"], "trainer.max_steps"),
        (["train", "examples/demo.toml", "--set", "cluster.profile=nowhere"], "Known profiles: local, slurm"),
        (["train", "examples/demo.toml", "--set", "model.name=./no-such-model"], "model.name"),
        (["train", "examples/demo.toml", "--set", "data.source=no-such.jsonl"], "data.source"),
        (["train", "examples/demo.toml", "--set", "reward.functions=['nowhere:f']"], "reward.functions"),
        (["status", "no-such-run"], "there is no run 'no-such-run'"),
        (["stop", "no-such-run"], "there is no run 'no-such-run'"),
        (["report", "no-such-run"], "there is no run 'no-such-run'"),
        (["resume", "no-such-run"], "there is no run 'no-such-run'"),
    ],
)
def test_a_refusal_is_a_message_and_exit_code_2(cli: CliRunner, tmp_path: Path, argv: list[str], words: str) -> None:
    if argv[0] == "train":
        argv = [*argv, "--set", f"storage.root={tmp_path / 'runs'}"]
    else:
        argv = [*argv, "--root", str(tmp_path / "runs")]
    result = cli.invoke(main, argv)
    assert result.exit_code == 2, result.output
    assert words in result.output
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from flows.cli.main import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "heavy = {'prefect', 'torch', 'transformers', 'datasets', 'submitit', 'matplotlib', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [("result.json", "{}x", "result.json is damaged"), ("result.json", '{"steps": 1}', "has finished")],
)
def test_a_resume_is_refused_before_anything_starts(
    cli: CliRunner, tmp_path: Path, name: str, content: str, words: str
) -> None:
    run = RunFolder.create(tmp_path, "r")
    run.run_file.write_text("")
    (run.path / name).write_text(content)
    result = cli.invoke(main, ["resume", str(run.path)])
    assert result.exit_code == 2
    assert words in result.output
    assert "starting Prefect" not in result.output
    release(run)


def test_a_failure_ends_with_the_way_on() -> None:
    text = str(RunFailed("/runs/a b", Outcome(Kind.FAIL, "the server died", "server", "/log", "line 1\nline 2")))
    assert text.startswith("the run failed: the server died\n")
    assert text.endswith("line 2\n---\ncontinue once the cause is mended: slipstream resume '/runs/a b'")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["cluster.shape=one_allocation"], "has no allocations"),
        (["learner.nodes=2"], "learner.nodes = 2"),
        (["cluster.profile=slurm", "cluster.shape=one_allocation", "server.url=http://there:1"], "somebody else"),
        (["cluster.profile=~nobody-of-that-name/p.toml"], "write it in full"),
    ],
)
def test_a_dry_run_refuses_what_no_run_can_be(cli: CliRunner, settings: list[str], words: str) -> None:
    flags = [part for setting in settings for part in ("--set", setting)]
    result = cli.invoke(main, ["train", "examples/demo.toml", "--dry-run", *flags])
    assert result.exit_code == 2, result.output
    assert words in result.output


def test_what_the_storage_refuses_names_the_file_and_the_way_out(cli: CliRunner, tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "r")
    run.run_file.write_text("")
    (run.path / "outcome.json").mkdir()
    result = cli.invoke(main, ["status", str(run.path)])
    assert result.exit_code == 1
    assert (
        result.output == f"error: {run.path}/outcome.json: Is a directory: a file belongs there: move the folder away\n"
    )


def test_a_value_cannot_break_the_lines_of_a_refusal(cli: CliRunner) -> None:
    result = cli.invoke(main, ["train", "examples/demo.toml", "--dry-run", "--set", 'name="a\\nb\\u001b[31m"'])
    assert 'name = "a\\nb\\u001b[31m"' in result.output


def test_a_full_disk_names_the_file(cli: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.create(tmp_path, "r")
    run.run_file.write_text("")

    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = cli.invoke(main, ["report", str(run.path)])
    assert result.exit_code == 1
    assert f"error: {run.report_file}: No space left on device: make room there" in result.output
    result = cli.invoke(main, ["stop", str(run.path)])
    assert result.exit_code == 1
    assert "cancel.json could not be written" in result.output


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere.toml"], "there is no such file"),
        (["examples/sweeps/demo.toml", "--set", "trainer.token_budget=64"], 'trainer.token_budget = "64": is an axis'),
        (["examples/sweeps/demo.toml", "--set", "trainer.max_stepz=3"], "did you mean trainer.max_steps"),
        (["examples/sweeps/demo.toml", "--set", "model.name=./none"], "model.name"),
        (["examples/sweeps/demo.toml", "--set", "cluster.profile=nowhere"], "Known profiles: local, slurm"),
        (["examples/sweeps/demo.toml", "--resume", "--new"], "exclude each other"),
        (["examples/sweeps/demo.toml", "--resume"], "there is no sweep of these cells in"),
    ],
)
def test_a_sweep_is_refused_before_anything_is_started(
    cli: CliRunner, tmp_path: Path, argv: list[str], words: str
) -> None:
    result = cli.invoke(main, ["sweep", *argv, "--set", f"storage.root={tmp_path / 'runs'}"])
    assert result.exit_code == 2, result.output
    assert words in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_s_dry_run_lists_the_cells_and_writes_nothing(cli: CliRunner, tmp_path: Path) -> None:
    argv = ["sweep", "examples/sweeps/demo.toml", "--dry-run", "--at-once", "2", "--set", f"storage.root={tmp_path}"]
    result = cli.invoke(main, argv)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].split() == ["cell", "trainer.max_staleness", "trainer.token_budget"]
    assert lines[9].split() == ["c08", "8", "480"]
    assert lines[10] == f"9 cells, 2 at once, in {tmp_path}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("argv", [["clean", "--older-than", "0h"], ["reconcile"], ["status", "r"], ["stop", "r"]])
def test_an_empty_root_is_not_the_default(cli: CliRunner, argv: list[str]) -> None:
    """As `--root "$UNSET"` is."""
    done = cli.invoke(main, [*argv, "--root", ""])
    assert done.exit_code == 2
    assert "'' names no folder" in done.output


def test_a_sweep_is_not_said_to_be_missing(cli: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "s-1").mkdir()
    (tmp_path / "s-1" / "sweep.toml").touch()
    for command in ("status", "watch", "audit", "resume", "supervise"):
        done = cli.invoke(main, [command, "s-1", "--root", str(tmp_path)])
        assert done.exit_code == 2
        assert "is a sweep, not a run" in done.output
        assert "s-1-c00" in done.output
