"""Who leads a run: of any number of supervisors one acts, and another takes over when it falls silent.

A term is claimed by making `leases/<term>.json` exclusively, so of two at once one gets it, on any file system. The holder
of the newest term leads. It beats into `lease.json`; whoever watches judges that by its own monotonic clock since the beat
last changed, so no two clocks are compared. A holder that was stopped for longer than its lease finds a newer term when it
wakes, and acts no more.
"""

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cluster.local_jobs import SAME_S, started
from slipstream.config_file import ConfigError
from slipstream.run_config import RecoverySection
from slipstream.run_folder import RunFolder, create_exclusively, read_json, write_json
from tasks.outcome import NothingToResume
from tasks.stored import stored_config

POLL_S = 0.2


class StepDown(BaseException):
    """This process is to stop leading, and the run to go on."""


class Lease:
    """One term of this process; it beats from a thread until `release`."""

    def __init__(self, run: RunFolder, term: int, lease_s: float) -> None:
        self.run = run
        self.term = term
        self._interval_s = lease_s / 6
        self._counter = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._write()
        self._thread.start()

    def held(self) -> bool:
        """Whether no other process has begun a later term. Asked right before everything that a leader does."""
        return newest_term(self.run) == self.term

    def lost(self) -> bool:
        """Whether a later term is there to be seen: storage that stumbles takes the lead from nobody."""
        return newest_term(self.run) > self.term

    def _write(self, released: bool = False) -> None:
        self._counter += 1
        with contextlib.suppress(OSError):  # a full disk: nobody else can begin a term either
            if self.held():
                write_json(lease_file(self.run), {"term": self.term, "counter": self._counter, "released": released})

    def _beat(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._write()

    def silence(self) -> None:
        """Beat no more. The term stays this process's own until another takes over."""
        self._stopped.set()
        self._thread.join()

    def release(self) -> None:
        self._stopped.set()
        self._thread.join(5)
        self._write(released=True)


@dataclass(frozen=True)
class Sight:
    """A run's lease as it stands on storage.

    Attributes:
        term: the newest; 0 where nobody has led the run yet.
        counter: of its beat, or None before the first.
        who: its holder, in words. host: of the holder.
        released: its holder has given the run free.
        gone: its holder was a process of this host, which has ended.
    """

    term: int
    counter: Any = None
    who: str = ""
    host: str = ""
    released: bool = False
    gone: bool = False


def sight(run: RunFolder) -> Sight:
    term = newest_term(run)
    if term == 0:
        return Sight(0)
    holder = _read(run.path / "leases" / f"{term}.json")
    beat = _read(lease_file(run))
    beat = beat if beat.get("term") == term else {}
    who, host = f"pid {holder.get('pid')} on {holder.get('host')}", str(holder.get("host"))
    return Sight(term, beat.get("counter"), who, host, bool(beat.get("released")), _is_gone(holder))


class LeaseWatch:
    """What an observer knows of a run's leader."""

    def __init__(self, run: RunFolder, lease_s: float) -> None:
        self._run = run
        self._lease_s = lease_s
        self._seen: Any = None
        self._since = 0.0
        self.moved = False  # the leader has given a sign of life since the first look

    def look(self, now: float) -> str:
        """Who leads, at `now` of the observer's monotonic clock; '' where nobody does (any more)."""
        found = sight(self._run)
        if found.term == 0:
            return ""
        seen = (found.term, found.counter)
        if seen != self._seen:
            self.moved = self._seen is not None
            self._seen, self._since = seen, now
        if found.released or found.gone or now - self._since > self._lease_s:
            return ""
        return found.who


def lease_file(run: RunFolder) -> Path:
    return run.path / "lease.json"


def newest_term(run: RunFolder) -> int:
    return max((int(path.stem) for path in (run.path / "leases").glob("*.json") if path.stem.isdigit()), default=0)


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(ValueError, OSError):
        value = read_json(path)
        if isinstance(value, dict):
            return value
    return {}


def _is_gone(holder: dict[str, Any]) -> bool:
    """Whether the holder ran on this host, and its process has ended."""
    if holder.get("host") != socket.gethostname():
        return False
    try:
        process = psutil.Process(int(holder["pid"]))
        other = abs(started(process) - float(holder["started"])) > SAME_S
        return other or process.status() == psutil.STATUS_ZOMBIE
    except (psutil.Error, KeyError, ValueError):
        return True


def try_lead(run: RunFolder, watch: LeaseWatch, lease_s: float) -> Lease | None:
    """A new term where nobody leads; None where somebody does, or was quicker. Raises OSError (disk full)."""
    if watch.look(time.monotonic()):
        return None
    return _begin_term(run, lease_s)


def _begin_term(run: RunFolder, lease_s: float) -> Lease | None:
    """The next term; None where another process was quicker."""
    return begin_after(run, newest_term(run), lease_s)


def begin_after(run: RunFolder, seen: int, lease_s: float) -> Lease | None:
    """The term after `seen`, which was judged to have nobody any more; None where another process has begun it.

    Raises OSError.
    """
    me = {"pid": os.getpid(), "host": socket.gethostname(), "started": started(psutil.Process())}
    term = seen + 1
    (run.path / "leases").mkdir(mode=0o700, exist_ok=True)
    try:
        create_exclusively(run.path / "leases" / f"{term}.json", json.dumps({"term": term, **me}))
    except FileExistsError:
        return None
    return Lease(run, term, lease_s)


_held: dict[Path, Lease] = {}


def held_lease(run: RunFolder) -> Lease | None:
    """This process's lease of the run, if it has one that still holds."""
    lease = _held.get(run.path)
    return lease if lease is not None and lease.held() else None


def lead_if_free(run: RunFolder, watch: LeaseWatch, lease_s: float) -> Lease | None:
    """This process's lease, or a new one where nobody leads."""
    lease = held_lease(run)
    if lease is None:
        lease = try_lead(run, watch, lease_s)
        if lease is not None:
            _held[run.path] = lease
    return lease


def claim(run: RunFolder, lease_s: float | None = None) -> Lease:
    """Lead the run from now until `release`; the lease of this process where it leads already.

    A leader of another host whose process cannot be looked at has `lease_s` to give a sign of life.
    Raises NothingToResume where another process leads.
    """
    bound = configured_lease(run) if lease_s is None else lease_s
    watch = LeaseWatch(run, bound)
    while True:
        lease = lead_if_free(run, watch, bound)
        if lease is not None:
            return lease
        who = watch.look(time.monotonic())
        if who and (watch.moved or socket.gethostname() in who.rsplit(" ", 1)[-1:]):
            raise NothingToResume(f"{run.run_id} is running ({who}): stop it with `slipstream stop {run.path}`")
        time.sleep(POLL_S)


def take_over(run: RunFolder, lease_s: float) -> Lease:
    """Lead the run from now on, whoever leads it: that one finds the newer term, and looks on."""
    lease = None
    while lease is None:
        lease = _begin_term(run, lease_s)
    _held[run.path] = lease
    return lease


def configured_lease(run: RunFolder) -> float:
    """Seconds of the run's lease; the default where its configuration cannot be read."""
    try:
        return stored_config(run).recovery.lease
    except (ConfigError, OSError):
        return RecoverySection().lease


def release(run: RunFolder) -> None:
    """Give the run free. Idempotent."""
    lease = _held.pop(run.path, None)
    if lease is not None:
        lease.release()


def keep_silent(run: RunFolder) -> None:
    """Write nothing more into the run's folder, which is about to go; `release` then only forgets it."""
    lease = _held.get(run.path)
    if lease is not None:
        lease.silence()
