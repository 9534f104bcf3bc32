"""Small leaders for jobs on a bed: they say what they see, wait for TERM, and obey or not."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from slipstream.process import job_incarnation, on_terminate, write_exit
from slipstream.run_folder import RunFolder, write_json


def report(run: RunFolder, name: str) -> None:
    facts = {
        "environment": dict(os.environ),
        "command": Path(f"/proc/{os.getpid()}/cmdline").read_text().split("\0"),
        "host": socket.gethostname(),
        "cwd": os.getcwd(),
        "umask": os.umask(0o077),
    }
    write_json(run.path / "facts" / f"{name}-{os.environ['SLIPSTREAM_NODE_RANK']}.json", facts)


def _wait(run_dir: Path, attempt: int, role: str, until: Path | None = None) -> int:
    run, told = RunFolder(run_dir), []
    on_terminate(told.append)
    report(run, role)
    while not told and not (until and until.exists()):
        time.sleep(0.05)
    reason = f"stopped by {told[0]}" if told else "finished"
    rank = os.environ["SLIPSTREAM_NODE_RANK"]
    who = "learner" if (role, rank) == ("learner", "0") else f"{role}-{rank}"
    write_exit(run, who, job_incarnation(), attempt, 0, reason, run.log_file(role, attempt))
    return 0


def server(run_dir: Path, attempt: int) -> int:
    return _wait(run_dir, attempt, "server")


def learner(run_dir: Path, attempt: int) -> int:
    """Ends when somebody makes the file `finish` in the run folder."""
    return _wait(run_dir, attempt, "learner", Path(run_dir) / "finish")


def deaf(run_dir: Path, attempt: int) -> int:
    """Ignores TERM, with a child in a session of its own that does too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(3600)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    report(RunFolder(run_dir), "server")
    while True:
        time.sleep(1)


def dies(run_dir: Path, attempt: int) -> int:
    run = RunFolder(run_dir)
    write_exit(
        run, "server-0", job_incarnation(), attempt, 3, "out of luck", run.log_file("server", attempt), final=True
    )
    return 3
