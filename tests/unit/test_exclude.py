"""A node that was at fault twice, from its leader's word to sbatch's --exclude."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import tasks.supervise
from cluster.backend import JobRequest
from cluster.jobs import JobRecord, JobState, JobView, record_job
from cluster.profile import ClusterProfile
from cluster.slurm import sbatch_parameters
from slipstream.config_file import dump_config, parse_config
from slipstream.run_folder import RunFolder
from tasks.outcome import RunFailed
from tasks.supervise import supervise

NODES = ("n1", "n2", "n3", "n4")


class Fake:
    """A cluster on which every learner ends with the same word."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.requests: list[JobRequest] = []

    def submit(self, run: RunFolder, request: JobRequest) -> JobRecord:
        self.requests.append(request)
        job = JobRecord(
            run.run_id,
            request.role,
            request.attempt,
            request.incarnation,
            "slurm",
            str(len(self.requests)),
            "h",
            0,
            0,
            "",
        )
        record_job(run, job)
        return job

    def look(self, run: RunFolder, jobs: Sequence[JobRecord]) -> dict[str, JobView]:
        dead = JobView(JobState.FAILED, 1, self.reason, nodes=NODES)
        return {job.incarnation: dead if job.role == "learner" else JobView(JobState.RUNNING) for job in jobs}

    def cancel(self, run: RunFolder, jobs: Sequence[JobRecord]) -> list[JobRecord]:
        return []


@pytest.mark.parametrize(
    ("reason", "excluded"),
    [
        ("node n2: 7 of 8 GPUs", "n2"),
        ("node n3.lab.example: the leader of node 2 died without a word", "n3"),
        ("node 1 (n2) ended: rank 3: CUDA error", "n2"),
        ("rank 3: CUDA error", None),
    ],
)
def test_only_the_node_at_fault_reaches_sbatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, excluded: str | None
) -> None:
    config = parse_config(
        {
            "model": {"name": "m"},
            "data": {"source": "d"},
            "server": {"gpus": 0},
            "learner": {"gpus": 8, "processes_per_node": 8, "nodes": 4},
            "recovery": {"max_restarts": 4, "backoff": 0},
        }
    )
    run = RunFolder.create(tmp_path, "r")
    run.run_file.write_text(dump_config(config))
    run.begin_attempt(None, 0)
    cluster = Fake(reason)
    monkeypatch.setattr(tasks.supervise, "backend_for", lambda run: cluster)
    monkeypatch.setattr(tasks.supervise, "stop_jobs", lambda run: None)
    with pytest.raises(RunFailed, match=re.escape(reason)):
        supervise(run, poll_s=0)
    learners = [request for request in cluster.requests if request.role == "learner"]
    found = [
        sbatch_parameters(
            ClusterProfile(executor="slurm"), run, "learner", one.attempt, "aa", config, tmp_path, one.exclude
        ).get("exclude")
        for one in learners
    ]
    assert found == [None, None, excluded]
