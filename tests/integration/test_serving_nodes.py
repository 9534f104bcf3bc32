"""A real server of two nodes on this machine: one engine of vLLM's CPU build on each, one address, one delivery."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from slipstream.process import new_incarnation
from slipstream.run_folder import RunFolder, read_json
from slipstream.serving.control import ServerControl
from slipstream.serving.transport import make_transport
from tests.serving_process import (
    START_S,
    VllmServer,
    delivery,
    descendants,
    largest_difference,
    load,
    new_run,
    start_leader,
    wait_for,
)

pytestmark = pytest.mark.integration

PROMPT = [5, 6, 7, 8]


@contextmanager
def two_nodes(run: RunFolder) -> Iterator[list[subprocess.Popen[bytes]]]:
    incarnation = new_incarnation()
    leaders = []
    try:
        for node in range(2):
            place = {"SLIPSTREAM_NODE_RANK": str(node), "SLIPSTREAM_NODES": "2", "SLIPSTREAM_INCARNATION": incarnation}
            root = str(Path(__file__).resolve().parents[2])
            leaders.append(start_leader(run, SLIPSTREAM_HOST=f"127.0.0.{node + 1}", PYTHONPATH=root, **place))
        yield leaders
    finally:
        for leader in leaders:
            if leader.poll() is None:
                leader.terminate()
        for leader in leaders:
            try:
                leader.wait(60)
            except subprocess.TimeoutExpired:
                leader.kill()
                leader.wait()


def record(run: RunFolder, node: int) -> dict[str, Any]:
    (path,) = (run.path / "exit").glob(f"server-{node}-*.json")
    return dict(read_json(path) or {})


def texts(run: RunFolder) -> str:
    return "\n".join(path.read_text()[-3000:] for path in run.logs.glob("server-*"))


def test_two_nodes_serve_take_weights_on_both_and_end_together(tiny_model_tied: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path / "runs", tiny_model_tied, "nodes", nodes=2, data_parallel_size=2)
    with two_nodes(run) as leaders:

        def endpoint() -> Any:
            assert all(leader.poll() is None for leader in leaders), texts(run)
            return read_json(run.endpoint_file())

        url = wait_for(endpoint, "the endpoint file", 2 * START_S)["url"]
        server = VllmServer(run, tiny_model_tied, url, leaders[0])
        families = [descendants(leader.pid) for leader in leaders]
        assert all(families)
        with server.control() as control:
            assert control.world_size() == 2
            deliver_changed_weights(run, control, server)
        beats = [read_json(run.heartbeat_file(f"server-{node}")) for node in (0, 1)]
        assert len({beat["incarnation"] for beat in beats}) == 1
        assert {beat["phase"] for beat in beats} == {"serving"}

        victims = [p for p in families[1] if p.is_running()]
        for process in victims:  # node 1's engines die, its leader lives
            process.kill()
        wait_for(lambda: all(leader.poll() is not None for leader in leaders), "the end of both leaders")
        everything = [p for family in families for p in family]
        wait_for(lambda: not any(alive(p) for p in everything), "the end of every process")
    assert record(run, 1)["reason"] == "the engines of node 1 ended by SIGKILL"
    assert "node 1 (" in record(run, 0)["reason"]
    assert "the engines of node 1 ended by SIGKILL" in record(run, 0)["reason"]
    assert (leaders[0].returncode, leaders[1].returncode) == (1, 1)
    assert (run.logs / "server-1-n1.log").is_file()


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def deliver_changed_weights(run: RunFolder, control: ServerControl, server: VllmServer) -> None:
    """Both engines generate with the weights that came from 127.0.0.1."""
    model = load(server.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    transport = make_transport(control, "slipstream", torch.device("cpu"), run.run_id, 1, 120.0, bind_host="127.0.0.1")
    try:
        transport.connect()
        transport.send(*delivery(model), label=f"{run.run_id}/a1/1")
    finally:
        transport.close()
    for _ in range(4):  # the requests go to the engines in turn
        assert largest_difference(server.generate(PROMPT), model, PROMPT) < 1e-3
    counts = [line for line in control.metrics().splitlines() if line.startswith("vllm:generation_tokens_total{")]
    assert len(counts) == 2
    assert all(float(line.split()[-1]) > 0 for line in counts), "one engine generated nothing"


def test_the_death_of_the_first_nodes_leader_ends_the_others(tmp_path: Path) -> None:
    """The stand-in engines only sleep: what counts is that the leader notices."""
    stand_in = tmp_path / "vllm"
    stand_in.write_text("#!/bin/sh\nexec sleep 600\n")
    stand_in.chmod(0o755)
    run = new_run(tmp_path / "runs", Path("none"), "dead", nodes=2, data_parallel_size=2, command=[str(stand_in)])
    with two_nodes(run) as leaders:
        wait_for(lambda: (read_json(run.heartbeat_file("server-1")) or {}).get("phase") == "serving", "engines")
        family = descendants(leaders[1].pid)
        assert family
        leaders[0].terminate()
        wait_for(lambda: leaders[1].poll() is not None, "the end of the other leader")
        assert not any(alive(p) for p in family)
    assert record(run, 0)["reason"] == "stopped by SIGTERM"
    assert "stopped by SIGTERM" in record(run, 1)["reason"]
    assert record(run, 1)["returncode"] == 0
    assert os.path.exists(run.logs / "server-1-n1.log")
