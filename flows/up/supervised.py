"""A child process that is started again when it dies, and its log file, which does not grow for ever."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slipstream.process import how_ended, spawn, stop

FIRST_WAIT_S = 1.0
MOST_WAIT_S = 60.0
HEALTHY_S = 60.0  # one that has lived so long has not failed in a row
MOST_LOG_BYTES = 16 * 2**20


def wait_before(failures: int) -> float:
    """Seconds before start number `failures` + 1 in a row: none before the first, then doubled each time."""
    if failures < 1:
        return 0.0
    return min(FIRST_WAIT_S * 2.0 ** min(failures - 1, 30), MOST_WAIT_S)


class Supervised:
    """One part of `slipstream up`.

    Args:
        pass_fds: open files that each start inherits.
        say: told when it has died and when it comes back.
        grace_s: seconds between TERM and KILL.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        say: Callable[[str], None],
        cwd: Path,
        pass_fds: Sequence[int] = (),
        grace_s: float = 5.0,
    ) -> None:
        self.name, self.log = name, log
        self._argv, self._env, self._cwd, self._fds = argv, env, cwd, pass_fds
        self._say, self._grace_s = say, grace_s
        self.process: subprocess.Popen[bytes] | None = None
        self._failures = 0
        self._started = 0.0
        self._due: float | None = None

    def start(self) -> None:
        rotate(self.log)
        self.process = spawn(self._argv, self.log, self._env, cwd=self._cwd, pass_fds=self._fds)
        self._started, self._due = time.monotonic(), None

    def look(self) -> None:
        """Start it again where it has died and its wait is over."""
        now = time.monotonic()
        if self.process is None:
            return
        if self._due is None and (code := self.process.poll()) is not None:
            self._failures = 1 if now - self._started > HEALTHY_S else self._failures + 1
            wait = wait_before(self._failures)
            self._due = now + wait
            self._say(f"the {self.name} has ended {how_ended(code)}; started again in {wait:g} s (log: {self.log})")
        if self._due is not None and now >= self._due:
            try:
                self.start()
            except OSError as error:  # no room, no memory, no log folder: not for ever, and the other parts go on
                self._failures += 1
                self._due = now + wait_before(self._failures)
                self._say(f"the {self.name} cannot be started: {error}; once more in {self._due - now:g} s")

    def stop(self) -> None:
        if self.process is not None:
            stop(self.process, self._grace_s)
            self.process = None


def rotate(log: Path, most: int = MOST_LOG_BYTES) -> None:
    """Keep one older file. The writer appends, so that it goes on at the start of the emptied one."""
    with contextlib.suppress(OSError):
        if log.stat().st_size > most:
            shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            log.with_name(f"{log.name}.1").chmod(0o600)
            with open(log, "r+b") as file:
                file.truncate(0)
