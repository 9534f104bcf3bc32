"""What a run's folder says about how it is to be run."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from cluster.backend import Backend
from cluster.backends import backend_of
from cluster.intents import unrecorded_jobs
from cluster.jobs import JobRecord, read_jobs
from cluster.profile import ClusterError, ClusterProfile, load_profile
from slipstream.config_file import ConfigError, load_config
from slipstream.run_config import RunConfig
from slipstream.run_folder import DamagedFile, RunFolder, read_object


def stored_config(run: RunFolder) -> RunConfig:
    return load_config(run.run_file)


def started_in(run: RunFolder) -> Path:
    """The folder that the run was started from: relative paths of its configuration are relative to it. Raises DamagedFile."""
    path = run.path / "origin.json"
    cwd = read_object(path, "time").get("cwd", ".")
    if not isinstance(cwd, str) or "\0" in cwd:
        raise DamagedFile(f"{path} is damaged: its cwd is {cwd!r}, which is no path")
    return Path(cwd)


@contextlib.contextmanager
def origin(run: RunFolder) -> Iterator[None]:
    """Work in the folder that the run was started from, where it is still there."""
    folder = started_in(run)
    with contextlib.chdir(folder) if folder.is_dir() else contextlib.nullcontext():
        yield


def backend_for(run: RunFolder) -> Backend:
    """The cluster that the run's configuration names. Raises ClusterError."""
    config = stored_config(run)
    with origin(run):
        return backend_of(load_profile(config.cluster.profile), config.recovery.poll)


def backend_anyway(run: RunFolder) -> Backend:
    """`backend_for`, but jobs can be seen and stopped though the run's configuration or its profile is damaged or gone."""
    try:
        return backend_for(run)
    except (ConfigError, ClusterError, DamagedFile, OSError):
        slurm = any(job.executor == "slurm" for job in all_jobs(run))
        return backend_of(ClusterProfile(executor="slurm" if slurm else "local"))


def all_jobs(run: RunFolder) -> list[JobRecord]:
    """Jobs of all attempts, those included of which only the intent was recorded."""
    return [job for attempt in run.attempts() for job in read_jobs(run, attempt)] + unrecorded_jobs(run)


def live_jobs(run: RunFolder, backend: Backend) -> list[JobRecord]:
    """Jobs that have not ended, or of which the scheduler says nothing now."""
    jobs = all_jobs(run)
    views = backend.look(run, jobs)
    return [job for job in jobs if job.incarnation in views and not views[job.incarnation].state.ended]
