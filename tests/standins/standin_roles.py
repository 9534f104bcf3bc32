"""Small leaders that stand in for server and learner: they obey the contracts and break where STANDIN says so.

STANDIN is a comma-separated list of faults, like "server:die,learner:hang"; "learner:die once" breaks the first only.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from slipstream.process import Heartbeat, job_incarnation, on_terminate, spawn, write_exit
from slipstream.run_folder import RunFolder, append_jsonl, read_json, write_json

STEPS = 5


def fault(role: str) -> str:
    faults = dict(item.split(":") for item in os.environ.get("STANDIN", "").split(",") if item)
    return faults.get(role, "")


class Standin:
    """A leader with one child that sleeps, as the real ones have."""

    def __init__(self, run_dir: str | Path, attempt: int, role: str, who: str) -> None:
        self.run = RunFolder.open(run_dir)
        self.attempt, self.role, self.who = attempt, role, who
        self.incarnation = job_incarnation()
        self.log = self.run.log_file(role, attempt)
        self.signal = ""
        on_terminate(self._on_signal)
        self.child = spawn([sys.executable, "-c", "import time; time.sleep(600)"], self.log)
        self.say(f"{role} child {self.child.pid}")
        self.beat = Heartbeat(self.run, who, attempt, self.incarnation).start()

    def _on_signal(self, name: str) -> None:
        self.signal = name

    def say(self, text: str) -> None:
        with open(self.log, "a") as file:
            file.write(text + "\n")

    def fault_now(self) -> None:
        """Break here, where this role is told to."""
        kind, _, times = fault(self.role).partition(" ")
        broken = self.run.path / f"{self.role}.broken"
        if times == "once" and kind:
            if broken.exists():
                return
            broken.touch()
        if kind == "die":
            self.say(f"{self.role}: RuntimeError: out of luck")
            self.end(3, f"{self.role} is out of luck")
        if kind == "kill":
            self.say(f"{self.role} about to be killed")
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "raise":
            raise RuntimeError(f"the {self.role}'s leader is broken")
        if kind == "wait":
            while not (self.run.path / "go").exists() and not self.signal:
                time.sleep(0.05)
        if kind == "hang":
            self.until_stopped()
        if kind == "deaf":
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            while True:
                time.sleep(1)

    def until_stopped(self) -> None:
        while not self.signal:
            time.sleep(0.05)
        self.end(0, f"stopped by {self.signal}")

    def end(self, code: int, reason: str) -> None:
        self.child.kill()
        self.child.wait()
        write_exit(self.run, self.who, self.incarnation, self.attempt, code, reason, self.log)
        self.beat.stop(phase="ended")
        raise SystemExit(code)


def endpoint_counts(run: RunFolder) -> bool:
    endpoint = read_json(run.endpoint_file())
    return bool(endpoint) and endpoint["incarnation"] == run.assignment().get("server")


def server(run_dir: Path, attempt: int) -> int:
    standin = Standin(run_dir, attempt, "server", "server-0")
    standin.fault_now()
    write_json(
        standin.run.endpoint_file(),
        {"url": "http://127.0.0.1:9", "attempt": attempt, "incarnation": standin.incarnation},
    )
    standin.beat.update(phase="serving")
    standin.until_stopped()
    return 0


def learner(run_dir: Path, attempt: int) -> int:
    standin = Standin(run_dir, attempt, "learner", "learner")
    run = standin.run
    while not endpoint_counts(run) and not standin.signal:
        time.sleep(0.05)
    standin.beat.update(phase="training", step=0, max_steps=STEPS)
    while (read_json(run.heartbeat_file("learner")) or {}).get("max_steps") != STEPS and not standin.signal:
        time.sleep(0.05)  # a real learner's first step takes longer than this
    for step in range(1, STEPS + 1):
        if standin.signal:
            standin.until_stopped()
        if step == 3:
            standin.fault_now()
        window = {"step": step, "time": time.time(), "reward": step / STEPS, "eval/reward": step / STEPS}
        append_jsonl(run.records(attempt) / "metrics.jsonl", window)
        standin.beat.update(phase="training", step=step, max_steps=STEPS, progress=step)
    write_json(run.path / "result.json", {"attempt": attempt, "steps": STEPS})
    standin.end(0, "finished")
    return 0


def quick(run_dir: Path, attempt: int) -> int:
    """Ends at once with the code in STANDIN_CODE."""
    return int(os.environ.get("STANDIN_CODE", "0"))


def print_environment(run_dir: Path, attempt: int) -> int:
    """Writes what a job sees of its surroundings."""
    stdin = os.read(0, 1)
    facts = {
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "session": os.getsid(0),
        "parent": os.getppid(),
        "stdin": stdin.decode(),
        "interrupt_ignored": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
    }
    write_json(Path(run_dir) / "facts.json", facts)
    return 0


def with_orphan(run_dir: Path, attempt: int) -> int:
    """Starts a child that leaves the session and does not die with its parent, then waits."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    write_json(Path(run_dir) / "orphan.json", {"pid": child.pid, "leader": os.getpid()})
    while True:
        time.sleep(1)
