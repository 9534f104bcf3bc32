"""Rank 0's hold on its rollout process: messages, hanging, respawn within bounds."""

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from slipstream.process import how_ended, stop
from slipstream.run_folder import RunFolder
from tests.doubles.events import event

START_S = 60.0  # for an interpreter that starts beside others
AHEAD = 6  # groups that may be under way or waiting beyond those taken


class WorkerFailed(RuntimeError):
    """The rollout process failed for good."""


class Worker:
    """One rollout process after the other.

    Args:
        setup: what each start is told; `position()` adds where it begins.
    """

    def __init__(
        self,
        run: RunFolder,
        setup: dict[str, Any],
        position: Callable[[], dict[str, Any]],
        timeout_s: float,
        restarts: int,
    ) -> None:
        self.run, self._setup, self._position = run, setup, position
        self._timeout_s, self._restarts = timeout_s, restarts
        self._left = restarts
        self.ended = False
        self._messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self._starts = 0
        self._taken = 0
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """From the main thread: the child dies with it."""
        self._starts += 1
        self._taken = 0
        log = self.run.log_file("rollout", self._setup["attempt"])
        with open(log, "ab") as errors:
            self._child = child = subprocess.Popen(
                [sys.executable, "-m", "tests.doubles.rollout"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._tell({**self._setup, **self._position(), "total": AHEAD, "start": self._starts})
        self._reader = threading.Thread(target=self._read, args=(child,), daemon=True)
        self._reader.start()
        self._heard, self._spoke = time.monotonic(), False

    def _read(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            if line.endswith(b"\n"):
                self._messages.put(json.loads(line))

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(message).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            return  # `check` sees its end

    def groups(self, block_s: float) -> list[dict[str, Any]]:
        """What has come by now; waits so long for the first."""
        found = []
        try:
            message = self._messages.get(timeout=block_s)
            while True:
                self._heard, self._spoke = time.monotonic(), True
                if "number" in message:
                    found.append(message)
                if "error" in message:
                    raise WorkerFailed(message["error"])
                self.ended |= "ended" in message
                message = self._messages.get_nowait()
        except queue.Empty:
            pass
        if found:
            self._left = self._restarts
            self._taken += len(found)
            self._tell({"total": self._taken + AHEAD})
        return found

    def lost(self) -> str:
        """Why the rollout process must be started again, or ''. Its messages are all in `groups` then."""
        assert self._child is not None
        if self.ended:
            return ""
        why = ""
        if self._child.poll() is not None:
            why = f"the rollout process ended {how_ended(self._child.returncode)}"
        elif time.monotonic() - self._heard > (self._timeout_s if self._spoke else START_S):
            why = f"the rollout process has not answered for rollout_worker_timeout = {self._timeout_s:g} s"
        if why:
            stop(self._child, 0.0)
            self._reader.join()
        return why

    def restart(self, why: str) -> None:
        """Raises WorkerFailed where it was restarted too often without a new group."""
        if self._left <= 0:
            raise WorkerFailed(f"{why}, {self._restarts} restarts without a new group")
        self._left -= 1
        event(self.run, "rollout.respawn", why=why)
        self.start()

    def stop(self) -> None:
        if self._child is not None:
            stop(self._child, 0.0)
