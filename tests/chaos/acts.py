"""What the driver does to the bed or to the run when a fault's event is met."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.jobs import read_jobs
from slipstream.run_folder import RunFolder, read_json
from slurm.bed import Bed, BedError
from slurm.bed.machines import inside

SHORT_S = 5.0
UNNOTICED_S = 3.5  # longer than a call of the doubles waits, shorter than slurmctld waits for a node
AWAY_S = 15.0
LONG_S = 60.0
PREEMPTED_S = 60
CANCELLED_S = 15.0  # from a cancel to the last process
USER = "bed1"


class Acts:
    """Each act is given what the event said of itself, and lets the waiting process go on.

    Args:
        start_supervisor: starts one more supervisor; `supervisors` are those started so far.
        lease_s: after which a silent leader is succeeded; `poll_s`: between two looks of the supervisor.
    """

    def __init__(
        self,
        bed: Bed,
        run: RunFolder,
        supervisors: list["subprocess.Popen[str]"],
        start_supervisor: Callable[[], None],
        stop_run: Callable[[], "subprocess.Popen[str]"],
        lease_s: float,
        poll_s: float,
    ) -> None:
        self.bed, self.run = bed, run
        self._supervisors, self._start = supervisors, start_supervisor
        self._stop_run = stop_run
        self._lease_s, self._poll_s = lease_s, poll_s
        self.cancelled_at: float | None = None  # seconds since the epoch, where a person did it
        self.within_s = 0.0  # that all must have ended by then
        self.given_up: list[int | None] = []
        self._undo: list[Callable[[], None]] = []

    def mend(self) -> None:
        """Undo what still stands."""
        while self._undo:
            with contextlib.suppress(BedError):
                self._undo.pop()()

    def power_off(self, at: dict[str, Any], go: Path) -> None:
        self.bed.power_off(at["host"])
        self._undo.append(lambda: self.bed.power_on(at["host"]))

    def drain(self, at: dict[str, Any], go: Path) -> None:
        self.bed.drain(at["host"])
        self._undo.append(lambda: self.bed.resume(at["host"]))
        go.touch()

    def partition_short(self, at: dict[str, Any], go: Path) -> None:
        self.bed.partition(at["host"])
        go.touch()
        time.sleep(UNNOTICED_S)
        self.bed.heal(at["host"])

    def partition_long(self, at: dict[str, Any], go: Path) -> None:
        """Until something else has taken its place, and the cut-off half has written besides."""
        before = self.run.assignment()
        self.bed.partition(at["host"])
        go.touch()
        end = time.monotonic() + LONG_S
        while self.run.assignment() == before and time.monotonic() < end:
            time.sleep(0.5)
        time.sleep(SHORT_S)
        self.bed.heal(at["host"])

    def time_limit(self, at: dict[str, Any], go: Path) -> None:
        """At least a minute from now: SLURM looks for jobs that are near theirs twice a minute."""
        job = self._job("learner")
        elapsed = time.time() - float(self._field(job, "%S", is_time=True))
        minutes, seconds = divmod(int(elapsed + 60), 60)
        self.bed.command("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}:{seconds:02d}")
        go.touch()

    def preempt(self, at: dict[str, Any], go: Path) -> None:
        """With time enough between TERM and KILL to save, also on a busy machine."""
        self._grace(PREEMPTED_S)
        self._undo.append(lambda: self._grace(self.bed.description.grace_seconds))
        nodes = len(self.bed.description.node_names)
        command = ["sbatch", "-p", "main", f"-N{nodes}", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3"]
        self.bed.run("login", command, user="bed2")
        go.touch()

    def _grace(self, seconds: int) -> None:
        self.bed.command("scontrol", "update", "PartitionName=spot", f"GraceTime={seconds}")

    def supervisor_killed(self, at: dict[str, Any], go: Path) -> None:
        self._signal(signal.SIGKILL)
        go.touch()

    def supervisor_stopped(self, at: dict[str, Any], go: Path) -> None:
        helper = self._supervisors[-1].pid
        pid = self._signal(signal.SIGSTOP)
        go.touch()
        self._start()
        time.sleep(2 * self._lease_s)
        for stopped in (helper, pid):  # nsenter stops with the process that it waits for
            if stopped is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stopped, signal.SIGCONT)

    def controller_away(self, at: dict[str, Any], go: Path) -> None:
        self.bed.stop_controller()
        go.touch()
        time.sleep(AWAY_S)
        self.bed.start_controller()

    def accounting_away(self, at: dict[str, Any], go: Path) -> None:
        self.bed.stop_dbd()
        go.touch()
        time.sleep(AWAY_S)
        self.bed.start_dbd()

    def slurmd_restarted(self, at: dict[str, Any], go: Path) -> None:
        self.bed.restart_slurmd(at["host"])
        go.touch()

    def storage_full(self, at: dict[str, Any], go: Path) -> None:
        filler = self.bed.limited / "filler"
        self._undo.append(lambda: filler.unlink(missing_ok=True))
        go.touch()
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        self._until_given_up()

    def storage_refuses(self, at: dict[str, Any], go: Path) -> None:
        """A remount would fail while files are open for writing, so permissions take its place."""
        paths = [self.run.path, *self.run.path.rglob("*")]

        def allow() -> None:
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    path.chmod(path.stat().st_mode | 0o200)

        self._undo.append(allow)
        go.touch()
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                path.chmod(path.stat().st_mode & ~0o222)
        self._until_given_up()

    def nodes_come_back(self, at: dict[str, Any], go: Path) -> None:
        """Another user's jobs end once the run holds nothing, and waits for nodes of the one part before those of the other."""
        end = time.monotonic() + 4 * LONG_S
        while time.monotonic() < end:
            beat = read_json(self.run.heartbeat_file("supervisor")) or {}
            if "starts once the" in str(beat.get("phase")):
                break
            time.sleep(0.2)
        self.bed.command("scancel", "--user", "bed2")

    def _until_given_up(self) -> None:
        """Until the supervisor has ended and left nothing behind; then the storage is mended."""
        end = time.monotonic() + 4 * LONG_S
        while time.monotonic() < end and any(process.poll() is None for process in self._supervisors):
            time.sleep(0.2)
        self.given_up = [process.poll() for process in self._supervisors]
        self.mend()

    def cancel(self, at: dict[str, Any], go: Path) -> None:
        """From when the request is on storage: the command's own start is not what is promised."""
        self._stop_run()
        end = time.monotonic() + LONG_S
        while (request := read_json(self.run.cancel_file)) is None and time.monotonic() < end:
            time.sleep(0.05)
        self._cancelled((request or {"time": time.time()})["time"], CANCELLED_S)

    def scancel(self, at: dict[str, Any], go: Path) -> None:
        job = self._job("learner")
        self._cancelled(time.time(), self._poll_s + CANCELLED_S)
        self.bed.run("login", ["scancel", job], user=USER)

    def _cancelled(self, when: float, within_s: float) -> None:
        self.cancelled_at, self.within_s = when, within_s

    def _signal(self, number: signal.Signals) -> int | None:
        """To the newest supervisor."""
        pid = inside(self._supervisors[-1].pid)
        if pid is not None:
            os.kill(pid, number)
        return pid

    def _job(self, role: str) -> str:
        jobs = [job for attempt in self.run.attempts() for job in read_jobs(self.run, attempt)]
        return next(job.job_id for job in reversed(jobs) if job.role in (role, "allocation"))

    def _field(self, job: str, field: str, *, is_time: bool = False) -> str:
        text = self.bed.command("squeue", "-h", "-j", job, "-o", field).strip()
        return str(time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))) if is_time else text
