"""Leaders of a learner of several nodes on this machine, each on a loopback address of its own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.config_file import dump_config
from slipstream.process import new_incarnation
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, read_json, write_atomic
from tests.standins.replayed_learner import write_interpreter

ROOT = Path(__file__).resolve().parents[1]


def nodes_run(folder: Path, run_id: str, nodes: int, ranks: int, max_steps: int = 4, **learner: Any) -> RunFolder:
    """A run whose learner is `tests.standins.replayed_learner`, with its first attempt begun."""
    folder.mkdir(parents=True, exist_ok=True)
    config = RunConfig.model_validate(
        {
            "model": {"name": "made-up"},
            "data": {"source": "made-up.jsonl"},
            "trainer": {"max_steps": max_steps},
            "server": {"gpus": 0},
            "learner": {
                "gpus": 0,
                "nodes": nodes,
                "processes_per_node": ranks,
                "python": str(write_interpreter(folder / "python")),
                "startup_timeout": 300,
                **learner,
            },
        }
    )
    run = RunFolder.create(folder / "runs", run_id)
    write_atomic(run.run_file, dump_config(config))
    run.begin_attempt(None, 0)
    return run


@contextlib.contextmanager
def leaders(
    run: RunFolder, nodes: int, started_on: Sequence[int] | None = None, **environment: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The leaders of all nodes (or of some) of the newest attempt; none is left afterwards."""
    incarnation = new_incarnation()
    started: list[subprocess.Popen[bytes]] = []
    try:
        for node in range(nodes) if started_on is None else started_on:
            place = {
                "SLIPSTREAM_NODE_RANK": str(node),
                "SLIPSTREAM_NODES": str(nodes),
                "SLIPSTREAM_HOST": f"127.0.0.{node + 1}",
                "SLIPSTREAM_INCARNATION": incarnation,
            }
            env = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "PASSIVE",
                **(place if nodes > 1 else {}),
                **environment,
            }
            command = [sys.executable, "-m", "slipstream.learner.leader", str(run.path)]
            command += ["--attempt", str(run.attempts()[-1])]
            started.append(subprocess.Popen(command, env=env))
        yield started
    finally:
        for leader in started:
            if leader.poll() is None:
                leader.terminate()
        for leader in started:
            try:
                leader.wait(60)
            except subprocess.TimeoutExpired:
                leader.kill()
                leader.wait()


def exit_of(run: RunFolder, node: int) -> dict[str, Any] | None:
    """The exit record of the leader of a node."""
    pattern = "learner-*.json" if node == 0 else f"learner.{node}-*.json"
    records = sorted((run.path / "exit").glob(pattern))
    return dict(read_json(records[0]) or {}) if records else None
