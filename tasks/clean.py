"""Removing old runs: what is there, and the removal itself.

A run is claimed before it is removed, so that no resume begins meanwhile, and renamed before its files go, so that half
of one never looks like a run: what a removal leaves that was cut short is found by its name, and the next one ends it.
"""

import contextlib
import os
import pwd
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.jobs import JobState
from cluster.profile import ClusterError
from slipstream.config_file import ConfigError
from slipstream.instance import instance_id
from slipstream.run_folder import RUN_FILE, DamagedFile, RunFolder, fsync_folder, is_number
from tasks.clean_policy import Found, Row, plan
from tasks.lease import POLL_S, LeaseWatch, claim, configured_lease, keep_silent, release, sight
from tasks.origin import read_origin
from tasks.outcome import NothingToResume
from tasks.predecessor import end_of
from tasks.stored import all_jobs, backend_anyway, stored_config

REMAINS = ".removing-"
SWEEP_FILE = "sweep.toml"
MARKS = ("origin.json", RUN_FILE, SWEEP_FILE)  # what runs and sweeps are found by
HELD_OUT, TRAINING = "eval/reward", "reward"


class Stays(Exception):
    """A run that was to be removed stays; the text says why."""


class Gone(Stays):
    """It is not there any more."""


def what_goes(
    root: Path, older_than_s: float, keep_best: bool, now: float, say: Callable[[str], None] | None = None
) -> list[Row]:
    """The plan for a storage root. Only of what would go by its age, jobs and leader are asked for.

    Args:
        now: seconds since the epoch.
        say: told where this takes long.

    Raises OSError where the root cannot be read.
    """
    found = survey(root)
    old = {row.found.id for row in plan(found, now, older_than_s, False) if row.goes and not row.found.remains}
    leaders = _leaders([RunFolder(root / name) for name in sorted(old)], say)
    asked = [_ask_jobs(root, replace(one, leader=leaders.get(one.id, ""))) if one.id in old else one for one in found]
    return plan(asked, now, older_than_s, keep_best)


def survey(root: Path) -> list[Found]:
    """What lies in the storage root: runs, sweeps, and what cut-off removals left."""
    found = [_survey(root / name) for name in sorted(os.listdir(root))]
    return [one for one in found if one is not None]


def _survey(path: Path) -> Found | None:
    """None for what is neither a run nor a sweep."""
    remains = path.name.startswith(REMAINS)
    if path.name.startswith(".") and not remains:
        return None
    try:
        seen = path.lstat()
        if stat.S_ISLNK(seen.st_mode):
            is_run = (path / RUN_FILE).exists() or (path / SWEEP_FILE).exists()
            return Found(path.name, untouchable="it is a symbolic link, which is not followed") if is_run else None
        if not stat.S_ISDIR(seen.st_mode):
            return None
        if seen.st_uid != os.getuid():
            return _foreign(path, seen.st_uid)
        if remains:
            return Found(path.name, remains=True, size=_size(path))
        run, is_sweep = RunFolder(path), (path / SWEEP_FILE).exists()
        if not is_sweep and not run.run_file.exists() and not (path / "origin.json").exists():
            return None
        return _of_ours(run, is_sweep)
    except FileNotFoundError:  # removed meanwhile
        return None
    except (DamagedFile, ConfigError, OSError) as error:
        return Found(path.name, untouchable=f"it cannot be read: {' '.join(str(error).split())}")


def _foreign(path: Path, uid: int) -> Found | None:
    try:
        owner = pwd.getpwuid(uid).pw_name
    except KeyError:
        owner = f"user {uid}"
    with contextlib.suppress(PermissionError):
        if not (path / RUN_FILE).exists() and not (path / SWEEP_FILE).exists():
            return None
    return Found(path.name, untouchable=f"it is {owner}'s")


def _of_ours(run: RunFolder, is_sweep: bool) -> Found:
    """Raises DamagedFile, ConfigError, OSError."""
    origin = read_origin(run)
    found = Found(run.run_id, sweep=origin.sweep, is_sweep=is_sweep)
    if origin.instance and origin.instance != instance_id():
        return replace(found, untouchable=f"it is of the instance {origin.instance} (SLIPSTREAM_INSTANCE)")
    outcome = end_of(run)
    if not outcome:
        return found
    ended_at = outcome.get("time")
    if not is_number(ended_at):
        ended_at = (run.path / "outcome.json").stat().st_mtime
    found = replace(found, ended_at=float(ended_at), size=_size(run.path))
    if is_sweep:
        return found
    held_out, reward = last_rewards(run)
    return replace(found, name=stored_config(run).name, held_out=held_out, reward=reward)


def last_rewards(run: RunFolder) -> tuple[float | None, float | None]:
    """The last reward on held-out prompts, and the last in training; None where it was not measured."""
    last: dict[str, float] = {}
    for window in run.merged_records("metrics.jsonl"):
        last |= {key: float(window[key]) for key in (HELD_OUT, TRAINING) if is_number(window.get(key))}
    return last.get(HELD_OUT), last.get(TRAINING)


