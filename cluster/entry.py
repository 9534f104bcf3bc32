"""What runs inside a job, once on each of its nodes: plain arguments, so nothing that matters is frozen in a pickle.

python -m cluster.entry RUN_DIR --role ROLE --attempt N --incarnation X --leader MODULE:FUNCTION
"""

import argparse
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from cluster.node import INTERFACE_ENV, address, load_environment, place, slurm_place
from slipstream.nodes import HOST_ENV, NODES_ENV, RANK_ENV
from slipstream.process import INCARNATION_ENV, die_with_parent, write_exit
from slipstream.run_folder import RunFolder

# role -> module:function of its leader, called with (run_dir, attempt), returning the exit code
LEADERS = {
    "server": "slipstream.serving.main:run",
    "learner": "slipstream.learner.leader:run",
}
WATCH_S = 1.0
PATIENCE_S = 60.0  # a leader that was told to end ends its children within less


def entry_command(
    python: str, run: RunFolder, role: str, attempt: int, incarnation: str, learner_nodes: int
) -> list[str]:
    """The command of one node of a job."""
    words = [python, "-u", "-m", "cluster.entry", str(run.path), "--role", role, "--attempt", str(attempt)]
    words += ["--incarnation", incarnation]
    if role == "allocation":
        words += ["--leader", LEADERS["learner"], "--server-leader", LEADERS["server"]]
        return [*words, "--learner-nodes", str(learner_nodes)]
    return [*words, "--leader", LEADERS[role]]


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m cluster.entry", description="Run a node of a job.")
    found.add_argument("run_dir")
    found.add_argument("--role", required=True, choices=("server", "learner", "allocation"))
    found.add_argument("--attempt", type=int, required=True)
    found.add_argument("--incarnation", required=True)
    found.add_argument("--leader", required=True, help="module:function, called with (run_dir, attempt)")
    found.add_argument("--server-leader", help="the same for the server nodes of one allocation")
    found.add_argument("--learner-nodes", type=int, default=1, help="of one allocation; the others are server nodes")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of this node's leader."""
    arguments = parser().parse_args(argv)
    run = RunFolder(arguments.run_dir)
    os.umask(0o077)
    # Until the leader has installed its own handlers TERM ends the process, and a time limit that comes near is no news.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    local = os.environ.get("SUBMITIT_EXECUTOR") == "local"
    if local:
        die_with_parent(int(os.environ["SUBMITIT_LOCAL_JOB_ID"]), signal.SIGTERM)
    else:
        load_environment(run)
    os.environ[INCARNATION_ENV] = arguments.incarnation
    node, nodes = (0, 1) if local else slurm_place(os.environ)
    role, rank, of_role = place(arguments.role, node, nodes, arguments.learner_nodes)
    os.environ |= {RANK_ENV: str(rank), NODES_ENV: str(of_role)}
    leader = arguments.server_leader if role == "server" and arguments.server_leader else arguments.leader
    try:
        if not local:
            os.environ[HOST_ENV] = address(os.environ.get(INTERFACE_ENV))
            if temporary := os.environ.get("TMPDIR"):
                Path(temporary).mkdir(mode=0o700, parents=True, exist_ok=True)
        if arguments.role == "allocation" and role == "server":
            end_with(run.exit_file("learner", arguments.incarnation))
        module, _, function = leader.partition(":")
        return int(getattr(importlib.import_module(module), function)(Path(arguments.run_dir), arguments.attempt))
    except Exception as error:
        traceback.print_exc()
        _record_crash(run, role, rank, arguments.attempt, arguments.incarnation, error)
        return 1


def end_with(exit_record: Path) -> None:
    """Once `exit_record` is there, TERM this process, and KILL it where it does not end; from a thread."""

    def watch() -> None:
        while not exit_record.exists():
            time.sleep(WATCH_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-learner", daemon=True).start()


def _record_crash(run: RunFolder, role: str, rank: int, attempt: int, incarnation: str, error: Exception) -> None:
    log = run.logs / f"{role}-{attempt}-crash.log"
    log.write_text("".join(traceback.format_exception(error)))
    who = role if rank == 0 else f"{role}-{rank}"
    write_exit(run, who, incarnation, attempt, 1, f"{type(error).__name__}: {error}", log)


if __name__ == "__main__":
    sys.exit(main())
