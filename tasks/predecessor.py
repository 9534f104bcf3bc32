"""A scheduled start whose predecessor still works is skipped; of several at once, one starts.

A start is claimed before its run folder is there, by making `<number>.json` exclusively, as a term of the lease is
(`tasks.lease`): the next number has one maker, whoever else tries finds it there and judges anew. That needs no lock
which a dead process could hold, and works where flock does not (NFS mounted with `local_lock`, Lustre without `-o flock`).
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from cluster.intents import writer_lives
from cluster.local_jobs import started
from slipstream.instance import instance_id
from slipstream.run_folder import DamagedFile, RunFolder, create_exclusively, read_object, write_atomic
from tasks.observe import newest_attempt
from tasks.origin import origin_file, read_origin
from tasks.predecessor_policy import Claim, Seen, has_ended, predecessor

KEPT = 20  # claims: a process that listed them so many starts ago must still find its number taken


def unfinished_predecessor(
    root: Path, deployment: str, own_run_id: str, warn: Callable[[str], None] | None = None
) -> str | None:
    """The run of the same deployment that still works, whoever leads it; None where `own_run_id` may start.

    With None the start is claimed: another process that asks finds it as its predecessor from then on. A run that has
    begun already is not judged, so a flow run that is started again goes on.

    Args:
        root: storage root; not there yet: nothing works.
        deployment: id of the deployment that the scheduler started this run from.
        warn: told of folders that cannot be read; they count as ended.

    Raises OSError where the storage does not answer.
    """
    folder = claims_folder(root, deployment)
    while True:
        newest, claim = _newest_claim(folder)
        seen = look(root, warn)
        if (working := predecessor(seen, claim, deployment, own_run_id)) is not None:
            return working
        if any(run.run_id == own_run_id for run in seen) or _make_claim(folder, newest + 1, own_run_id):
            return None


def look(root: Path, warn: Callable[[str], None] | None = None) -> list[Seen]:
    """All runs and sweeps of the storage root that say where they come from."""
    seen = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.name.startswith(".") or path.is_symlink() or not origin_file(RunFolder(path)).is_file():
            continue
        try:
            seen.append(_look_at(RunFolder(path)))
        except (DamagedFile, OSError) as error:
            if warn is not None and _is_ours(path):
                warn(f"{path.name} does not count as a predecessor: {error}")
    return seen


def _look_at(run: RunFolder) -> Seen:
    """Raises DamagedFile, OSError."""
    return Seen(run.run_id, read_origin(run).deployment, bool(end_of(run)))


def end_of(run: RunFolder) -> dict[str, Any]:
    """The outcome of the newest attempt of a run, or of a sweep; {} while it works. Raises DamagedFile, OSError."""
    outcome = read_object(run.path / "outcome.json", "attempt", "time")
    newest = newest_attempt(run)
    attempt = outcome.get("attempt") if outcome else None
    attempt = newest if outcome and attempt is None else attempt
    return outcome if has_ended(attempt, newest) else {}


def _is_ours(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_uid == os.getuid()
    return False


def claims_folder(root: Path, deployment: str) -> Path:
    """Per instance: several users may share a storage root."""
    return root / f".schedules-{instance_id()}" / deployment


def _numbers(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob("*.json") if path.stem.isdigit())


def _newest_claim(folder: Path) -> tuple[int, Claim | None]:
    newest = (_numbers(folder) or [0])[-1]
    if newest == 0:
        return 0, None
    path = folder / f"{newest}.json"
    value: dict[str, Any] = {}
    with contextlib.suppress(DamagedFile):
        value = read_object(path)
    if not isinstance(value.get("run"), str):
        return newest, None
    alive = writer_lives(value)
    return newest, Claim(value["run"], alive, _age_s(path) if alive is None else None)


def _age_s(path: Path) -> float | None:
    """Seconds since `path` was written, both times by the clock of the storage."""
    probe = path.with_name(f".now-{os.getpid()}")
    try:
        write_atomic(probe, "")
        return probe.stat().st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        return None
    finally:
        probe.unlink(missing_ok=True)


def _make_claim(folder: Path, number: int, run_id: str) -> bool:
    """Whether this process made the claim, and no newer one is there. Raises OSError."""
    me = {"host": socket.gethostname(), "pid": os.getpid(), "pid_started": started(psutil.Process())}
    claim = {"run": run_id, "time": time.time(), **me}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        create_exclusively(folder / f"{number}.json", json.dumps(claim))
    except FileExistsError:
        return False
    numbers = _numbers(folder)
    for old in numbers[:-KEPT]:
        (folder / f"{old}.json").unlink(missing_ok=True)
    return numbers[-1] == number
