"""The flow against a Prefect server that runs, and called as a plain function."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.local_jobs import cancel_jobs, job_processes
from slipstream.process import last_lines
from slipstream.run_folder import RunFolder, read_json
from tasks.stored import all_jobs
from tests.prefect_database import seed
from tests.prefect_server import PASSWORD, PATIENCE_S, ROOT, STANDINS, PrefectServer, ask, environment
from tests.waiting import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a running Prefect server."""
    server = PrefectServer(tmp_path_factory.mktemp("prefect-server"))
    try:
        yield server.start().url
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("faults", "code", "state", "words"),
    [("", 0, "COMPLETED", ""), ("learner:kill", 1, "FAILED", "the learner has ended: its process is gone")],
)
def test_a_running_server_sees_the_run(
    api: str, tmp_path: Path, faults: str, code: int, state: str, words: str
) -> None:
    command = [sys.executable, str(STANDINS / "standin_cli.py"), "train", "examples/demo.toml"]
    command += ["--set", f"storage.root={tmp_path}", "--set", f"name=r{code}", "--set", "recovery.backoff=0"]
    settings = {
        "PREFECT_HOME": str(tmp_path / "home"),
        "PREFECT_API_URL": api,
        "PREFECT_API_AUTH_STRING": PASSWORD,
        "STANDIN": faults,
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment(**settings), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    (path,) = tmp_path.glob("r*")
    (flow_run,) = [run for run in ask(api, "flow_runs/filter", {}) if run["name"] == path.name]
    assert flow_run["state_type"] == state
    assert words in (flow_run["state"]["message"] or "")
    of_it = {"flow_runs": {"id": {"any_": [flow_run["id"]]}}}
    wanted = {"prepare", "start server", "start learner", "supervise"} | ({"finish"} if code == 0 else set())

    def named() -> bool:
        """Prefect keeps task runs from events, a little later."""
        return {task["name"].rsplit("-", 1)[0] for task in ask(api, "task_runs/filter", of_it)} == wanted

    wait_until(named, f"the task runs are {wanted}")
    if code:
        assert f"error: the run failed: {words}" in done.stderr
        assert "learner about to be killed" in done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        assert (read_json(path / "outcome.json") or {})["role"] == "learner"
        assert (path / "report.html").is_file()
    assert PASSWORD not in done.stdout + done.stderr
    assert not (tmp_path / ".prefect").exists()


def called_as_a_function(tmp_path: Path, **settings: str) -> subprocess.Popen[bytes]:
    """A process that calls the flow itself, as a Prefect worker or a user's script does."""
    script = tmp_path / "script.py"
    script.write_text(
        "from cluster import entry\n"
        "for role in ('server', 'learner'):\n"
        "    entry.LEADERS[role] = f'standin_roles:{role}'\n"
        "from slipstream.config_file import load_config\n"
        "from flows.train import train\n"
        f"train(load_config('examples/demo.toml', ['storage.root={tmp_path}']), 'r')\n"
    )
    settings = {"PREFECT_HOME": str(seed(tmp_path / "home")), **settings}
    with open(tmp_path / "log", "wb") as out:
        return subprocess.Popen(
            [sys.executable, str(script)], cwd=ROOT, env=environment(**settings), stdout=out, stderr=subprocess.STDOUT
        )


def processes(run: RunFolder) -> list[psutil.Process]:
    return [process for job in all_jobs(run) for process in job_processes(job)]


def test_a_cancel_by_signal_leaves_no_process(api: str, tmp_path: Path) -> None:
    flow = called_as_a_function(tmp_path, PREFECT_API_URL=api, PREFECT_API_AUTH_STRING=PASSWORD, STANDIN="learner:hang")
    run = RunFolder(tmp_path / "r")
    end = time.monotonic() + PATIENCE_S
    try:
        while (read_json(run.heartbeat_file("supervisor")) or {}).get("phase") != "training":
            assert flow.poll() is None, last_lines(tmp_path / "log")
            assert time.monotonic() < end, last_lines(tmp_path / "log")
            time.sleep(0.1)
        assert len(processes(run)) >= 6
        flow.send_signal(signal.SIGTERM)
        assert flow.wait(PATIENCE_S) != 0
        assert processes(run) == []
        assert "TerminationSignal" in (read_json(run.cancel_file) or {})["why"]
        assert (read_json(run.path / "outcome.json") or {})["kind"] == "cancelled"
    finally:
        if flow.poll() is None:
            flow.kill()
            flow.wait()
        cancel_jobs(all_jobs(run), grace_s=0.1)


def test_called_as_a_function_it_needs_no_server(tmp_path: Path) -> None:
    flow = called_as_a_function(tmp_path)
    try:
        assert flow.wait(PATIENCE_S) == 0, last_lines(tmp_path / "log")
    finally:
        if flow.poll() is None:
            flow.kill()
            flow.wait()
        cancel_jobs(all_jobs(RunFolder(tmp_path / "r")), grace_s=0.1)
    assert (read_json(tmp_path / "r" / "outcome.json") or {})["kind"] == "finish"


def wait_phase(flow: subprocess.Popen[bytes], run: RunFolder, phase: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while (read_json(run.heartbeat_file("supervisor")) or {}).get("phase") != phase:
        assert flow.poll() is None, last_lines(run.path.parent / "log")
        assert time.monotonic() < end, last_lines(run.path.parent / "log")
        time.sleep(0.1)


def test_runs_go_on_without_the_prefect_server(tmp_path: Path) -> None:
    """How each ended is on storage before Prefect is told: one while the server is away, one after it has come back."""
    server = PrefectServer(tmp_path / "prefect").start()
    runs = {name: RunFolder(tmp_path / name / "r") for name in ("away", "back")}
    flows: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name in runs:
            (tmp_path / name).mkdir()
            flows[name] = called_as_a_function(
                tmp_path / name,
                PREFECT_API_URL=server.url,
                PREFECT_API_AUTH_STRING=PASSWORD,
                PREFECT_CLIENT_MAX_RETRIES="3",
                STANDIN="learner:wait",
            )
        for name, run in runs.items():
            wait_phase(flows[name], run, "training")
        server.kill()
        codes = {}
        for name, run in runs.items():
            if name == "back":
                server.start()
            (run.path / "go").touch()
            codes[name] = flows[name].wait(PATIENCE_S)
            assert (read_json(run.path / "outcome.json") or {})["kind"] == "finish"
            assert run.attempts() == [1]
            assert processes(run) == []
        assert codes["back"] == 0, last_lines(tmp_path / "back" / "log")
        found = ask(server.url, "flow_runs/filter", {})
        states = {Path(one["parameters"]["config"]["storage"]["root"]).name: one["state_type"] for one in found}
        assert states["back"] == "COMPLETED"
    finally:
        server.kill()
        for name, flow in flows.items():
            if flow.poll() is None:
                flow.kill()
                flow.wait()
            cancel_jobs(all_jobs(runs[name]), grace_s=0.1)


def test_a_killed_flow_is_taken_over(api: str, tmp_path: Path) -> None:
    flow = called_as_a_function(tmp_path, PREFECT_API_URL=api, PREFECT_API_AUTH_STRING=PASSWORD, STANDIN="learner:wait")
    run = RunFolder(tmp_path / "r")
    try:
        wait_phase(flow, run, "training")
        flow.kill()
        flow.wait()
        jobs = run.assignment()
        (run.path / "go").touch()
        command = [sys.executable, str(STANDINS / "standin_cli.py"), "supervise", str(run.path)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "has finished: the learner has finished" in done.stdout
        assert (run.assignment(), run.attempts()) == (jobs, [1])
        assert processes(run) == []
    finally:
        cancel_jobs(all_jobs(run), grace_s=0.1)
