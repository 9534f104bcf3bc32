"""Before anything is started: the configuration is checked, the run folder made, the attempt claimed."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.jobs import JobRecord, read_jobs, unrecorded_jobs
from cluster.local_jobs import cancel_jobs
from cluster.profile import ClusterError, ClusterProfile, load_profile
from cluster.submit import check_profile
from slipstream.config_file import ConfigError, Problem, dump_config, load_config
from slipstream.process import HEARTBEAT_INTERVAL_S
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, append_jsonl, new_run_id, read_json, write_atomic, write_json
from tasks.claim import claim, release
from tasks.interrupt import uninterrupted
from tasks.outcome import NothingToResume


@dataclass(frozen=True)
class Prepared:
    """A claimed attempt. `notes` says in plain words what was found and done."""

    run: RunFolder
    attempt: int
    notes: tuple[str, ...] = ()


def check(config: RunConfig) -> list[Problem]:
    """Everything that can be refused before a run exists. Raises ConfigError; returns the warnings."""
    from slipstream import preflight

    profile = profile_of(config)
    try:
        check_profile(profile, config)
    except ClusterError as error:
        raise ConfigError([Problem("", None, str(error))]) from None
    return preflight.check(config)


def profile_of(config: RunConfig) -> ClusterProfile:
    """The cluster profile that `config` names. Raises ConfigError."""
    try:
        return load_profile(config.cluster.profile)
    except ClusterError as error:
        raise ConfigError([Problem("", None, str(error))]) from None


def prepare(config: RunConfig, run_id: str | None = None) -> Prepared:
    """Check `config`, then make the run folder and claim its first attempt.

    Nothing is created where the check fails. Raises ConfigError, RunFolderError.
    """
    notes = tuple(str(warning) for warning in check(config))
    run = RunFolder.create(config.storage.root, run_id or new_run_id(config.name))
    claim(run)
    write_json(run.path / "origin.json", {"cwd": os.getcwd(), "host": socket.gethostname(), "time": time.time()})
    write_atomic(run.run_file, dump_config(config))
    attempt = run.begin_attempt(None, 0)
    log_event(run, attempt, "prepared")
    return Prepared(run, attempt, notes)


def resume_prepare(run_dir: str | Path) -> Prepared:
    """Stop what an earlier attempt left alive, then claim a new attempt from the newest complete checkpoint.

    Raises RunFolderError, ConfigError, and NothingToResume for a run that has finished or that another process drives.
    """
    run = RunFolder.open(run_dir)
    claim(run)
    try:
        return _resume_claimed(run)
    except BaseException:
        release(run)
        raise


def check_resumable(run: RunFolder) -> None:
    """What can be refused before a resume begins. Raises ConfigError, and NothingToResume for a run that has finished.

    The caller has claimed the run: of a finished one, whose flow may have been killed before, what still runs is stopped.
    """
    if read_json(run.path / "result.json"):
        with uninterrupted():
            stopped = "" if live_supervisor(run) else ", ".join(map(_job_text, cancel_jobs(all_jobs(run))))
        left = f" (stopped what was left running: {stopped})" if stopped else ""
        raise NothingToResume(f"{run.run_id} has finished: `slipstream report {run.path}` shows it{left}")
    with origin(run):
        check(stored_config(run))


def _resume_claimed(run: RunFolder) -> Prepared:
    from slipstream.learner.checkpoint import ledger_known, resume_point

    check_resumable(run)
    supervisor = live_supervisor(run)
    if supervisor:
        raise NothingToResume(f"{run.run_id} is running ({supervisor}): stop it with `slipstream stop {run.path}`")
    notes = []
    with uninterrupted():
        stopped = cancel_jobs(all_jobs(run))
        if run.cancel_file.exists():
            run.cancel_file.replace(run.path / f"cancel-{(run.attempts() or [0])[-1]}.json")
    if stopped:
        notes.append("stopped what an earlier attempt left running: " + ", ".join(_job_text(job) for job in stopped))
    found, set_aside = resume_point(run)
    notes += set_aside
    checkpoint, step = (str(Path(found[0]).relative_to(run.path)), found[1]) if found else (None, 0)
    attempt = run.begin_attempt(checkpoint, step, ledger_known(found[0]) if found else None)
    where = f"step {step} ({checkpoint})" if found else "the start: there is no complete checkpoint"
    notes.append(f"attempt {attempt} continues from {where}")
    for note in notes:
        log_event(run, attempt, note)
    return Prepared(run, attempt, tuple(notes))


def live_supervisor(run: RunFolder, patience_s: float = 3 * HEARTBEAT_INTERVAL_S) -> str:
    """Who supervises the run now, or ''. A heartbeat of another host has to move within `patience_s` to count."""
    beat = read_json(run.heartbeat_file("supervisor")) or {}
    if not beat or beat.get("phase") == "ended":
        return ""
    who = f"pid {beat.get('pid')} on {beat.get('host')}"
    if beat.get("host") == socket.gethostname() and not psutil.pid_exists(int(beat.get("pid", 0))):
        return ""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        now = read_json(run.heartbeat_file("supervisor")) or {}
        if now.get("phase") == "ended":
            return ""
        if now.get("counter") != beat.get("counter") or now.get("incarnation") != beat.get("incarnation"):
            return who
        time.sleep(0.2)
    return ""


def all_jobs(run: RunFolder) -> list[JobRecord]:
    """Jobs of all attempts, those included of which only the intent was recorded."""
    return [job for attempt in run.attempts() for job in read_jobs(run, attempt)] + unrecorded_jobs(run)


def stored_config(run: RunFolder) -> RunConfig:
    return load_config(run.run_file)


def started_in(run: RunFolder) -> Path:
    """The folder that the run was started from: relative paths of its configuration are relative to it."""
    return Path((read_json(run.path / "origin.json") or {}).get("cwd", "."))


@contextlib.contextmanager
def origin(run: RunFolder) -> Iterator[None]:
    """Work in the folder that the run was started from, where it is still there."""
    folder = started_in(run)
    with contextlib.chdir(folder) if folder.is_dir() else contextlib.nullcontext():
        yield


def log_event(run: RunFolder, attempt: int, event: str) -> None:
    """Append to the supervisor's own event file of the attempt, where the storage takes it: no run ends for a note."""
    with contextlib.suppress(OSError):
        append_jsonl(run.records(attempt) / "supervisor.jsonl", {"time": time.time(), "event": event})


def _job_text(job: JobRecord) -> str:
    return f"{job.role} (attempt {job.attempt}, job {job.job_id})"
