"""A learner of two SLURM nodes, each with a network of its own, started by plain sbatch and srun."""

import os
import signal
from pathlib import Path

import pytest

from slipstream.run_folder import RunFolder, read_json
from slurm.bed import Bed
from tests.learner_nodes import exit_of
from tests.learner_process import step_of
from tests.serving_process import wait_for
from tests.standins.replayed_learner import PAUSE_ENV

pytestmark = [pytest.mark.slurm, pytest.mark.integration]

ROOT = Path(__file__).resolve().parents[2]
PYTHON = str(ROOT / ".venv" / "bin" / "python")
LEADER = """#!/bin/bash
export SLIPSTREAM_NODE_RANK=$SLURM_NODEID SLIPSTREAM_NODES=$SLURM_JOB_NUM_NODES SLIPSTREAM_INCARNATION=job$SLURM_JOB_ID
export SLIPSTREAM_HOST=$(hostname -i) PYTHONPATH={root} OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE {pause}
exec {python} -m slipstream.learner.leader {run} --attempt 1
"""


def submit(bed: Bed, name: str, max_steps: int, pause: float) -> tuple[RunFolder, str]:
    """A run of user bed1 and the id of its job of two nodes with one rank each."""
    folder = bed.shared / name
    arguments = f"Path({str(folder)!r}), 'run', 2, 1, {max_steps}"
    make = f"from pathlib import Path; from tests.learner_nodes import nodes_run; nodes_run({arguments})"
    bed.run("login", [PYTHON, "-c", make], user="bed1", env={"PYTHONPATH": str(ROOT)}, seconds=120)
    run = RunFolder(folder / "runs" / "run")
    leader = LEADER.format(root=ROOT, python=PYTHON, run=run.path, pause=f"{PAUSE_ENV}={pause}")
    script = f"srun --unbuffered bash -c {_quoted(leader)}"
    options = ["--parsable", "--nodes=2", "--ntasks-per-node=1", "--nodelist=n1,n2", f"--output={folder}/job.log"]
    return run, bed.run("login", ["sbatch", *options, "--wrap", script], user="bed1").strip()


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def gone(bed: Bed) -> bool:
    return not [process for process in bed.processes("bed1") if "slipstream" in process.command]


def test_two_nodes_of_a_job_train(bed: Bed) -> None:
    run, job = submit(bed, "train", 4, 0)
    wait_for(lambda: exit_of(run, 0) and exit_of(run, 1), f"the end of job {job}", 300)
    records = [exit_of(run, node) or {} for node in (0, 1)]
    assert [record["reason"] for record in records] == ["finished", "finished"], records
    assert [record["host"] for record in records] == ["n1", "n2"]
    meeting = read_json(run.meeting_file(f"job{job}"))
    assert meeting["host"].startswith("10."), meeting
    assert len(read_json(run.path / "result.json")["losses"]) == 4
    wait_for(lambda: gone(bed), "the end of every process", 60)


def test_the_death_of_one_nodes_leader_frees_the_other_node(bed: Bed) -> None:
    run, job = submit(bed, "killed", 10_000, 0.2)
    wait_for(lambda: step_of(run) >= 2, f"the second step of job {job}", 300)
    leaders = [p for p in bed.processes("bed1") if "slipstream.learner.leader" in p.command and p.machine == "n2"]
    assert leaders
    for process in leaders:
        os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: exit_of(run, 0), "the other leader's record", 120)
    record = exit_of(run, 0) or {}
    assert record["host"] == "n1"
    assert record["reason"].startswith("node n2: the leader of node 1 died without a word")
    wait_for(lambda: gone(bed), "the end of every process", 120)
