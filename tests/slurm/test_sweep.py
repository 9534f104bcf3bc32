"""A sweep whose cells are jobs of a real SLURM, with doubles of server and learner."""

import os
import subprocess
import time
from dataclasses import replace

import pytest

from slipstream.metrics.audit_records import audit_run
from slipstream.run_folder import RunFolder, read_json
from slurm.bed import Bed
from slurm.bed.bed import ROOT
from tests.bed_left import left
from tests.bed_prefect import PYTHON, USER
from tests.chaos.drive import GONE_S, write_files
from tests.chaos.faults import SEPARATE
from tests.chaos.plan import scenario_of
from tests.doubles.sweep import make_sweep
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.integration]

PATIENCE_S = 300.0
STEP_S = 4.0


def test_a_killed_driver_s_cells_go_on_in_their_jobs_and_another_one_ends_the_sweep(bed: Bed) -> None:
    folder = bed.shared / f"sweep-{time.time_ns() % 10**9}"
    scenario = replace(scenario_of("rank killed", SEPARATE), injections=(), step_s=STEP_S)
    write_files(folder, scenario).rename(folder / "base.toml")
    sweep = make_sweep(folder, {"trainer.max_staleness": [6, 12]}, cells_at_once=2)
    uid = bed.description.uid(USER)
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, uid, uid)
    cells = [sweep.run("c00"), sweep.run("c01")]

    def drive() -> "subprocess.Popen[str]":
        command = [PYTHON, "-m", "tests.doubles.sweep", str(sweep.path)]
        env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        env["SLIPSTREAM_HOME"] = str(folder / "home")
        with open(folder / "driver.log", "a") as log:
            return bed.popen(
                "login", command, user=USER, cwd=str(ROOT), env=env, stdout=log, stderr=subprocess.STDOUT
            )  # fmt: skip

    def said() -> str:
        return "\n".join(path.read_text() for path in [folder / "driver.log", *sweep.path.glob("logs/*")])

    def jobs() -> set[str]:
        return set(bed.command("squeue", "-h", "-u", USER, "-o", "%i %k").splitlines())

    first = drive()
    try:

        def both_train() -> bool:
            assert first.poll() is None, said()
            beats = [read_json(run.heartbeat_file("learner")) or {} for run in cells]
            return all(int(beat.get("step") or 0) >= 2 for beat in beats)

        wait_until(both_train, "both cells train", PATIENCE_S)
        theirs = jobs()
        runs = [line.split(":")[2] for line in theirs]
        assert sorted(runs) == sorted(run.run_id for run in cells for _ in ("server", "learner"))
        leader = str((read_json(sweep.path / "leases" / "1.json") or {})["pid"])
        bed.run("login", ["kill", "-9", leader], user=USER)
        first.wait(60)
        assert jobs() == theirs
        assert drive().wait(PATIENCE_S) == 0, said()
    finally:
        bed.command("scancel", "--user", USER)
    for run in cells:
        assert_done(run, scenario.prompts * scenario.epochs)
    assert sweep.outcome()["kind"] == "finish"
    assert (sweep.path / "best.toml").is_file()
    assert left(bed, USER, GONE_S) == []


def assert_done(run: RunFolder, prompts: int) -> None:
    """Finished in its first attempt, with nothing lost or counted twice."""
    assert (read_json(run.path / "outcome.json") or {})["kind"] == "finish"
    assert run.attempts() == [1]
    audit = audit_run(run)
    assert (list(audit.findings), audit.settled) == ([], prompts)
