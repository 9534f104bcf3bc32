"""What the leaders of both doubles share: who they are, signals, the assignment."""

import os
import signal
import time
import tomllib
from pathlib import Path

from slipstream.process import INCARNATION_ENV, Heartbeat, job_incarnation, write_exit
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder

LOOK_S = 0.1
ASSIGNMENT_S = 1.0


def host() -> str:
    return os.environ.get("SLIPSTREAM_HOST", "127.0.0.1")


def node_rank() -> int:
    return int(os.environ.get("SLIPSTREAM_NODE_RANK", "0"))


def nodes() -> int:
    return int(os.environ.get("SLIPSTREAM_NODES", "1"))


def config_of(run: RunFolder) -> RunConfig:
    return RunConfig.model_validate(tomllib.loads(run.run_file.read_text()))


class Leader:
    """One leader: what signals it got, whether it was replaced, how it ended. `beats`: it writes the heartbeat of `who`."""

    def __init__(self, run_dir: str | Path, attempt: int, role: str, who: str, *, beats: bool) -> None:
        self.run = RunFolder.open(run_dir)
        self.config = config_of(self.run)
        self.attempt, self.role, self.who = attempt, role, who
        self.incarnation = job_incarnation()
        self.log = self.run.log_file(role, attempt)
        self.terms: list[str] = []
        self.leaving = ""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
            signal.signal(number, self._on_signal)
        self._next_look = 0.0
        self._replaced = False
        self.beat = Heartbeat(self.run, who, attempt, self.incarnation)
        self._beats = beats
        if beats:
            self.beat.start()

    def _on_signal(self, number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGUSR2 or (number == signal.SIGTERM and not self.leaving and not self.cancelled):
            self.leaving = self.leaving or name
        else:
            self.terms.append(name)

    @property
    def environment(self) -> dict[str, str]:
        """Of its children: they belong to the same job, also where it was started by hand."""
        return {**os.environ, INCARNATION_ENV: self.incarnation}

    @property
    def cancelled(self) -> bool:
        return self.run.cancel_file.exists()

    @property
    def replaced(self) -> bool:
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + ASSIGNMENT_S
            self._replaced = self.run.replaced(self.role, self.incarnation)
        return self._replaced

    def end(self, code: int, reason: str, *, final: bool = False, left: int | None = None) -> int:
        write_exit(self.run, self.who, self.incarnation, self.attempt, code, reason, self.log, final=final, left=left)
        if self._beats:
            self.beat.stop(phase="ended")
        return code
