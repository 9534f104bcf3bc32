"""Schedules on a real Prefect server: made, paused and resumed in every way, and skipped while a run still works."""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cluster.local_jobs import cancel_jobs
from slipstream.process import last_lines, spawn, stop
from slipstream.run_folder import RunFolder
from tasks.origin import Origin, write_origin
from tasks.stored import all_jobs
from tests.prefect_server import PASSWORD, PATIENCE_S, ROOT, PrefectServer, environment, password, request
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

INSTANCE = "tester"
CLI = "from flows.cli.main import main; main()"
QUICK = {
    "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
    "PREFECT_SERVER_SERVICES_SCHEDULER_RECENT_DEPLOYMENTS_LOOP_SECONDS": "2",
}


@dataclass
class Site:
    """A Prefect server, and how a user of it calls things."""

    url: str
    home: Path

    def environment(self, **more: str) -> dict[str, str]:
        return environment(
            PREFECT_API_URL=self.url,
            PREFECT_API_AUTH_STRING=PASSWORD,
            PREFECT_HOME=str(self.home / "prefect"),
            SLIPSTREAM_INSTANCE=INSTANCE,
            SLIPSTREAM_HOME=str(self.home / "slipstream"),
            HOME=str(self.home),
            **more,
        )

    def slipstream(self, *argv: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        return self._call([sys.executable, "-c", CLI, *argv], cwd)

    def prefect(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return self._call([sys.executable, "-m", "prefect", *argv], ROOT)

    def _call(self, argv: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv, cwd=cwd, env=self.environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    def ask(self, method: str, route: str, body: Any = None) -> Any:
        return request(method, f"{self.url}/{route}", body, password())

    def deployment(self, name: str) -> dict[str, Any]:
        found = self.ask("POST", "deployments/filter", {"deployments": {"name": {"like_": f"@{name}"}}})
        (one,) = [deployment for deployment in found if deployment["name"].endswith(f"@{name}")]
        return dict(one)

    def start_now(self, flow_run: str) -> str:
        """What the clock would do to a flow run that the scheduler has made."""
        state = {"type": "SCHEDULED", "state_details": {"scheduled_time": datetime.now(UTC).isoformat()}}
        self.ask("POST", f"flow_runs/{flow_run}/set_state", {"state": state})
        return flow_run

    def state_of(self, flow_run: str) -> dict[str, Any]:
        return dict(self.ask("GET", f"flow_runs/{flow_run}")["state"])

    def worker(self, pool: str, log: Path, **settings: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process"]
        return spawn(argv, log, self.environment(PREFECT_WORKER_QUERY_SECONDS="1", **settings))

    def flow_runs(self, deployment: str, *states: str) -> list[dict[str, Any]]:
        wanted: dict[str, Any] = {"deployments": {"id": {"any_": [deployment]}}, "sort": "EXPECTED_START_TIME_ASC"}
        wanted |= {"flow_runs": {"state": {"type": {"any_": states}}}} if states else {}
        return list(self.ask("POST", "flow_runs/filter", wanted))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("home")
    server = PrefectServer(tmp_path_factory.mktemp("prefect-server"), **QUICK)
    try:
        found = Site(server.start().url, home)
        for pool in (f"slipstream-{INSTANCE}", f"slipstream-{INSTANCE}-care"):
            found.ask("POST", "work_pools/", {"name": pool, "type": "process"})
        yield found
    finally:
        server.kill()


def added(site: Site, name: str, *more: str, cwd: Path = ROOT) -> dict[str, Any]:
    """A schedule of the demo, far from its next start unless `more` says otherwise."""
    argv = ("schedule", "add", "demo", "--cron", "0 20 * * FRI", "--timezone", "Europe/Berlin", "--name", name, *more)
    done = site.slipstream(*argv, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return site.deployment(name)


def test_a_schedule_is_a_deployment_with_everything_in_it(site: Site, tmp_path: Path) -> None:
    done = site.slipstream(
        "schedule", "add", "demo", "--cron", "30 2 * * *", "--timezone", "America/New_York", "--paused",
        "--set", f"storage.root={tmp_path}", "--set", "trainer.max_steps=7", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"train/{INSTANCE}.demo@demo on {site.url}" in done.stdout
    assert "time zone America/New_York\n" in done.stdout
    assert "demo  paused  30 2 * * * (America/New_York)" in done.stdout
    assert done.stdout.count("next, once it is resumed  ") == 3
    assert "the clocks of America/New_York are set forward over 02:30: Prefect starts 60 minutes later" in done.stderr
    found = site.deployment("demo")
    assert found["name"] == f"{INSTANCE}.demo@demo"
    assert set(found["tags"]) == {"slipstream", f"slipstream:{INSTANCE}"}
    assert found["work_pool_name"] == f"slipstream-{INSTANCE}"
    assert found["parameters"]["config"]["trainer"]["max_steps"] == 7
    assert found["parameters"]["config"]["server"]["startup_timeout"] > 0, "defaults are in it, too"
    assert found["enforce_parameter_schema"]
    assert "config" in found["parameter_openapi_schema"]["properties"]
    assert found["pull_steps"] == [{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}]
    (schedule,) = found["schedules"]
    assert (schedule["schedule"]["cron"], schedule["schedule"]["timezone"]) == ("30 2 * * *", "America/New_York")
    assert schedule["parameters"] == {}
    assert not schedule["active"]
    again = site.slipstream("schedule", "add", "demo", "--cron", "0 0 * * *", "--timezone", "UTC")
    assert again.returncode == 2
    assert f"--name = 'demo': is taken by train/{INSTANCE}.demo@demo" in again.stderr.replace('"', "'")
    other = site.slipstream("schedule", "list", "--instance", "somebody")
    assert "instance 'somebody' has no schedule" in other.stdout
    assert site.slipstream("schedule", "remove", "demo", "--instance", "somebody").returncode == 2
    gone = site.slipstream("schedule", "remove", "demo")
    assert f"removed train/{INSTANCE}.demo@demo; runs that it has started go on" in gone.stdout
    assert site.ask("POST", "deployments/filter", {"deployments": {"id": {"any_": [found["id"]]}}}) == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("demo", "--cron", "0 20 * * FRY", "--timezone", "UTC"), ["--cron", "'FRY' is no day of the week", "SUN to SAT"]),
        (("demo", "--cron", "0 20 * * *", "--timezone", "Europe/Berln"), ["--timezone", "did you mean Europe/Berlin"]),
        (("demmo", "--cron", "0 20 * * *", "--timezone", "UTC"), ["PRESET", "there is no such preset; there are demo"]),
        (
            ("demo", "--cron", "0 20 * * *", "--timezone", "UTC", "--instance", "poolless"),
            ["no work pool 'slipstream-poolless'", "slipstream deploy"],
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_registered(
    site: Site, argv: tuple[str, ...], words: list[str]
) -> None:
    before = site.ask("POST", "deployments/count", {})
    done = site.slipstream("schedule", "add", *argv)
    assert done.returncode in (1, 2), done.stdout
    assert [word for word in words if word not in done.stderr] == [], done.stderr
    assert "Traceback" not in done.stderr
    assert site.ask("POST", "deployments/count", {}) == before


def test_the_commands_of_the_page(site: Site, tmp_path: Path) -> None:
    """In the order of the page, in a folder that is not the checkout."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "runs").mkdir()
    page = (ROOT / "docs" / "schedules.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) >= 9
    for line in lines:
        program, *argv = shlex.split(line)
        assert program == "slipstream"
        done = site.slipstream(*argv, cwd=tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    weekly, sweeps = site.deployment("weekly"), site.deployment("sweeps")
    listed = site.slipstream("schedule", "list").stdout
    assert "weekly  active  0 20 * * FRI (Europe/Berlin)" in listed
    assert f"sweep/{INSTANCE}.demo@sweeps" in listed
    assert re.search(r"next  Fri \d{4}-\d\d-\d\d 20:00 \(\+0[12]00\)  =  \d{4}-\d\d-\d\d 1[89]:00 UTC", listed)
    assert weekly["pull_steps"][0]["prefect.deployments.steps.set_working_directory"]["directory"] == str(ROOT)
    assert sweeps["pull_steps"][0]["prefect.deployments.steps.set_working_directory"]["directory"] == str(tmp_path)
    assert sweeps["entrypoint"] == f"{ROOT}/flows/sweep.py:sweep"
    assert sweeps["work_pool_name"] == f"slipstream-{INSTANCE}-care"
    assert "monthly" not in listed
    here = site.slipstream("schedule", "add", "demo", "--cron", "0 20 * * *", "--name", "here", "--paused")
    assert ", this machine's (--timezone names another)" in here.stdout


def test_pause_and_resume_keep_the_parameters(site: Site, tmp_path: Path) -> None:
    """In Prefect's UI, by its command line, and by ours: what is scheduled next has all parameters."""
    found = added(site, "kept", "--set", f"storage.root={tmp_path}", "--set", "trainer.max_steps=7")
    (schedule,) = found["schedules"]
    wanted = found["parameters"]
    route = f"deployments/{found['id']}/schedules/{schedule['id']}"
    name = f"train/{found['name']}"
    scheduled: set[str] = set()

    def from_the_ui(active: bool) -> None:  # what its toggle sends
        body = {"active": active, "schedule": schedule["schedule"], "slug": schedule["slug"], "parameters": {}}
        site.ask("PATCH", route, body)

    def by_prefect(active: bool) -> None:
        done = site.prefect("deployment", "schedule", "resume" if active else "pause", name, schedule["id"])
        assert done.returncode == 0, done.stdout + done.stderr

    def of_the_deployment(active: bool) -> None:
        site.ask("POST", f"deployments/{found['id']}/{'resume' if active else 'pause'}_deployment")

    def by_us(active: bool) -> None:
        done = site.slipstream("schedule", "resume" if active else "pause", "kept")
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"kept  {'active' if active else 'paused'}  0 20 * * FRI (Europe/Berlin)" in done.stdout

    def removes_late() -> None:
        """What Prefect's scheduler, which had read the schedule before the pause, has written after it: it keeps those."""
        time.sleep(3 * float(QUICK["PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS"]))
        for run in site.flow_runs(found["id"], "SCHEDULED"):
            if run["id"] not in scheduled:
                site.ask("DELETE", f"flow_runs/{run['id']}")

    for toggle in (from_the_ui, by_prefect, of_the_deployment, by_us):
        runs = wait_until(lambda: site.flow_runs(found["id"], "SCHEDULED"), "flow runs are scheduled")
        assert all(run["auto_scheduled"] and run["parameters"] == wanted for run in runs), toggle.__name__
        assert not scheduled & {run["id"] for run in runs}, "of before the pause"
        scheduled |= {run["id"] for run in runs}
        toggle(False)
        assert "kept  paused  0 20 * * FRI (Europe/Berlin)" in site.slipstream("schedule", "list").stdout
        removes_late()
        wait_until(lambda: not site.flow_runs(found["id"], "SCHEDULED"), "a paused schedule has none")
        toggle(True)
    assert len(scheduled) >= 4
    assert site.deployment("kept")["parameters"] == wanted
    site.ask("POST", f"deployments/{found['id']}/pause_deployment")
    by_us(True)


def test_a_start_is_skipped_while_the_run_before_works(site: Site, tmp_path: Path) -> None:
    """The first start runs, the second ends as Skipped and names it."""
    found = added(site, "often", "--set", f"storage.root={tmp_path}", "--set", "name=m")
    runs = wait_until(lambda: site.flow_runs(found["id"], "SCHEDULED"), "flow runs are scheduled")
    assert len(runs) >= 2

    def start_now(number: int) -> str:
        return site.start_now(runs[number]["id"])

    state_of, log = site.state_of, tmp_path / "worker.log"
    worker = site.worker(f"slipstream-{INSTANCE}", log, STANDIN="learner:wait", STANDIN_LEADERS="standins")
    try:
        first = start_now(0)
        run = RunFolder(wait_until(lambda: next(tmp_path.glob("m-*/fences"), None), f"a run is made, see {log}").parent)
        second = start_now(1)
        wait_until(lambda: state_of(second)["type"] == "COMPLETED", f"the second start ends, see {log}")
        assert state_of(second)["name"] == "Skipped"
        assert f"{run.run_id} of the same schedule still works: nothing was started" in state_of(second)["message"]
        assert [path.name for path in tmp_path.glob("m-*")] == [run.run_id]
        (run.path / "go").touch()
        wait_until(lambda: state_of(first)["type"] == "COMPLETED", f"the first run ends, see {log}")
        assert state_of(first)["name"] == "Completed"
    finally:
        site.slipstream("schedule", "remove", "often")
        stop(worker, 30)
        for path in tmp_path.glob("m-*"):
            cancel_jobs(all_jobs(RunFolder(path)), grace_s=0.1)


def test_a_sweep_is_skipped_while_the_one_before_works(site: Site, tmp_path: Path) -> None:
    done = site.slipstream(
        "schedule", "add", "examples/sweeps/demo.toml", "--cron", "0 20 * * FRI", "--timezone", "UTC", "--name", "grid",
        "--set", f"storage.root={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = site.deployment("grid")
    before = RunFolder(tmp_path / "before")
    before.path.mkdir()
    write_origin(before, Origin(deployment=found["id"]))
    runs = wait_until(lambda: site.flow_runs(found["id"], "SCHEDULED"), "flow runs are scheduled")
    log = tmp_path / "worker.log"
    worker = site.worker(f"slipstream-{INSTANCE}-care", log)
    try:
        started = site.start_now(runs[0]["id"])
        ended = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
        wait_until(lambda: site.state_of(started)["type"] in ended, f"the start ends, see {log}")
        state = site.state_of(started)
        said = (state["name"], state["message"])
        assert said == ("Skipped", "before of the same schedule still works: nothing was started"), last_lines(log)
        assert not list(tmp_path.glob("*/sweep.toml"))
    finally:
        site.slipstream("schedule", "remove", "grid")
        stop(worker, 30)
