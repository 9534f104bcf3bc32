"""The commands of the documentation, run as they stand there."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documented import COMMANDS, Here, commands, table
from tests.front_door import PATIENCE_S, Front
from tests.prefect_server import ROOT

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def words(front: Front) -> dict[str, str]:
    """What stands for what a reader has: a run that has finished, a storage root, a configuration."""
    front.plan()
    flow_run = front.submit()
    assert front.wait_state(flow_run)["state_type"] == "COMPLETED", front.log_of(flow_run).read_text()[-3000:]
    home = Path(front.environment["HOME"]) / ".slipstream"
    if not home.exists():
        home.symlink_to(front.home)
    slipstream = f"{shlex.quote(sys.executable)} -m flows.cli.main"
    return {
        "slipstream": slipstream,
        ".venv/bin/slipstream": slipstream,
        "my.toml": shlex.quote(str(front.preset)),
        "RUN": shlex.quote(str(front.run_of(flow_run).path)),
        "STORAGE": shlex.quote(str(front.root)),
    }


@pytest.mark.parametrize(
    ("page", "command"),
    [(page, command) for page in COMMANDS for command in commands(page) if isinstance(table(page).get(command), Here)],
)
def test_it_does_what_the_page_says(front: Front, words: dict[str, str], page: str, command: str) -> None:
    how = table(page)[command]
    assert isinstance(how, Here)
    line = " ".join(words.get(word, word) for word in command.split(" "))
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=ROOT,
        env=front.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == how.code, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "Traceback" not in done.stdout + done.stderr
