"""A run that a worker started on a real SLURM, whose worker and flow die: it goes on without a person."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from flows.names import instance_tag, runs_pool
from slipstream.config_file import load_config
from slipstream.metrics.audit_records import audit_run
from slipstream.run_folder import RunFolder, read_json
from slurm.bed import Bed
from slurm.bed.bed import ROOT
from slurm.bed.machines import inside
from tasks.lease import newest_term
from tests.bed_left import left
from tests.bed_prefect import PYTHON, USER, BedPrefect
from tests.chaos.drive import GONE_S, write_files
from tests.chaos.faults import SEPARATE
from tests.chaos.plan import scenario_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.integration, pytest.mark.timeout(900)]

INSTANCE = "bed"
PATIENCE_S = 300.0
STEP_S = 4.0
CLI = "from flows.cli.main import main; main()"


@pytest.fixture
def prefect(bed: Bed) -> Iterator[BedPrefect]:
    folder = bed.shared / f"reconcile-{time.time_ns() % 10**9}"
    folder.mkdir()
    os.chown(folder, bed.description.uid(USER), bed.description.uid(USER))
    found = BedPrefect(bed, folder, SLIPSTREAM_INSTANCE=INSTANCE, STANDIN_LEADERS="doubles")
    try:
        yield found
    finally:
        found.close()
        bed.command("scancel", "--user", USER)


def test_worker_and_flow_are_killed_and_the_run_completes_by_itself(bed: Bed, prefect: BedPrefect) -> None:
    """No hook runs and no person acts: the same flow run leads the same run again, by the same jobs, to its end."""
    scenario = replace(scenario_of("rank killed", SEPARATE), injections=(), step_s=STEP_S)
    folder = prefect.folder / "run"
    config_file = write_files(folder, scenario)
    uid = bed.description.uid(USER)
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, uid, uid)
    prefect.start()
    pool = runs_pool(INSTANCE)
    prefect.call("POST", "work_pools/", {"name": pool, "type": "process"})
    flow = prefect.call("POST", "flows/", {"name": "train"})
    made: dict[str, object] = {"name": f"{INSTANCE}.test", "flow_id": flow["id"], "work_pool_name": pool}
    made["pull_steps"] = [{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}]
    made |= {"entrypoint": "flows/train.py:train", "tags": [instance_tag(INSTANCE)], "enforce_parameter_schema": False}
    deployment = prefect.call("POST", "deployments/", made)["id"]
    worker_words = (PYTHON, "-m", "prefect", "worker", "start", "--type", "process", "--pool", pool)
    worker = prefect.popen(*worker_words)

    parameters = {"config": load_config(config_file).model_dump(mode="json")}
    asked = {"parameters": parameters, "state": {"type": "SCHEDULED"}, "enforce_parameter_schema": False}
    flow_run = prefect.call("POST", f"deployments/{deployment}/create_flow_run", asked)["id"]
    run = RunFolder(folder / "runs" / f"{load_config(config_file).name}-{flow_run.replace('-', '')[-12:]}")

    def step() -> int:
        return int((read_json(run.heartbeat_file("learner")) or {}).get("step") or 0)

    wait_until(lambda: step() >= 2, f"it trains: {prefect.folder}", PATIENCE_S)
    comments = bed.command("squeue", "-h", "-u", USER, "-o", "%k").split()
    jobs = run.assignment()
    assert sorted(comments) == sorted(
        f"slipstream:{INSTANCE}:{run.run_id}:1:{role}:{jobs[role]}" for role in ("server", "learner")
    )
    leader = str((read_json(run.path / "leases" / "1.json") or {})["pid"])
    prefect.kill(worker)
    bed.run("login", ["kill", "-9", leader], user=USER)

    def state() -> str:
        return str(prefect.call("GET", f"flow_runs/{flow_run}")["state_type"])

    assert state() == "RUNNING", "nobody has told Prefect"
    worker = prefect.popen(*worker_words)  # as its service does

    def completed() -> bool:
        """A pass, as a timer makes it."""
        code = prefect.popen(PYTHON, "-c", CLI, "reconcile").wait(PATIENCE_S)
        assert code == 0, prefect.folder
        return state() == "COMPLETED"

    wait_until(completed, f"it completes: {prefect.folder}", PATIENCE_S)
    assert prefect.call("GET", f"flow_runs/{flow_run}")["run_count"] == 2
    assert (read_json(run.path / "outcome.json") or {})["kind"] == "finish"
    assert (run.attempts(), run.assignment(), newest_term(run)) == ([1], jobs, 2)
    audit = audit_run(run)
    assert list(audit.findings) == []
    assert audit.settled == scenario.prompts * scenario.epochs
    # its flow has told its state, and ends once it has sent its log: without a server it would try for a minute
    wait_until(lambda: not psutil.Process(inside(worker.pid)).children(), "its flow ends", PATIENCE_S)
    prefect.close()
    assert left(bed, USER, GONE_S) == []
