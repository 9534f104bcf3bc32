"""What every leader of a job needs: children that cannot outlive it, heartbeats, exit records."""

import contextlib
import ctypes
import gc
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from slipstream.run_folder import RunFolder, write_json

PR_SET_PDEATHSIG = 1
TERMINATE_GRACE_S = 20.0
HEARTBEAT_INTERVAL_S = 2.0
HEARTBEAT_WRITE_S = 0.5
STARTED = time.time()  # when this process came up, nearly: leaders import this first


INCARNATION_ENV = "SLIPSTREAM_INCARNATION"
REPLACED = "replaced by another job"  # why a leader ended that the assignment does not name any more


def new_incarnation() -> str:
    """A random id of one start of one process."""
    return secrets.token_hex(4)


def job_incarnation() -> str:
    """The incarnation of the job that this process belongs to; a new one where it was started by hand."""
    return os.environ.get(INCARNATION_ENV) or new_incarnation()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For the imports of torch and its like: modules are no garbage, and looking for some takes a sixth of that time.

    What is there at the end is never looked at again. A process that has its collector switched off keeps it so.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.freeze()
            gc.enable()


def die_with_parent(parent_pid: int | None = None, with_signal: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process `with_signal` when its parent dies; exit at once if it is dead already.

    `parent_pid` is the parent's pid as the parent knew it (it may have died before this call). Linux only; elsewhere
    only the check is made.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def spawn(
    argv: Sequence[str],
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own that dies with this process; stdout and stderr are appended to `log`.

    Call it from the main thread: the kernel ties the parent-death signal to the thread that forks.

    Args:
        pass_fds: open files that the child inherits under the same numbers.
    """
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def before_exec() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as out:
        os.chmod(log, 0o600)
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(os.environ if env is None else env),
            cwd=cwd,
            start_new_session=True,
            preexec_fn=before_exec,
            pass_fds=tuple(pass_fds),
        )


def stop(child: subprocess.Popen[bytes], grace_s: float = TERMINATE_GRACE_S) -> int:
    """TERM the child, then KILL whatever is left of its process group; its return code."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


def how_ended(returncode: int | None) -> str:
    """A child's return code in words: "with code 1", "by SIGKILL"."""
    if returncode is None or returncode >= 0:
        return f"with code {returncode}"
    try:
        return f"by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"by signal {-returncode}"


def last_lines(log: Path, count: int = 30) -> str:
    """The last `count` lines of a log, or '' where there is none."""
    try:
        with open(log, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 65536))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-count:])


# phases of rank 0 in which nothing that is to be saved exists yet
STARTING = frozenset(
    {"starting", "loading", "checking the ranks", "waiting for the server", "loading the model", "probing the server"}
)


class Heartbeat:
    """Writes a heartbeat file every few seconds from a thread, and on `update`, but not more often than twice a second.

    The file holds who (role, incarnation, attempt, host, pid), `phase`, `counter` (beats so far), `progress` (a number
    that only grows while work is done: a beat proves life, progress proves work) and what `update` was given.
    """

    def __init__(self, folder: RunFolder, who: str, attempt: int, incarnation: str) -> None:
        self._path = folder.heartbeat_file(who)
        self._value: dict[str, Any] = {
            "role": who,
            "attempt": attempt,
            "incarnation": incarnation,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": STARTED,
            "phase": "starting",
            "progress": 0,
        }
        self._counter = 0
        self._written = float("-inf")
        self._stale = False
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat-{who}", daemon=True)

    def start(self) -> "Heartbeat":
        self._write()
        self._thread.start()
        return self

    def update(self, **values: Any) -> None:
        with self._lock:
            changed = any(self._value.get(key) != value for key, value in values.items())
            self._value.update(values)
            self._stale |= changed
            due = self._stale and time.monotonic() - self._written >= HEARTBEAT_WRITE_S
        if due:
            self._write()

    def _write(self) -> None:
        with self._lock:
            self._counter += 1
            self._written, self._stale = time.monotonic(), False
            # a full disk must not end a healthy process: the beat is missed, and the reader judges that
            with contextlib.suppress(OSError):
                write_json(self._path, {**self._value, "counter": self._counter, "time": time.time()})

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT_WRITE_S):
            if self._stale or time.monotonic() - self._written >= HEARTBEAT_INTERVAL_S:
                self._write()

    def stop(self, **values: Any) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(5)
        with self._lock:
            self._value.update(values)
        self._write()


def write_exit(
    folder: RunFolder,
    role: str,
    incarnation: str,
    attempt: int,
    returncode: int,
    reason: str,
    log: Path,
    lines: int = 30,
    *,
    final: bool = False,
    left: int | None = None,
) -> None:
    """Record how one start of a role ended; `reason` in plain words, and the last `lines` of the log of a failure.

    Args:
        final: whether starting it again cannot help.
        left: the optimizer step at which it saved and left because a signal said so.
    """
    write_json(
        folder.exit_file(role, incarnation),
        {
            "role": role,
            "attempt": attempt,
            "incarnation": incarnation,
            "host": socket.gethostname(),
            "returncode": returncode,
            "reason": reason,
            "job": os.environ.get(INCARNATION_ENV) == incarnation,
            "final": final,
            "left": left,
            "log": str(log),
            "last_lines": "" if returncode == 0 else last_lines(log, lines),
            "started": STARTED,
            "time": time.time(),
        },
    )


def on_terminate(handler: Callable[[str], None]) -> None:
    """Call `handler(signal name)` on TERM, INT and HUP, in the main thread."""

    def handle(number: int, _frame: FrameType | None) -> None:
        handler(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, handle)
