"""Before anything is started: the configuration is checked, the run folder made, the run claimed."""

import contextlib
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.backends import backend_of
from cluster.jobs import JobRecord
from cluster.profile import ClusterError, ClusterProfile, load_profile
from slipstream.config_file import ConfigError, Problem, dump_config
from slipstream.instance import check_home, remember_root
from slipstream.process import HEARTBEAT_INTERVAL_S
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, new_run_id, read_object, write_atomic
from tasks.interrupt import uninterrupted
from tasks.lease import claim, release
from tasks.observe import heartbeat, newest_attempt
from tasks.origin import Origin, begun_by, origin_here, refuse_copy, write_origin
from tasks.outcome import NothingToResume
from tasks.records import forgive, log_event
from tasks.start import next_attempt
from tasks.stored import all_jobs, backend_anyway, backend_for, live_jobs, origin, started_in, stored_config

__all__ = ["Prepared", "all_jobs", "check", "origin", "prepare", "resume_prepare", "started_in", "stored_config"]


@dataclass(frozen=True)
class Prepared:
    """A claimed run. `notes` says in plain words what was found and done."""

    run: RunFolder
    attempt: int
    notes: tuple[str, ...] = ()


def check(config: RunConfig) -> list[Problem]:
    """Everything that can be refused before a run exists. Raises ConfigError; returns the warnings."""
    from slipstream import preflight

    profile = profile_of(config)
    try:
        backend_of(profile).check(config)
    except ClusterError as error:
        raise ConfigError([Problem("", None, str(error))]) from None
    return preflight.check(config)


def profile_of(config: RunConfig) -> ClusterProfile:
    """The cluster profile that `config` names. Raises ConfigError."""
    try:
        return load_profile(config.cluster.profile)
    except ClusterError as error:
        raise ConfigError([Problem("", None, str(error))]) from None


def prepare(config: RunConfig, run_id: str | None = None, whence: Origin | None = None) -> Prepared:
    """Check `config`, then make the run folder and claim its first attempt.

    Args:
        whence: where the run comes from; of a flow run that was started again, which goes on in the folder that an
            earlier start of it has begun.

    Nothing is created where the check fails. Raises ConfigError, RunFolderError; NothingToResume where another start
    prepares the same folder now.
    """
    notes = tuple(str(warning) for warning in check(config))
    check_home()
    name = run_id or new_run_id(config.name)
    folder = RunFolder(Path(config.storage.root).expanduser() / name)
    begun = whence is not None and begun_by(folder, whence.flow_run, whence.sweep)
    run = RunFolder.create(config.storage.root, name, begun)
    claim(run, config.recovery.lease)
    write_origin(run, whence or origin_here())
    with contextlib.suppress(OSError):  # a home that takes no writes keeps no run from starting
        remember_root(run.path.parent)
    write_atomic(run.run_file, dump_config(config))
    attempt = run.begin_attempt(None, 0)
    log_event(run, attempt, "prepared")
    return Prepared(run, attempt, notes)


def resume_prepare(run_dir: str | Path) -> Prepared:
    """Take over a run whose supervisor died, with its jobs; or claim a new attempt of one that had ended.

    Raises RunFolderError, ConfigError, and NothingToResume for a run that has finished or that another process leads.
    """
    run = RunFolder.open(run_dir)
    claim(run)
    try:
        return _resume_claimed(run)
    except BaseException:
        release(run)
        raise


def check_resumable(run: RunFolder) -> None:
    """What can be refused before a resume begins. Raises ConfigError, RunFolderError for a copy of another run, and
    NothingToResume for a run that has finished.

    The caller has claimed the run: of a finished one what still runs is stopped. One that finished while nobody led it
    can be resumed: that only tells its end.
    """
    refuse_copy(run)  # before anything of its jobs is stopped
    if _finished(run) and not _end_is_untold(run):
        with uninterrupted():
            stopped = ", ".join(map(_job_text, backend_anyway(run).cancel(run, all_jobs(run))))
        left = f" (stopped what was left running: {stopped})" if stopped else ""
        raise NothingToResume(f"{run.run_id} has finished: `slipstream report {run.path}` shows it{left}")
    with origin(run):
        check(stored_config(run))


def _finished(run: RunFolder) -> bool:
    """Whether the newest attempt has a result; that of an earlier one, which was cut off meanwhile, does not count."""
    result, newest = read_object(run.path / "result.json"), newest_attempt(run)
    return bool(result) and result.get("attempt", newest) == newest


def _end_is_untold(run: RunFolder) -> bool:
    """Whether whoever led the run died before its end."""
    return bool(run.assignment()) and not run.cancel_file.exists() and not (run.path / "outcome.json").exists()


def _resume_claimed(run: RunFolder) -> Prepared:
    check_resumable(run)
    backend = backend_for(run)
    ended = run.cancel_file.exists() or (run.path / "outcome.json").exists()
    with uninterrupted():
        backend.adopt(run)
        live = live_jobs(run, backend)
        if away := [job for job in live if job.executor == "local" and job.host != socket.gethostname()]:
            if still_beats(run):
                hosts = ", ".join(sorted({job.host for job in away}))
                raise NothingToResume(
                    f"{run.run_id} runs on {hosts}, and only there its processes can be seen: resume it there"
                )
            live = [job for job in live if job not in away]  # that machine is gone; fences void what it may still write
        if not ended and (live or _finished(run)):
            note = "took over what runs: " + (", ".join(map(_job_text, live)) or "nothing any more")
            log_event(run, newest_attempt(run), note)
            return Prepared(run, newest_attempt(run), (note,))
        stopped = backend.cancel(run, all_jobs(run))
        for path in (run.cancel_file, run.path / "outcome.json"):
            if path.exists():
                path.replace(path.with_name(f"{path.stem}-{newest_attempt(run)}.json"))
        run.assignment_file.unlink(missing_ok=True)
    attempt, notes = next_attempt(run, stored_config(run))
    forgive(run, attempt)
    if stopped:
        notes.insert(0, "stopped what an earlier attempt left running: " + ", ".join(map(_job_text, stopped)))
    return Prepared(run, attempt, tuple(notes))


def still_beats(run: RunFolder, patience_s: float = 3 * HEARTBEAT_INTERVAL_S) -> bool:
    """Whether any part of the run gives a sign of life within `patience_s`."""

    def counters() -> dict[str, Any]:
        return {
            path.stem: heartbeat(run, path.stem).get("counter") for path in (run.path / "heartbeats").glob("*.json")
        }

    before, end = counters(), time.monotonic() + patience_s
    while time.monotonic() < end:
        if counters() != before:
            return True
        time.sleep(0.2)
    return False


def _job_text(job: JobRecord) -> str:
    return f"{job.role} (attempt {job.attempt}, job {job.job_id})"
