"""`slipstream up` on the login machine of a real SLURM, and a browser that reaches it as through `ssh -L`."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from slipstream.config_file import load_config
from slipstream.process import last_lines
from slipstream.run_folder import RunFolder, read_json, write_json
from slurm.bed import Bed
from slurm.bed.machines import pid_of
from tests.bed_left import left
from tests.bed_prefect import PYTHON, USER, BedPrefect
from tests.bed_tunnel import tunnel
from tests.browser.session import prefect_ui
from tests.chaos.drive import SETTINGS, write_files
from tests.chaos.faults import SEPARATE
from tests.chaos.plan import scenario_of
from tests.doubles.events import PLAN
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.integration, pytest.mark.timeout(900)]

INSTANCE = "bed"
PATIENCE_S = 300.0
FLOWS_GONE_S = 120.0  # a pass of reconciliation that has lost its server tries to tell it for a while
CLI = "from flows.cli.main import main; main()"


HOME = "/tmp/slipstream"  # of the login machine alone: SQLite's place is a local disk


def home_of(bed: Bed) -> Path:
    """Where this host has HOME of the login machine."""
    return bed.description.path / "tmp" / "login" / Path(HOME).name


@pytest.fixture
def login(bed: Bed, tmp_path: Path) -> Iterator[BedPrefect]:
    """Commands of `bed1` on the login machine; its logs are kept beside what the browser leaves."""
    folder = bed.shared / f"front-{time.time_ns() % 10**9}"
    folder.mkdir()
    found = BedPrefect(
        bed,
        folder,
        SLIPSTREAM_INSTANCE=INSTANCE,
        SLIPSTREAM_HOME=HOME,
        STANDIN_LEADERS="doubles",
        HOME=str(folder),
    )
    for name in [name for name in found.environment if name.startswith("PREFECT_") and "SERVER" not in name]:
        del found.environment[name]  # `slipstream up` needs none
    del found.environment["PREFECT_SERVER_API_AUTH_STRING"]
    try:
        yield found
    finally:
        shutil.copytree(home_of(bed) / "logs", tmp_path / "logs", dirs_exist_ok=True)
        shutil.copy(folder / "prefect.log", tmp_path)
        found.close()
        bed.command("scancel", "--user", USER)


def test_a_run_is_started_and_cancelled_from_a_browser(
    bed: Bed, login: BedPrefect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jobs are this user's, on compute nodes, as the page says; after the cancel there is none."""
    folder = login.folder / "run"
    for limit in ("step_timeout", "sync_timeout"):  # a learner that is held is not one that hangs
        monkeypatch.setitem(SETTINGS["learner"], limit, 3600.0)
    scenario = scenario_of("rank killed", SEPARATE)
    profile = {**scenario.profile, "time_limit": 60}
    config_file = write_files(folder, replace(scenario, injections=(), step_s=0.2, profile=profile))
    write_json(folder / "runs" / PLAN, [{"id": "held", "event": "sync.end", "count": 2, "deeds": ["block"]}])
    uid = bed.description.uid(USER)
    for path in [login.folder, *login.folder.rglob("*")]:
        os.chown(path, uid, uid)
    home = home_of(bed)
    process = login.popen(PYTHON, "-c", CLI, "up", "--preset", str(config_file), "--port", "0")

    def up() -> dict[str, object]:
        assert process.poll() is None, last_lines(login.folder / "prefect.log")
        path = home / "up.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        return found if found.get("ready") else {}

    ready = wait_until(up, f"slipstream up is ready: {login.folder}/prefect.log", PATIENCE_S)
    port = urlsplit(str(ready["url"])).port
    assert port
    auth = (home / "auth").read_text().strip()
    name = load_config(config_file).name
    with (
        tunnel(pid_of(bed.description, bed.description.machine("login")), port) as here,
        prefect_ui(f"http://127.0.0.1:{here}", auth, tmp_path) as ui,
    ):
        page = ui.deployment(f"{INSTANCE}.{config_file.stem}")
        run_page = page.started(page.custom_run().submit())
        run_page.wait_state("Running", seconds=PATIENCE_S)
        run = RunFolder(folder / "runs" / f"{name}-{run_page.flow_run_id.replace('-', '')[-12:]}")
        wait_until((run.path / "events-test" / "reached-held.json").exists, f"it trains: {login.folder}", PATIENCE_S)
        listed = dict(line.split() for line in bed.command("squeue", "-h", "-u", USER, "-o", "%i %T").splitlines())
        assert list(listed.values()) == ["RUNNING", "RUNNING"]
        assert run_page.artifacts(3)["slipstream-jobs"]
        jobs = run_page.artifact("slipstream-jobs")
        running = {(job, "running") for job in listed}
        wait_until(lambda: {(row["job"], row["state"]) for row in jobs.table()} == running, f"the page shows {running}")
        run_page = ui.flow_run(run_page.flow_run_id)
        run_page.cancel()
        run_page.wait_state("Cancelled", seconds=PATIENCE_S)
        assert bed.command("squeue", "-h", "-u", USER) == ""
        assert (read_json(run.path / "outcome.json") or {})["kind"] == "cancelled"
    assert login.popen(PYTHON, "-c", CLI, "down").wait(120) == 0
    assert left(bed, USER, FLOWS_GONE_S) == []