def _size(path: Path) -> int:
    """Bytes on disk; links are not followed."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def _leaders(runs: Sequence[RunFolder], say: Callable[[str], None] | None) -> dict[str, str]:
    """Who leads each run. A leader of another host has its lease to give a sign of life, all of them at once."""
    watches = {run.run_id: (LeaseWatch(run, lease), lease) for run in runs for lease in [configured_lease(run)]}
    begun = time.monotonic()
    leaders = {name: watch.look(begun) for name, (watch, _) in watches.items()}
    here = socket.gethostname()
    silent = {name for name, who in leaders.items() if who and not who.endswith(f" on {here}")}
    if silent and say is not None:
        say(f"waiting for a sign of life of who led {', '.join(sorted(silent))}")
    while silent and time.monotonic() - begun <= max(watches[name][1] for name in silent) + 2 * POLL_S:
        time.sleep(POLL_S)
        for name in sorted(silent):
            leaders[name] = watches[name][0].look(time.monotonic())
            if not leaders[name] or watches[name][0].moved:
                silent.discard(name)
    return leaders


def _ask_jobs(root: Path, one: Found) -> Found:
    """With what the scheduler says of its jobs."""
    try:
        jobs, away = _live(RunFolder(root / one.id))
    except (ClusterError, OSError) as error:
        jobs, away = (), str(error)
    return replace(one, jobs=jobs, away=away)


def _live(run: RunFolder) -> tuple[tuple[str, ...], str]:
    """Live jobs in words, and why nothing is known of others. Raises ClusterError, OSError."""
    jobs = all_jobs(run)
    views = backend_anyway(run).look(run, jobs) if jobs else {}
    live, away = [], ""
    for job in jobs:
        view = views.get(job.incarnation)
        if view is None or view.state is JobState.UNKNOWN:
            away = (view.reason if view else "") or "the scheduler does not answer"
        elif not view.state.ended:
            live.append(f"{job.role} (job {job.job_id}, {view.state})")
    return tuple(live), away


def remove(root: Path, one: Found) -> None:
    """Remove a run, a sweep, or what is left of one.

    Raises Stays where it is in use, or has been begun anew, since it was looked at; OSError where files do not go: the
    next removal goes on with them.
    """
    if one.remains:
        _end(root / one.id)
        return
    with _held(root, one) as run:
        keep_silent(run)  # its next beat would make the folder anew
        remains = root / f"{REMAINS}{one.id}-{secrets.token_hex(4)}"
        run.path.rename(remains)
        fsync_folder(root)
    _end(remains)


def _end(remains: Path) -> None:
    """Raises OSError."""
    for name in MARKS:  # before its outcome: half of it must not be taken for a run that nobody leads
        (remains / name).unlink(missing_ok=True)
    _delete(remains)


def thin(root: Path, one: Found) -> int:
    """Remove all checkpoints of a run but the one that a resume would start from; bytes that were freed.

    Raises Stays where it is in use or has no complete checkpoint; OSError.
    """
    from slipstream.learner.checkpoint import MARKER, latest_complete

    with _held(root, one) as run:
        newest = latest_complete(run)
        if newest is None:
            raise Stays("it has no complete checkpoint: all files stay")
        freed = 0
        for path in sorted((run.path / "output").glob("a*/checkpoint-*")):
            if path != newest[0] and not path.is_symlink() and path.is_dir():
                freed += _size(path)
                (path / MARKER).unlink(missing_ok=True)  # first: half of one must not look like a checkpoint
                _delete(path)
        return freed


@contextlib.contextmanager
def _held(root: Path, one: Found) -> Iterator[RunFolder]:
    """The run, claimed, and looked at once more. Raises Stays."""
    run = RunFolder(root / one.id)
    if run.path.is_symlink() or not run.path.is_dir():
        raise Gone("somebody else has removed it")
    try:
        claim(run)
    except NothingToResume:
        raise Stays(f"{sight(run).who} leads it, or removes it now: clean again") from None
    except FileNotFoundError:
        raise Gone("somebody else has removed it") from None
    try:
        if (why := _in_use(run, one)) != "":
            raise Stays(why)
        yield run
    finally:
        release(run)


def _in_use(run: RunFolder, one: Found) -> str:
    """Why a claimed run is not to be removed now; ''."""
    again = _survey(run.path)
    if again is None or again.untouchable or again.ended_at != one.ended_at:
        return "it has been begun anew, or changed, since it was looked at"
    try:
        sweep = RunFolder(run.path.parent / one.sweep)
        if one.sweep and (sweep.path / SWEEP_FILE).exists() and not end_of(sweep):
            return f"its sweep {one.sweep} has been begun anew since it was looked at"
        if all_jobs(run):
            backend_anyway(run).adopt(run)
        live, away = _live(run)
    except (ClusterError, DamagedFile, OSError) as error:
        return f"nothing is known of its jobs: {error}"
    return f"still there: {', '.join(live)}" if live else f"nothing is known of its jobs: {away}" if away else ""


def _delete(path: Path) -> None:
    """Remove a folder with what is in it; links in it are removed, never followed. Raises the first OSError at the end."""
    errors: list[OSError] = []

    def note(_function: Any, _name: str, info: Any) -> None:
        if not isinstance(info[1], FileNotFoundError):  # somebody else removes it, too
            errors.append(info[1])

    shutil.rmtree(path, onerror=note)
    if errors:
        raise errors[0]
