"""Submission: the intent on storage, then the job, then its record. A reader finds the job whatever happens between."""

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from cluster.entry import LEADERS, run_role
from cluster.environment import job_environment, local_devices
from cluster.jobs import JOB_MARK, JobRecord, record_job
from cluster.local import SessionExecutor
from cluster.profile import ClusterError, ClusterProfile
from cluster.slurm import sbatch_parameters, sbatch_text
from slipstream.process import new_incarnation
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, write_json


def jobs_folder(run: RunFolder) -> Path:
    """submitit's files: pickles, job logs, controllers' log."""
    return run.path / "jobs" / "submitit"


def job_log(run: RunFolder, job: JobRecord) -> Path:
    """stdout and stderr of the job's leader."""
    return jobs_folder(run) / f"{job.job_id}_0_log.out"


def check_profile(profile: ClusterProfile, config: RunConfig) -> None:
    """Raises ClusterError where this profile cannot run `config`."""
    if profile.executor == "slurm":
        raise ClusterError(
            f"cluster.profile = {config.cluster.profile!r}: runs on SLURM can be shown (--dry-run) but not started "
            'yet; use cluster.profile = "local"'
        )
    for key, nodes in (("server.nodes", config.server.nodes), ("learner.nodes", config.learner.nodes)):
        if nodes > 1:
            raise ClusterError(
                f"{key} = {nodes}, but cluster.profile = {config.cluster.profile!r} is this machine alone: "
                "set it to 1 or choose a SLURM profile"
            )
    _devices(config, os.environ)


def _devices(config: RunConfig, environment: Mapping[str, str]) -> dict[str, str]:
    gpus = {"server": 0 if config.server.url else config.server.gpus, "learner": config.learner.gpus}
    try:
        return local_devices(gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    except ValueError as error:
        raise ClusterError(
            f"server.gpus = {config.server.gpus}, learner.gpus = {config.learner.gpus}: {error}"
        ) from None


def submit(
    profile: ClusterProfile, run: RunFolder, role: str, attempt: int, config: RunConfig, *, cwd: Path, why: str
) -> JobRecord:
    """Submit the job of `role`; its record is on storage when this returns.

    Args:
        cwd: folder that the job starts in; relative paths of the configuration are relative to it.
        why: in plain words, for the record ("start", "resume").
    """
    check_profile(profile, config)
    incarnation = new_incarnation()
    mark = f"{run.run_id}/a{attempt}/{role}/{incarnation}"
    submitted = time.time()
    intent = {
        "role": role,
        "attempt": attempt,
        "incarnation": incarnation,
        "executor": profile.executor,
        "host": socket.gethostname(),
        "time": submitted,
        "why": why,
    }
    write_json(run.path / "intents" / f"{attempt}-{role}-{incarnation}.json", intent)
    folder = jobs_folder(run)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    environment = job_environment(os.environ, profile.keep_environment)
    environment |= {JOB_MARK: mark, "CUDA_VISIBLE_DEVICES": _devices(config, os.environ)[role]}
    executor = SessionExecutor(folder, environment, cwd, profile.setup)
    job = executor.submit(run_role, role, str(run.path), attempt, LEADERS[role])
    record = JobRecord(
        run_id=run.run_id,
        role=role,
        attempt=attempt,
        incarnation=incarnation,
        executor=profile.executor,
        job_id=job.job_id,
        host=socket.gethostname(),
        start_time=_start_time(int(job.job_id)),
        submitted=submitted,
        why=why,
    )
    record_job(run, record)
    return record


def _start_time(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0  # it is gone already, which job_view then says


def describe(profile: ClusterProfile, run: RunFolder, role: str, attempt: int, config: RunConfig) -> str:
    """What `submit` would do, for --dry-run: the sbatch file, or the local executor's command."""
    folder = jobs_folder(run)
    if profile.executor == "slurm":
        section = config.server if role == "server" else config.learner
        parameters = sbatch_parameters(profile, run.run_id, role, attempt, section.nodes, section.gpus)
        return sbatch_text(folder, parameters, sys.executable)
    devices = _devices(config, os.environ)[role]
    setup = "".join(f"{line}\n" for line in profile.setup)
    return (
        f"{setup}CUDA_VISIBLE_DEVICES={devices} {sys.executable} -m submitit.local._local {folder}\n"
        f"  runs cluster.entry.run_role({role!r}, {str(run.path)!r}, {attempt}, {LEADERS[role]!r})"
    )
