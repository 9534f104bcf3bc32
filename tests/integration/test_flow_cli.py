"""The command line end to end: a private Prefect API, real jobs that stand in for server and learner."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.local_jobs import job_processes
from slipstream.run_folder import RunFolder, read_json
from tasks.prepare import all_jobs
from tests.prefect_database import seed

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
STANDINS = ROOT / "tests" / "standins"
PATIENCE_S = 180


class Command:
    """One `slipstream …` in a session of its own, its output collected."""

    def __init__(self, root: Path, argv: tuple[str, ...], faults: str, prefect: dict[str, str]) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        environment |= {
            "PYTHONPATH": f"{STANDINS}:{ROOT}",
            "STANDIN": faults,
            "HOME": str(root / "home"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            **prefect,
        }
        self.root = root
        self.out = root / "out"
        with open(self.out, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(STANDINS / "standin_cli.py"), *argv],
                cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self.out.read_text()

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while text not in self.output:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < end, f"no {text!r} in:\n{self.output}"
            time.sleep(0.05)

    @property
    def run(self) -> RunFolder:
        (path,) = [path for path in (self.root / "runs").iterdir() if not path.name.startswith(".")]
        return RunFolder.open(path)

    def prefect_server(self) -> psutil.Process:
        (server,) = [child for child in psutil.Process(self.process.pid).children() if "uvicorn" in child.cmdline()]
        return server


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PREFECT_HOME for several tests."""
    return seed(tmp_path_factory.mktemp("prefect-home"))


@pytest.fixture
def slipstream(tmp_path: Path, home: Path) -> Iterator[Callable[..., Command]]:
    commands: list[Command] = []

    def start(*argv: str, faults: str = "", prefect: dict[str, str] | None = None) -> Command:
        prefect = {"PREFECT_HOME": str(home)} if prefect is None else prefect
        commands.append(Command(tmp_path, argv, faults, prefect))
        return commands[-1]

    yield start
    for command in commands:
        if command.process.poll() is None:
            command.process.kill()
            command.process.wait()


def train(root: Path) -> list[str]:
    return ["train", "examples/demo.toml", "--set", f"storage.root={root / 'runs'}"]


def assert_no_process_left(command: Command) -> None:
    assert [process for job in all_jobs(command.run) for process in job_processes(job)] == []


def test_a_run_to_its_end(slipstream: Callable[..., Command], tmp_path: Path) -> None:
    command = slipstream(*train(tmp_path), prefect={})
    assert command.wait() == 0, command.output
    assert (tmp_path / "runs" / ".prefect").stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / "home" / ".prefect").exists()
    for text in (
        "step 5/5  reward 1.000",
        "held-out reward  0.200 → 1.000",
        "report.html",
        "again, with other settings",
    ):
        assert text in command.output
    assert command.run.report_file.is_file()
    assert "Finished in state Completed" in (command.run.logs / "flow.log").read_text()
    assert "prefect" not in command.output
    assert_no_process_left(command)


def test_the_private_api_refuses_strangers_and_ctrl_c_leaves_nothing(
    slipstream: Callable[..., Command], tmp_path: Path, home: Path
) -> None:
    command = slipstream(*train(tmp_path), faults="learner:hang")
    command.wait_for("] step 2")  # the total comes with a later heartbeat on a busy machine
    server = command.prefect_server()
    (listening,) = {c.laddr for c in server.net_connections() if c.status == psutil.CONN_LISTEN}
    assert listening.ip == "127.0.0.1"
    url = f"http://127.0.0.1:{listening.port}/api/flow_runs/filter"
    assert httpx.post(url, json={}, trust_env=False).status_code == 401
    password = server.environ()["PREFECT_SERVER_API_AUTH_STRING"]
    user, _, secret = password.partition(":")
    known = httpx.post(url, json={}, auth=(user, secret), trust_env=False).json()
    assert command.run.run_id in {flow_run["name"] for flow_run in known}
    jobs = [process for job in all_jobs(command.run) for process in job_processes(job)]
    assert len(jobs) >= 6
    assert not any(secret in value for process in jobs for value in process.environ().values())
    os.killpg(command.process.pid, signal.SIGINT)  # as a terminal does: the whole group
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.wait() == 130, command.output
    assert "stopped" in command.output
    assert "Traceback" not in command.output
    assert (read_json(command.run.cancel_file) or {})["why"] == "SIGINT"
    assert_no_process_left(command)
    assert not server.is_running()
    files = [path for folder in (tmp_path, home) for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


def test_a_killed_flow_leaves_jobs_that_stop_ends_and_resume_goes_on(
    slipstream: Callable[..., Command], tmp_path: Path
) -> None:
    command = slipstream(*train(tmp_path), faults="learner:hang")
    command.wait_for("] step 2")  # the total comes with a later heartbeat on a busy machine
    server = command.prefect_server()
    command.process.kill()
    command.process.wait()
    psutil.wait_procs([server], timeout=60)
    assert not server.is_running()
    assert [process for job in all_jobs(command.run) for process in job_processes(job)]
    run = command.run
    stop = slipstream("stop", str(run.path))
    assert stop.wait() == 0
    assert "stopped server (job" in stop.output
    assert_no_process_left(command)
    resumed = slipstream("resume", run.run_id, "--root", str(run.path.parent))
    assert resumed.wait() == 0, resumed.output
    assert run.attempts() == [1, 2]
    assert "has finished" in resumed.output
    again = slipstream("resume", str(run.path))
    assert again.wait() == 2
    assert_no_process_left(command)
