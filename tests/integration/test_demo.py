"""`slipstream demo`, shortened: real server, learner and flow, as a person starts them first."""

import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.run_folder import RunFolder, read_json
from tests.prefect_server import ROOT, environment

pytestmark = pytest.mark.integration


def test_the_demo_goes_to_its_end(tmp_path: Path) -> None:
    changes = [f"storage.root={tmp_path}", "trainer.max_steps=3", "trainer.save_steps=3", "data.eval_size=16"]
    command = [sys.executable, "-m", "flows.cli.main", "demo", "--seed", "1"]
    command += [part for change in changes for part in ("--set", change)]
    settings = environment(PREFECT_HOME=str(tmp_path / "home"))
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = tmp_path.glob("demo-*/run.toml")
    run = RunFolder(path.parent)
    assert (read_json(run.path / "outcome.json") or {})["kind"] == "finish"
    assert (run.path / "report.html").is_file()
