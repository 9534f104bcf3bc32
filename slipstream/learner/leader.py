"""Leader of the learner job: stands in front of torchrun, so that signals never reach it unprepared.

python -m slipstream.learner.leader RUN_DIR --attempt N
"""

import argparse
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Sequence
from pathlib import Path

from slipstream.learner.failure import first_failure
from slipstream.process import how_ended, new_incarnation, on_terminate, spawn, stop, write_exit
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder

ROLE = "learner"
LOG_LINES = 60  # torchrun's own traceback and summary, about 40, come after the ranks'


def read_config(run: RunFolder) -> RunConfig:
    """The resolved configuration of a run."""
    return RunConfig.model_validate(tomllib.loads(run.run_file.read_text(encoding="utf-8")))


def torchrun_command(config: RunConfig, run: RunFolder, attempt: int) -> list[str]:
    """The command that starts all ranks of this node. No restarts of its own: the run has one decider."""
    python = config.learner.python or sys.executable
    return [
        python,
        "-m",
        "slipstream.learner.torchrun",
        "--nnodes=1",
        "--rdzv-endpoint=127.0.0.1:0",
        f"--rdzv-id={run.run_id}",
        f"--nproc-per-node={config.learner.processes_per_node}",
        "--max-restarts=0",
        "-m",
        "slipstream.learner.main",
        str(run.path),
        f"--attempt={attempt}",
    ]


def learner_environment(config: RunConfig) -> dict[str, str]:
    """Environment of the ranks."""
    env = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "TOKENIZERS_PARALLELISM": "false"}
    if config.learner.gpus == 0:
        env.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    return env


def run(run_dir: str | Path, attempt: int) -> int:
    """Lead the learner of a run; the exit code: 0 when it finished or was stopped, else torchrun's."""
    folder = RunFolder.open(run_dir)
    config = read_config(folder)
    incarnation = new_incarnation()
    log = folder.log_file(ROLE, attempt)
    woken = threading.Event()
    stopped_by: list[str] = []

    def on_signal(name: str) -> None:
        stopped_by.append(name)
        woken.set()

    on_terminate(on_signal)
    child: subprocess.Popen[bytes] | None = None
    code, reason = 1, "the leader failed"
    try:
        child = spawn(torchrun_command(config, folder, attempt), log, learner_environment(config))
        while child.poll() is None and not stopped_by:
            woken.wait(0.2)
        if stopped_by:
            code, reason = 0, f"stopped by {stopped_by[0]}"
        else:
            code = child.returncode
            reason = "finished"
            if code != 0:
                reason = first_failure(folder, attempt, log) or f"torchrun ended {how_ended(code)}"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    finally:
        if child is not None:
            stop(child)
        write_exit(folder, ROLE, incarnation, attempt, code, reason, log, lines=LOG_LINES)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m slipstream.learner.leader", description="Lead the learner of a run."
    )
    parser.add_argument("run_dir", help="the run folder")
    parser.add_argument("--attempt", type=int, required=True, help="number of the attempt")
    arguments = parser.parse_args(argv)
    return run(arguments.run_dir, arguments.attempt)


if __name__ == "__main__":
    sys.exit(main())
