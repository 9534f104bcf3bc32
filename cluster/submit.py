"""Submission and description of jobs in one call each, for those who hold no backend."""

from pathlib import Path

from cluster.backend import JobRequest
from cluster.backends import backend_of
from cluster.jobs import JobRecord
from cluster.profile import ClusterProfile
from slipstream.process import new_incarnation
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder


def jobs_folder(run: RunFolder) -> Path:
    """submitit's files: batch files, job logs, controllers' log."""
    return run.path / "jobs" / "submitit"


def job_log(run: RunFolder, job: JobRecord, node: int = 0) -> Path:
    """stdout and stderr of the job's leader on its `node`-th node."""
    return jobs_folder(run) / f"{job.job_id}_{node}_log.out"


def check_profile(profile: ClusterProfile, config: RunConfig) -> None:
    """Raises ClusterError where this profile cannot run `config`."""
    backend_of(profile).check(config)


def submit(
    profile: ClusterProfile, run: RunFolder, role: str, attempt: int, config: RunConfig, *, cwd: Path, why: str
) -> JobRecord:
    """Submit the job of `role`; its record is on storage when this returns.

    Args:
        cwd: folder that the job starts in; relative paths of the configuration are relative to it.
        why: in plain words, for the record ("start", "resume").
    """
    backend = backend_of(profile)
    backend.check(config)
    return backend.submit(run, JobRequest(role, attempt, new_incarnation(), config, cwd, why))


def describe(profile: ClusterProfile, run: RunFolder, role: str, attempt: int, config: RunConfig) -> str:
    """What `submit` would do, for --dry-run: the sbatch file, or the local executor's command."""
    return backend_of(profile).describe(run, role, attempt, config, Path.cwd())
