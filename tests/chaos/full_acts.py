"""What the driver does to a run of the full stack, as seen from outside."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from slipstream.learner.checkpoint import latest_complete
from tests.chaos.acts import Acts
from tests.full_stack import FullRun

GRACE_S = 60


class FullActs:
    """One method per act. `supervisors` are those started so far, the newest last."""

    def __init__(self, run: FullRun, supervisors: list["subprocess.Popen[str]"], lease_s: float, poll_s: float) -> None:
        self.run, self.bed = run, run.bed
        self.usual = Acts(run.bed, run.run, supervisors, self._another, self._stop, lease_s, poll_s)
        self._supervisors = supervisors
        self._undo: list[Callable[[], object]] = []

    @property
    def given_up(self) -> list[int | None]:
        """How the supervisors of a run ended whose storage failed."""
        return self.usual.given_up

    def mend(self) -> None:
        self.usual.mend()
        while self._undo:
            self._undo.pop()()

    def _stop(self) -> "subprocess.Popen[str]":
        return self.run.command("stop", str(self.run.run.path), "--why", "chaos")

    def _another(self) -> None:
        self._supervisors.append(self.run.supervise())

    def _host(self, role: str) -> dict[str, str]:
        return {"host": self.run.host(role)}

    def _go(self) -> Path:
        return self.run.folder / "go"

    # -- the server

    def kill_server(self) -> None:
        signal_all(self.run.engine(), signal.SIGKILL)

    def stop_server(self) -> None:
        signal_all([*self.run.engine(), *self.run.processes("EngineCore")], signal.SIGSTOP)

    def kill_server_leader(self) -> None:
        signal_all(self.run.leader("server"), signal.SIGKILL)

    def power_off_server(self) -> None:
        self.usual.power_off(self._host("server"), self._go())

    # -- the learner

    def kill_rank_0(self) -> None:
        signal_all([p for p in self.run.ranks() if p.environ().get("RANK") == "0"], signal.SIGKILL)

    def kill_rank(self) -> None:
        signal_all([p for p in self.run.ranks() if p.environ().get("RANK") == "1"], signal.SIGKILL)

    def stop_rank(self) -> None:
        signal_all([p for p in self.run.ranks() if p.environ().get("RANK") == "1"], signal.SIGSTOP)

    def kill_learner_leader(self) -> None:
        signal_all(self.run.leader("learner"), signal.SIGKILL)

    def kill_rollout(self) -> None:
        signal_all(self.run.rollout(), signal.SIGKILL)

    def stop_rollout(self) -> None:
        signal_all(self.run.rollout(), signal.SIGSTOP)

    def truncate_checkpoint(self) -> None:
        """The newest loses the half of its weights, then rank 0 dies."""
        if found := latest_complete(self.run.run):
            weights = max(found[0].glob("*.safetensors"), key=lambda path: path.stat().st_size)
            os.truncate(weights, weights.stat().st_size // 2)
        self.kill_rank_0()

    def drain_and_kill(self) -> None:
        self.usual.drain(self._host("learner"), self._go())
        self.kill_rank_0()

    # -- nodes, network, time, others

    def power_off_learner(self) -> None:
        self.usual.power_off(self._host("learner"), self._go())

    def partition_short(self) -> None:
        self.usual.partition_short(self._host("learner"), self._go())

    def partition_long(self) -> None:
        self.usual.partition_long(self._host("learner"), self._go())

    def partition_short_server(self) -> None:
        self.usual.partition_short(self._host("server"), self._go())

    def partition_long_server(self) -> None:
        self.usual.partition_long(self._host("server"), self._go())

    def limit_time(self) -> None:
        self.run.limit_time("learner", 35)

    def preempt(self) -> None:
        host = self._host("learner")["host"]
        self.bed.command("scontrol", "update", "PartitionName=spot", f"GraceTime={GRACE_S}")
        usual = ("scontrol", "update", "PartitionName=spot", f"GraceTime={self.bed.description.grace_seconds}")
        self._undo.append(lambda: self.bed.command(*usual))
        words = ["sbatch", "-p", "main", "-w", host, "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3"]
        self.bed.run("login", words, user="bed2")

    # -- who leads, and SLURM

    def kill_supervisor(self) -> None:
        self.usual.supervisor_killed({}, self._go())

    def stop_supervisor(self) -> None:
        self.usual.supervisor_stopped({}, self._go())

    def controller_away(self) -> None:
        self.usual.controller_away({}, self._go())

    def accounting_away(self) -> None:
        self.usual.accounting_away({}, self._go())

    def restart_slurmd(self) -> None:
        self.usual.slurmd_restarted(self._host("learner"), self._go())

    # -- storage that is mended once the supervisor has given up, and what a person can do wrong

    def storage_full(self) -> None:
        self.usual.storage_full({}, self._go())

    def storage_refuses(self) -> None:
        self.usual.storage_refuses({}, self._go())

    def spoil_reward(self) -> None:
        self.run.pace("nonsense")

    def cancel(self) -> None:
        self.usual.cancel({}, self._go())

    def scancel(self) -> None:
        self.usual.scancel({}, self._go())


def signal_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    """To all of them. Raises LookupError where there is none."""
    if not processes:
        raise LookupError("there is no such process now")
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def wait_a_little(draw: random.Random) -> None:
    """So that a fault does not always strike right after what was seen."""
    time.sleep(draw.uniform(0, 0.5))
