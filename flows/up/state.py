"""What `slipstream up` leaves in the instance's folder, so that other commands find it: address, password, who runs it.

`auth` holds the basic-auth string (0600) and stays; `port` holds the last port and stays; `up.json` is there while a server
of ours is. Who runs a part holds a lock on its file: a process that is gone holds none.
"""

import contextlib
import fcntl
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from slipstream.instance import home
from slipstream.run_folder import DamagedFile, create_exclusively, read_object, write_atomic, write_json

LOOPBACK = "127.0.0.1"
FIRST_PORT = 4200
LISTEN_BACKLOG = 128
LOCK_TRIES = 5


class UpError(Exception):
    """`slipstream up` cannot do what was asked."""


@dataclass(frozen=True)
class Holder:
    """The process that runs a part; `pid` 0: it has not said yet who it is. `host`: a lock may be seen from others."""

    pid: int = 0
    host: str = ""

    @property
    def is_here(self) -> bool:
        return self.host in ("", socket.gethostname())

    def __str__(self) -> str:
        return f"process {self.pid or '?'}" + ("" if self.is_here else f" on {self.host}")


@dataclass(frozen=True)
class Up:
    """A server of `slipstream up`.

    Attributes:
        url: of its API. ui: what a browser opens.
        host, pid: of the process that looks after it.
        started: when (`time.time()` of that host).
        ready: whether deployments and workers are there.
    """

    url: str
    ui: str
    host: str
    pid: int
    started: float
    ready: bool = False


def auth_file() -> Path:
    return home() / "auth"


def prefect_home() -> Path:
    """PREFECT_HOME of the server and the workers."""
    return home() / "prefect"


def logs() -> Path:
    return home() / "logs"


def auth_string() -> str:
    """The basic-auth string, made at the first call. Raises UpError where others can read it, OSError."""
    path = auth_file()
    if not path.exists():
        with contextlib.suppress(FileExistsError):
            create_exclusively(path, f"slipstream:{secrets.token_urlsafe(24)}\n")
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise UpError(
            f"{path} has mode {mode:o}, so others can read the password: chmod 600 it, or remove it for a new one"
        )
    text = ""
    with contextlib.suppress(UnicodeDecodeError, IsADirectoryError):
        text = path.read_text().strip()
    if ":" not in text or text.startswith(":") or text.endswith(":"):
        raise UpError(f"{path} holds no NAME:PASSWORD: remove it, then the next `slipstream up` makes a new one")
    return text


def read_up() -> Up | None:
    """What `up.json` says; None where there is none. Raises UpError where it is damaged, OSError."""
    path = home() / "up.json"
    try:
        value = read_object(path, "pid", "started")
    except DamagedFile as error:
        raise UpError(f"{error}: `slipstream down` removes it; where it runs still, start it again then") from None
    if not value.get("url"):
        return None
    return Up(
        url=str(value["url"]),
        ui=str(value.get("ui") or ""),
        host=str(value.get("host") or ""),
        pid=int(value.get("pid") or 0),
        started=float(value.get("started") or 0),
        ready=bool(value.get("ready")),
    )


def running() -> Up | None:
    """The server of `slipstream up`, where one is run on this host, or on another one that this cannot look into."""
    up = read_up()
    if up is None or (up.host == socket.gethostname() and holder("server") is None):
        return None
    return up


def write_up(url: str, ui: str, *, ready: bool) -> None:
    write_json(home() / "up.json", asdict(Up(url, ui, socket.gethostname(), os.getpid(), time.time(), ready)))


def forget_up() -> None:
    (home() / "up.json").unlink(missing_ok=True)


@contextlib.contextmanager
def holding(parts: Sequence[str]) -> Iterator[list[str]]:
    """Take the lock of each part that nobody has, and hold it inside; yields those that were free."""
    taken: dict[str, int] = {}
    try:
        for part in parts:
            fd = os.open(home() / f"{part}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not _locked(fd):
                os.close(fd)
                continue
            taken[part] = fd
            os.ftruncate(fd, 0)
            try:
                os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
            except OSError as error:  # a full disk names no file
                raise OSError(error.errno, error.strerror, str(home() / f"{part}.lock")) from None
        yield list(taken)
    finally:
        for fd in taken.values():
            os.ftruncate(fd, 0)
            os.close(fd)


def _locked(fd: int) -> bool:
    for _ in range(LOCK_TRIES):  # `holder` has it for a moment
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.05)
    return False


def holder(part: str) -> Holder | None:
    """The process that holds a part's lock; None where nobody does."""
    try:
        fd = os.open(home() / f"{part}.lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pid, _, host = os.pread(fd, 300, 0).decode(errors="replace").strip().partition(" ")
        return Holder(int(pid), host) if pid.isascii() and pid.isdigit() else Holder()
    else:
        return None
    finally:
        os.close(fd)


def port_candidates(asked: int | None, last: int | None) -> list[int]:
    """Ports to try, the best first; 0 stands for any free one. A port that was asked for has no second best."""
    if asked is not None:
        return [asked]
    return list(dict.fromkeys([*([last] if last else []), FIRST_PORT, 0]))


def last_port() -> int | None:
    """The port of last time."""
    text = ""
    with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
        text = (home() / "port").read_text().strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None


def listen(asked: int | None) -> socket.socket:
    """A listening socket on loopback. The server is given it open, so that nobody can take the port in between, and a
    server that is started again has the same one.

    Args:
        asked: the port; 0: any free one; None: the one of last time, else 4200, else a free one.

    Raises UpError.
    """
    for port in port_candidates(asked, last_port()):
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((LOOPBACK, port))
            server.listen(LISTEN_BACKLOG)
        except (OSError, OverflowError) as error:
            server.close()
            reason = error
            continue
        write_atomic(home() / "port", f"{server.getsockname()[1]}\n")
        return server
    raise UpError(f"port {asked} on {LOOPBACK}: {reason}: give another one with --port, or 0 for any that is free")
