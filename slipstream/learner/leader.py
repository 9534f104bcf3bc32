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

from slipstream.learner.nodes import ROLE, Nodes, environment, torchrun_arguments
from slipstream.node_check import NodeFault, check_node
from slipstream.nodes import Place
from slipstream.process import on_terminate, spawn, stop, write_exit
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
    env = {**environment(run, place), **os.environ, "TOKENIZERS_PARALLELISM": "false"}
    if config.learner.gpus == 0:
        env.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    return env


def run(run_dir: str | Path, attempt: int) -> int:
    """Lead the learner of a run; the exit code: 0 when it finished or was stopped, else torchrun's."""
    folder = RunFolder.open(run_dir)
    config = read_config(folder)
    place = Place.here(config.learner.nodes)
    nodes = Nodes(folder, config, place, attempt)
    log = place.log_file(folder, ROLE, attempt)
    woken = threading.Event()
    stopped_by: list[str] = []

    def on_signal(name: str) -> None:
        stopped_by.append(name)
        woken.set()

    on_terminate(on_signal)
    child: subprocess.Popen[bytes] | None = None
    code, reason = 1, "the leader failed"
    try:
        nodes.start()
        check_node(config.learner.gpus, config.learner.processes_per_node, folder.token_file)
        ended = nodes.assemble(lambda: stopped_by)
        if ended is None and not stopped_by:
            command = torchrun_command(config, folder, attempt, place)
            child = spawn(command, log, learner_environment(config, folder, place))
            while child.poll() is None and not stopped_by and (ended := nodes.verdict()) is None:
                woken.wait(0.2)
        if child is not None and child.poll() is not None and ended is None and not stopped_by:
            code, reason = child.returncode, "finished"
            if code != 0:
                code, reason = nodes.why_failed(code, log, lambda: stopped_by)
        elif ended is not None:
            code, reason = ended
        if stopped_by:
            code, reason = 0, f"stopped by {stopped_by[0]}"
    except NodeFault as error:
        reason = str(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    finally:
        if child is not None:
            stop(child)
        write_exit(folder, place.role(ROLE), place.incarnation, attempt, code, reason, log, lines=LOG_LINES)
        nodes.stop()
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
