"""One squeue call for all of a user's runs on a host, however many supervisors ask."""

import contextlib
import fcntl
import hashlib
import json
import os
import random
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.clients import TIMEOUT_S, call
from cluster.profile import ClusterError
from cluster.slurm_states import SQUEUE_FORMAT, SlurmJob, parse_squeue

JITTER = 0.2


@dataclass(frozen=True)
class Snapshot:
    """What squeue said, once.

    Attributes:
        monotonic: when it was asked, on this host's clock (the same for all its processes), in seconds.
        time: the same, since the epoch.
        error: why it did not answer; then `jobs` means nothing.
    """

    monotonic: float
    time: float
    jobs: tuple[SlurmJob, ...] = ()
    error: str = ""


def ask_squeue(timeout_s: float = TIMEOUT_S) -> Snapshot:
    """Ask the scheduler now. Never raises: a scheduler that does not answer is a snapshot too."""
    monotonic, now = time.monotonic(), time.time()
    try:
        text = call(["squeue", "-h", "-a", "-t", "all", "-u", str(os.getuid()), "-o", SQUEUE_FORMAT], timeout_s)
        return Snapshot(monotonic, now, tuple(parse_squeue(text)))
    except (ClusterError, ValueError) as error:
        return Snapshot(monotonic, now, error=str(error))


class Queue:
    """Snapshots no older than `poll_s` with a fifth of jitter, shared by the processes of this user on this host.

    Args:
        poll_s: seconds between two questions.
        timeout_s: most seconds that a question may take.
        ask: for tests.
    """

    def __init__(
        self, poll_s: float, timeout_s: float = TIMEOUT_S, ask: Callable[[float], Snapshot] = ask_squeue
    ) -> None:
        self.poll_s = poll_s
        self._timeout_s = timeout_s
        self._ask = ask
        self._last: Snapshot | None = None
        self._limit_s = 0.0

    def snapshot(self) -> Snapshot:
        """One that is new enough."""
        if self._last is not None and self._fresh(self._last):
            return self._last
        self._limit_s = self.poll_s * random.uniform(1 - JITTER, 1 + JITTER)
        with _locked(self._timeout_s + 5) as path:
            found = _read(path)
            if found is None or not self._fresh(found):
                found = self._ask(self._timeout_s)
                _write(path, found)
        self._last = found
        return found

    def new(self, timeout_s: float | None = None) -> Snapshot:
        """One of now, that the others get too."""
        self._last = self._ask(self._timeout_s if timeout_s is None else timeout_s)
        with _locked(1.0) as path:
            _write(path, self._last)
        return self._last

    def _fresh(self, snapshot: Snapshot) -> bool:
        return 0 <= time.monotonic() - snapshot.monotonic < self._limit_s


def _folder() -> Path | None:
    """This user's own folder on this host, or None where somebody else made it."""
    path = Path(tempfile.gettempdir()) / f"slipstream-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError:
        return None
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return path if mine else None


@contextlib.contextmanager
def _locked(patience_s: float) -> Iterator[Path | None]:
    """The shared file, while nobody else has it; after `patience_s` (its holder is stopped) or without a folder, None."""
    folder = _folder()
    if folder is None:
        yield None
        return
    cluster = hashlib.sha256(os.environ.get("SLURM_CONF", "").encode()).hexdigest()[:8]
    try:
        fd = os.open(folder / f"squeue-{cluster}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield None
        return
    try:
        yield folder / f"squeue-{cluster}.json" if _flock(fd, patience_s) else None
    finally:
        os.close(fd)


def _flock(fd: int, patience_s: float) -> bool:
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        except OSError:
            return False


def _read(path: Path | None) -> Snapshot | None:
    try:
        value: dict[str, Any] = json.loads(path.read_text()) if path else {}
        jobs = tuple(SlurmJob(**job) for job in value["jobs"])
        return Snapshot(float(value["monotonic"]), float(value["time"]), jobs, str(value["error"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path | None, snapshot: Snapshot) -> None:
    if path is None:
        return
    temporary = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(asdict(snapshot)))
        temporary.replace(path)
