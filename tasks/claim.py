"""One process at a time drives a run: a lock in the run folder, held while the process lives, released by its death."""

import contextlib
import fcntl
import os
import socket
from pathlib import Path

from slipstream.run_folder import RunFolder
from tasks.outcome import NothingToResume

_held: dict[Path, int] = {}


def claim(run: RunFolder) -> None:
    """Take the run for this process, until `release`; nothing happens where this process has it already.

    A file system without locks lets everybody in: there the fences decide, and an older attempt gives way.
    Raises NothingToResume where another process has it.
    """
    if run.path in _held:
        return
    fd = os.open(run.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = os.read(fd, 200).decode(errors="replace").strip() or "another process"
        os.close(fd)
        raise NothingToResume(f"{run.run_id} is running ({who}): stop it with `slipstream stop {run.path}`") from None
    except OSError:  # no locks here
        os.close(fd)
        return
    _held[run.path] = fd
    with contextlib.suppress(OSError):  # only for the message
        os.truncate(fd, 0)
        os.write(fd, f"pid {os.getpid()} on {socket.gethostname()}".encode())


def release(run: RunFolder) -> None:
    """Give the run free. Idempotent."""
    fd = _held.pop(run.path, None)
    if fd is not None:
        os.close(fd)


def superseded(run: RunFolder, attempt: int) -> int | None:
    """The newest attempt where that is later than `attempt`: the run is its, and this one must give way."""
    newest = (run.attempts() or [0])[-1]
    return newest if newest > attempt else None
