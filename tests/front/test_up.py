"""`slipstream up` with real runs of the doubles: what its beginning, its middle and its end do, and do not do."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator

import httpx
import psutil
import pytest

from cluster.local_jobs import job_processes
from slipstream.run_folder import RunFolder, read_json
from tasks.stored import all_jobs
from tests.front_door import PATIENCE_S, Front, alive, flow_processes
from tests.waiting import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    found = Front(tmp_path_factory.mktemp("up"), fresh=True)
    found.launch("--port", "0")
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def door(home: Front) -> Front:
    """It is up, and ready, whatever a test before has done."""
    if home.process is None or home.process.poll() is not None:
        home.launch()  # the port of last time

    def ready() -> bool:
        assert home.process is not None
        assert home.process.poll() is None, home.output.read_text()
        return home.up.get("pid") == home.process.pid and bool(home.up.get("ready"))

    wait_until(ready, "slipstream up is ready", PATIENCE_S)
    return home


def parts(door: Front) -> dict[str, int]:
    """The processes that `up` looks after, by what they are."""
    assert door.process is not None
    found = {}
    for child in psutil.Process(door.process.pid).children():
        with contextlib.suppress(psutil.Error):  # gone meanwhile
            words = " ".join(child.cmdline())
            name = "server" if "uvicorn" in words else "care worker" if words.endswith("-care") else "worker"
            found[name] = child.pid
    return found


def held_run(door: Front, name: str) -> tuple[str, RunFolder, int]:
    """A run that stands still in the middle of its training: flow run, folder, process of the flow."""
    door.hold(name)
    before = {run.path for run in door.runs()}
    flow_run = door.submit()

    def new() -> RunFolder | None:
        return next((run for run in door.runs() if run.path not in before), None)

    run = wait_until(new, "the flow makes its run")
    wait_until((run.path / "events-test" / f"reached-{name}.json").exists, "the run trains")
    (process,) = flow_processes(door.home, flow_run)
    return flow_run, run, process


def jobs_of(run: RunFolder) -> list[int]:
    return [process.pid for job in all_jobs(run) for process in job_processes(job)]


def finished(run: RunFolder) -> bool:
    return bool((read_json(run.path / "outcome.json") or {}).get("kind") == "finish")


def test_a_run_goes_from_submit_to_completed(door: Front) -> None:
    door.plan()
    flow_run = door.submit()
    assert door.wait_state(flow_run)["state_type"] == "COMPLETED", door.log_of(flow_run).read_text()[-3000:]


def test_a_second_one_says_where_the_first_is(door: Front) -> None:
    done = door.command("up")
    assert done.returncode == 0, done.stderr
    assert "runs already" in done.stdout
    assert door.url in done.stdout


def test_nobody_gets_in_without_the_password_and_nobody_is_shown_it(door: Front) -> None:
    auth = door.home / "auth"
    assert stat.S_IMODE(auth.stat().st_mode) == 0o600
    assert stat.S_IMODE(door.home.stat().st_mode) == 0o700
    assert httpx.post(f"{door.api}/flows/count", json={}, trust_env=False, timeout=60).status_code == 401
    assert isinstance(door.ask("POST", "flows/count", {}), int)
    secret = auth.read_text().strip().partition(":")[2]
    shown = [door.output.read_text(), *(path.read_text() for path in (door.home / "logs").rglob("*.log"))]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            shown.append(" ".join(process.cmdline()))
    assert not [text for text in shown if secret in text]
    assert str(auth) in door.output.read_text()
    settings = httpx.get(f"{door.url}/ui-settings", trust_env=False, timeout=60)
    assert settings.json()["api_url"] == "/api"  # of the address in the browser, whatever a tunnel makes of it
    assert "connect-src 'self'" in settings.headers["content-security-policy"]
    assert door.ask("GET", "admin/settings")["server"]["analytics_enabled"] is False


def test_only_this_machine_can_reach_it(door: Front) -> None:
    listening = [
        connection.laddr
        for pid in parts(door).values()
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {address.ip for address in listening} == {"127.0.0.1"}


def test_what_dies_is_started_again_and_takes_no_run_with_it(door: Front) -> None:
    """Prefect's own worker would end its flow processes at TERM."""
    flow_run, run, process = held_run(door, "again")
    before, url = parts(door), door.api
    for part, number in (("worker", signal.SIGTERM), ("care worker", signal.SIGKILL), ("server", signal.SIGKILL)):
        os.kill(before[part], number)
    wait_until(
        lambda: set(parts(door)) == set(before) and not set(parts(door).values()) & set(before.values()), "others"
    )
    for words in ("worker has ended with code 0", "care worker has ended by SIGKILL", "server has ended by SIGKILL"):
        assert words in door.output.read_text()

    def answers() -> bool:
        try:
            return httpx.get(f"{url}/health", trust_env=False, timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(answers, "the server answers at the same address", PATIENCE_S)
    assert alive([process]) == [process]
    door.release("again")
    assert door.wait_state(flow_run)["state_type"] == "COMPLETED"
    assert finished(run)
    assert door.wait_state(door.submit())["state_type"] == "COMPLETED"


def goes_on(run: RunFolder, process: int, jobs: list[int]) -> bool:
    return alive([process]) == [process] and jobs_of(run) == jobs


def ends_well(door: Front, held: tuple[str, RunFolder, int], name: str) -> None:
    """Up again at the same place, the run completes, as if nothing had been."""
    flow_run, run, process = held
    jobs, password = jobs_of(run), door.auth
    port = (door.home / "port").read_text().strip()
    door.start(port=None)
    assert door.url == f"http://127.0.0.1:{port}"
    assert door.auth == password
    assert goes_on(run, process, jobs)
    door.release(name)
    wait_until(lambda: finished(run), "the run finishes")
    assert run.attempts() == [1]
    assert door.wait_state(flow_run)["state_type"] == "COMPLETED"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_its_end_ends_no_run_and_no_job(door: Front, number: signal.Signals) -> None:
    held = _, run, process = held_run(door, number.name)
    jobs, ours = jobs_of(run), list(parts(door).values())
    up = door.process
    assert up is not None
    assert jobs
    up.send_signal(number)
    assert up.wait(60) == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    wait_until(lambda: not alive(ours), "the server and the workers are gone")
    assert goes_on(run, process, jobs)
    if number != signal.SIGKILL:
        assert "no run and no job was ended" in door.output.read_text()
        assert f"1 run goes on: process {process}" in door.output.read_text()
        assert door.up == {}
    ends_well(door, held, number.name)


def test_as_two_services_and_down(door: Front) -> None:
    """What the units of `--install` start."""
    door.stop()
    workers = door.launch("--only", "workers")
    server = door.launch("--only", "server")
    wait_until(lambda: door.up.get("ready"), "the server is ready", PATIENCE_S)
    held = _, run, process = held_run(door, "two")
    jobs = jobs_of(run)
    assert "runs already" in door.command("up").stdout
    done = door.command("down")
    assert done.returncode == 0, done.stderr
    assert "no run and no job was ended" in done.stdout
    assert str(process) in done.stdout
    assert (workers.wait(60), server.wait(60)) == (0, 0)
    assert "does not run here" in door.command("down").stdout
    assert goes_on(run, process, jobs)
    ends_well(door, held, "two")


def test_a_killed_flow_process_is_seen_though_its_jobs_live(door: Front) -> None:
    """Jobs of this machine are its children, and hold none of the worker's pipes."""
    flow_run, run, process = held_run(door, "seen")
    jobs = jobs_of(run)
    os.kill(process, signal.SIGKILL)
    worker = door.home / "logs" / "worker.log"
    wait_until(lambda: "Process exited with status code: -9" in worker.read_text(), "the worker sees it")
    assert jobs_of(run) == jobs
    door.wait_state(flow_run, "CRASHED", "SCHEDULED", "PENDING", "RUNNING")
    door.release("seen")


def test_a_port_that_is_taken_is_left_alone(door: Front) -> None:
    door.stop()
    port = int((door.home / "port").read_text())
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        refused = door.command("up", "--port", str(port))
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert "--port" in refused.stderr
        door.start(port=None)
        assert f":{port}/" not in door.api
        assert f"port {port} is taken, so it is " in door.output.read_text()
        assert door.ask("POST", "flows/count", {}) >= 1


def test_a_server_that_cannot_start_is_told_with_its_last_lines(door: Front) -> None:
    door.stop()
    database = "sqlite+aiosqlite:////proc/no-such-folder/prefect.db"
    done: subprocess.CompletedProcess[str] = door.command(
        "up", "--port", "0", PREFECT_API_DATABASE_CONNECTION_URL=database
    )
    assert done.returncode == 1
    assert "the Prefect server did not start" in done.stderr
    assert "unable to open database file" in done.stderr
    assert "Traceback" not in done.stdout
    assert door.up == {}
