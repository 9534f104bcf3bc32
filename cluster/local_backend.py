"""Jobs on this machine, through submitit's local executor."""

import contextlib
import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from cluster.backend import KILL_AFTER_S, JobRequest
from cluster.entry import entry_command
from cluster.environment import code_root, job_environment, local_devices
from cluster.intents import open_intents, record_of, void_intent, write_intent, writer_lives
from cluster.jobs import JOB_MARK, JobRecord, JobView, read_jobs, record_job
from cluster.local import SessionExecutor
from cluster.local_jobs import cancel_jobs, job_processes, job_view, started
from cluster.profile import ClusterError, ClusterProfile
from slipstream.process import INCARNATION_ENV
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder

LATE_S = 60.0


def jobs_folder(run: RunFolder) -> Path:
    """submitit's files: job logs, controllers' log."""
    return run.path / "jobs" / "submitit"


class LocalBackend:
    """The twin of the SLURM backend on one machine."""

    def __init__(self, profile: ClusterProfile) -> None:
        self.profile = profile

    def check(self, config: RunConfig) -> None:
        profile = f"cluster.profile = {config.cluster.profile!r}"
        for key, nodes in (("server.nodes", config.server.nodes), ("learner.nodes", config.learner.nodes)):
            if nodes > 1:
                raise ClusterError(
                    f"{key} = {nodes}, but {profile} is this machine alone: set it to 1 or choose a SLURM profile"
                )
        if config.cluster.shape == "one_allocation":
            raise ClusterError(
                f'cluster.shape = "one_allocation", but {profile} has no allocations: use "separate" or a SLURM profile'
            )
        _devices(config, os.environ)

    def submit(self, run: RunFolder, request: JobRequest) -> JobRecord:
        self.check(request.config)
        identity = (request.role, request.attempt, request.incarnation)
        intent = write_intent(run, *identity, self.profile.executor, request.why)
        folder = jobs_folder(run)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        environment = job_environment(os.environ, self.profile.keep_environment)
        environment |= {
            JOB_MARK: record_of(run, intent, "0").mark,
            INCARNATION_ENV: request.incarnation,
            "CUDA_VISIBLE_DEVICES": _devices(request.config, os.environ)[request.role],
        }
        if code := code_root():
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (code, environment.get("PYTHONPATH"))))
        if self.profile.vllm_python:
            environment["SLIPSTREAM_VLLM_PYTHON"] = self.profile.vllm_python
        executor = SessionExecutor(folder, environment, request.cwd, self.profile.setup)
        pid = executor.submit_command(shlex.join(entry_command(sys.executable, run, *identity, 1)))
        record = record_of(run, intent, str(pid), _start_time(pid))
        record_job(run, record)
        return record

    def describe(self, run: RunFolder, role: str, attempt: int, config: RunConfig, cwd: Path) -> str:
        """The command that `submit` would start."""
        setup = "".join(f"{line}\n" for line in self.profile.setup)
        command = shlex.join(entry_command(sys.executable, run, role, attempt, "incarnation", 1))
        return (
            f"{setup}CUDA_VISIBLE_DEVICES={_devices(config, os.environ)[role]} "
            f"{sys.executable} -m submitit.local._local {jobs_folder(run)}\n  runs {command}"
        )

    def look(self, run: RunFolder, jobs: Sequence[JobRecord]) -> dict[str, JobView]:
        return {job.incarnation: job_view(run, job) for job in jobs}

    def adopt(self, run: RunFolder) -> list[JobRecord]:
        """Jobs of this host; of another nothing can be known here."""
        recorded = {job.incarnation for attempt in run.attempts() for job in read_jobs(run, attempt)}
        adopted = []
        for intent in open_intents(run, recorded):
            if intent.get("executor") != self.profile.executor or intent.get("host") != socket.gethostname():
                continue
            # the controller was there before its leader
            family = sorted(job_processes(record_of(run, intent, "0")), key=_born)
            if family:
                record = record_of(run, intent, str(family[0].pid), _born(family[0]))
                record_job(run, record)
                adopted.append(record)
            elif not writer_lives(intent) or time.time() > intent["time"] + LATE_S:
                void_intent(run, intent)
        return adopted

    def cancel(self, run: RunFolder, jobs: Sequence[JobRecord], kill_after_s: float = KILL_AFTER_S) -> list[JobRecord]:
        return cancel_jobs(jobs, kill_after_s)


def _devices(config: RunConfig, environment: Mapping[str, str]) -> dict[str, str]:
    gpus = {"server": 0 if config.server.url else config.server.gpus, "learner": config.learner.gpus}
    try:
        return local_devices(gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    except ValueError as error:
        raise ClusterError(
            f"server.gpus = {config.server.gpus}, learner.gpus = {config.learner.gpus}: {error}"
        ) from None


def _start_time(pid: int) -> float:
    try:
        return started(psutil.Process(pid))
    except psutil.Error:
        return 0.0  # it is gone already, which job_view then says


def _born(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        return started(process)
    return 0.0
