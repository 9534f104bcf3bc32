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

from slipstream.learner.failure import Failure, departure
from slipstream.learner.leave import STOP_GRACE_S, Orders
from slipstream.learner.nodes import ROLE, Nodes, environment, torchrun_arguments
from slipstream.node_check import NodeFault, check_node
from slipstream.nodes import Place
from slipstream.process import INCARNATION_ENV, spawn, stop, write_exit
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder

LOG_LINES = 60  # torchrun's own traceback and summary, about 40, come after the ranks'


def read_config(run: RunFolder) -> RunConfig:
    """The resolved configuration of a run."""
    return RunConfig.model_validate(tomllib.loads(run.run_file.read_text(encoding="utf-8")))


def torchrun_command(config: RunConfig, run: RunFolder, attempt: int, place: Place) -> list[str]:
    """The command that starts all ranks of this node. No restarts of its own: the run has one decider."""
    python = config.learner.python or sys.executable
    return [
        python,
        "-m",
        "slipstream.learner.torchrun",
        *torchrun_arguments(config, run, place),
        f"--nproc-per-node={config.learner.processes_per_node}",
        "--max-restarts=0",
        "-m",
        "slipstream.learner.main",
        str(run.path),
        f"--attempt={attempt}",
    ]


def learner_environment(config: RunConfig, run: RunFolder, place: Place) -> dict[str, str]:
    """Environment of the ranks. CUDA_VISIBLE_DEVICES stays as the cluster gave it, unless the run wants no GPU."""
    env = {
        **environment(run, place),
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        INCARNATION_ENV: place.incarnation,
    }
    if config.learner.gpus == 0:
        env.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    return env


def run(run_dir: str | Path, attempt: int) -> int:
    """Lead the learner of a run; the exit code: 0 when it finished, left or was stopped, else torchrun's."""
    folder = RunFolder.open(run_dir)
    config = read_config(folder)
    place = Place.here(config.learner.nodes)
    nodes = Nodes(folder, config, place, attempt)
    log = place.log_file(folder, ROLE, attempt)
    orders = Orders(folder, ROLE, place.incarnation, attempt)
    orders.listen()

    def stopped() -> str | None:
        orders.look(time.monotonic())
        return orders.stop

    child: subprocess.Popen[bytes] | None = None
    code, ended, left = 1, Failure("the leader failed"), None
    try:
        nodes.start()
        check_node(config.learner.gpus, config.learner.processes_per_node, folder.token_file)
        verdict = nodes.assemble(stopped)
        if verdict is None and orders.stop is None:
            child = spawn(
                torchrun_command(config, folder, attempt, place), log, learner_environment(config, folder, place)
            )
            while child.poll() is None and stopped() is None and (verdict := nodes.verdict()) is None:
                orders.woken.wait(0.2)
        if orders.stop is not None and (child is None or child.poll() is None):
            code, ended, left = 0, Failure(orders.stop), orders.left
        elif verdict is not None:
            code, ended = verdict[0], Failure(verdict[1])
        elif child is not None and child.wait() != 0:
            code, ended = nodes.why_failed(child.returncode, log, stopped)
        else:
            code, ended, left = how_it_ended(folder, attempt)
    except NodeFault as error:
        ended = Failure(str(error))
    except Exception as error:
        ended = Failure(f"{type(error).__name__}: {error}")
    finally:
        if child is not None:
            stop(child, STOP_GRACE_S)
        with contextlib.suppress(OSError):  # a full disk: the exit code says what is left to say
            write_exit(
                folder,
                place.role(ROLE),
                place.incarnation,
                attempt,
                code,
                ended.reason,
                log,
                LOG_LINES,
                final=ended.final,
                left=left,
            )
        nodes.stop()
    return code


def how_it_ended(folder: RunFolder, attempt: int) -> tuple[int, Failure, int | None]:
    """Exit code, reason and the step that the ranks left at (None: they did not), once torchrun has ended with 0."""
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
