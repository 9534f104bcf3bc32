"""Leader of the learner job: stands in front of torchrun, so that signals never reach it unprepared.

python -m slipstream.learner.leader RUN_DIR --attempt N
"""

import argparse
import contextlib
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from slipstream.learner.failure import Failure, departure, first_failure
from slipstream.learner.leave import STOP_GRACE_S, Orders
from slipstream.process import INCARNATION_ENV, how_ended, job_incarnation, spawn, stop, write_exit
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


def learner_environment(config: RunConfig, incarnation: str) -> dict[str, str]:
    """Environment of the ranks."""
    env = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "TOKENIZERS_PARALLELISM": "false", INCARNATION_ENV: incarnation}
    if config.learner.gpus == 0:
        env.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    return env


def run(run_dir: str | Path, attempt: int) -> int:
    """Lead the learner of a run; the exit code: 0 when it finished, left or was stopped, else torchrun's."""
    folder = RunFolder.open(run_dir)
    config = read_config(folder)
    incarnation = job_incarnation()
    log = folder.log_file(ROLE, attempt)
    orders = Orders(folder, ROLE, incarnation, attempt)
    orders.listen()
    child: subprocess.Popen[bytes] | None = None
    code, ended, left = 1, Failure("the leader failed"), None
    try:
        child = spawn(torchrun_command(config, folder, attempt), log, learner_environment(config, incarnation))
        while child.poll() is None and orders.stop is None:
            orders.woken.wait(0.2)
            orders.look(time.monotonic())
        if child.poll() is None and orders.stop is not None:
            code, ended, left = 0, Failure(orders.stop), orders.left
        else:
            code, ended, left = how_it_ended(folder, attempt, log, child.wait())
    except Exception as error:
        ended = Failure(f"{type(error).__name__}: {error}")
    finally:
        if child is not None:
            stop(child, STOP_GRACE_S)
        with contextlib.suppress(OSError):  # a full disk: the exit code says what is left to say
            write_exit(
                folder, ROLE, incarnation, attempt, code, ended.reason, log, LOG_LINES, final=ended.final, left=left
            )
    return code


def how_it_ended(folder: RunFolder, attempt: int, log: Path, code: int) -> tuple[int, Failure, int | None]:
    """Exit code, reason and the step that the ranks left at (None: they did not), once torchrun has ended with `code`."""
    if code != 0:
        return code, first_failure(folder, attempt, log) or Failure(f"torchrun ended {how_ended(code)}"), None
    gone = departure(folder, attempt)
    return (0, Failure("finished"), None) if gone is None else (0, Failure(gone[1]), gone[0])


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
