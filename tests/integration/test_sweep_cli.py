"""`slipstream sweep` as a person runs it, with the doubles in place of server and learner."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from cluster.local_jobs import job_processes
from slipstream.run_folder import read_json
from tasks.stored import all_jobs
from tasks.sweep_folder import SweepFolder
from tests.doubles.sweep import hold, is_held, remove_processes, write_base
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with base.toml; nothing of the sweeps in it runs afterwards."""
    write_base(tmp_path)
    yield tmp_path
    remove_processes(tmp_path / "runs")


def test_ctrl_c_and_the_same_command_again(folder: Path) -> None:
    """Cells are commands of their own, each with its Prefect; the first is stopped, the second run goes on with it."""
    file = folder / "sweep.toml"
    file.write_text('name = "two"\nbase = "base.toml"\nmetric = "reward"\n[axes]\n"trainer.seed" = [0, 1]\n')
    (folder / "runs").mkdir()
    hold(folder / "runs", 5)
    command = [sys.executable, "-m", "tests.doubles.cli", "sweep", str(file), "--at-once", "2"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"HOME": str(folder), "SLIPSTREAM_HOME": str(folder / "home"), "PYTHONUNBUFFERED": "1"}
    log = folder / "log"
    with open(log, "wb") as out:
        first = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        (sweep_file,) = wait_until(lambda: list((folder / "runs").glob("two-*/sweep.toml")), "the sweep is there")
        sweep = SweepFolder(sweep_file.parent)
        for cell in ("c00", "c01"):
            wait_until(partial(is_held, sweep.run(cell)), f"{cell} trains", 300)
        _another_command_changes_nothing(command[:4], sweep, environment)
        first.send_signal(signal.SIGINT)
        assert first.wait(180) == 130, log.read_text()
    finally:
        first.kill()
    assert f"go on with: slipstream sweep {sweep.path}" in log.read_text()
    assert "Traceback" not in log.read_text()
    for cell in ("c00", "c01"):
        run = sweep.run(cell)
        assert (read_json(run.path / "outcome.json") or {})["kind"] == "cancelled"
        assert (read_json(run.path / "origin.json") or {})["sweep"] == sweep.sweep_id
        assert not [process for job in all_jobs(run) for process in job_processes(job)]
    second = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"going on with {sweep.path}" in second.stdout
    assert "c01 (seed 1) finished: step " in second.stdout
    assert len(list((folder / "runs").glob("two-*/sweep.toml"))) == 1
    for cell in ("c00", "c01"):
        assert sweep.run(cell).attempts() == [1, 2]
        assert (read_json(sweep.run(cell).path / "outcome.json") or {})["kind"] == "finish"
    again = subprocess.run(
        [*command[:3], "report", str(sweep.path)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert again.stdout == f"{sweep.report_file}\n"


def _another_command_changes_nothing(sweep_command: list[str], sweep: SweepFolder, environment: dict[str, str]) -> None:
    """While it is driven: one with other limits is refused, and one that only asks starts nothing."""

    def said(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [*sweep_command, str(sweep.path), *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    before = sweep.sweep_file.read_text()
    code, text = said("--at-once", "7")
    assert code != 0
    assert "is running (pid" in text
    assert sweep.sweep_file.read_text() == before
    code, text = said("--dry-run")
    assert (code, sweep.sweep_file.read_text()) == (0, before)
    assert "c01   1" in text
    assert f"2 cells, 2 at once, in {sweep.path}" in text
