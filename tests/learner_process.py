"""A real learner job in tests, against a server that runs already."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from slipstream.config_file import dump_config
from slipstream.learner.checkpoint import latest_complete, ledger_known
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, read_json, write_atomic, write_json
from tests.serving_process import VllmServer, wait_for

FINISH_S = 300.0


def write_prompts(path: Path, count: int) -> Path:
    """A conversational data set of short prompts."""
    rows = [{"prompt": [{"role": "user", "content": f"count {i}"}], "label": str(i)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def learner_run(
    root: Path,
    run_id: str,
    server: VllmServer,
    data: Path,
    *,
    sections: dict[str, dict[str, Any]] | None = None,
    **trainer: Any,
) -> RunFolder:
    """A run folder whose first attempt uses `server`. `sections`: further settings of other sections than the trainer."""
    more = sections or {}
    settings = {
        "max_completion_length": 12,
        "num_generations": 4,
        "token_budget": 256,
        "learning_rate": 1e-3,
        "gradient_checkpointing": False,
        "save_steps": 2,
        **trainer,
    }
    config = RunConfig.model_validate(
        {
            "name": "test",
            "model": {"name": str(server.model)},
            "data": {"source": str(data), **more.get("data", {})},
            "reward": {"functions": ["tests.sample_rewards:low_bytes"]},
            "trainer": settings,
            "server": {"gpus": 0, "max_model_len": 512},
            "learner": {"gpus": 0, "processes_per_node": 2, **more.get("learner", {})},
        }
    )
    run = RunFolder.create(root, run_id)
    write_atomic(run.run_file, dump_config(config))
    write_atomic(run.token_file, Path(server.token_file).read_text())
    begin_attempt(run, server)
    return run


def begin_attempt(run: RunFolder, server: VllmServer) -> int:
    """Claim the next attempt, from the newest complete checkpoint, with `server` as its endpoint."""
    found = latest_complete(run)
    checkpoint, step = (str(found[0].relative_to(run.path)), found[1]) if found else (None, 0)
    attempt = run.begin_attempt(checkpoint, step, ledger_known(found[0]) if found else None)
    endpoint = {"url": server.base_url, "incarnation": "test", "attempt": attempt, "model": str(server.model)}
    write_json(run.endpoint_file(), {**endpoint, "authenticated": True, "capabilities": {}})
    return attempt


@contextlib.contextmanager
def learner(run: RunFolder, attempt: int) -> Iterator[subprocess.Popen[bytes]]:
    """The learner job's leader; nothing of it is left afterwards."""
    repository = Path(__file__).resolve().parents[1]
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": str(repository),
    }
    command = [sys.executable, "-m", "slipstream.learner.leader", str(run.path), "--attempt", str(attempt)]
    leader = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield leader
    finally:
        if leader.poll() is None:
            leader.send_signal(signal.SIGINT)  # at once; TERM lets it save first
            try:
                leader.wait(60)
            except subprocess.TimeoutExpired:
                leader.kill()
        leader.wait()


def ranks_of(leader: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The rank processes under a leader."""
    found = []
    for process in psutil.Process(leader.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if (
                "slipstream.learner.main" in process.cmdline()
                and "slipstream.learner.torchrun" not in process.cmdline()
            ):
                found.append(process)
    return found


def rollout_process(leader: subprocess.Popen[bytes]) -> psutil.Process:
    """The only process that a rank has spawned through multiprocessing."""
    (found,) = rollout_processes(leader)
    return found


def rollout_processes(leader: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Processes that ranks have spawned through multiprocessing."""
    return [
        p for rank in ranks_of(leader) for p in rank.children() if any("spawn_main" in word for word in p.cmdline())
    ]


def step_of(run: RunFolder) -> int:
    """The step that the learner's heartbeat names."""
    return int((read_json(run.heartbeat_file("learner")) or {}).get("step", 0))


def reach(run: RunFolder, leader: subprocess.Popen[bytes], step: int) -> None:
    """Wait until the learner has finished this step; fails where it ends before."""

    def reached() -> bool:
        assert leader.poll() is None, run.log_file("learner", run.attempts()[-1]).read_text()[-4000:]
        return step_of(run) >= step

    wait_for(reached, f"step {step}", FINISH_S)


def finish(run: RunFolder, leader: subprocess.Popen[bytes], attempt: int, seconds: float = FINISH_S) -> dict[str, Any]:
    """Wait for the learner's end; its result."""
    log = run.log_file("learner", attempt)
    wait_for(lambda: leader.poll() is not None, f"the learner's end, see {log},", seconds)
    assert leader.returncode == 0, log.read_text()[-4000:]
    result = read_json(run.path / "result.json")
    assert result is not None
    return dict(result)
