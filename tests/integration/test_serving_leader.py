"""The leader of the server job: what it leaves behind, however it ends."""

import signal
from pathlib import Path

import psutil
import pytest
import torch

from slipstream.run_folder import read_json
from slipstream.serving.transport import SlipstreamTransport
from tests.models import new_model
from tests.serving_process import (
    START_S,
    all_gone,
    delivery,
    descendants,
    largest_difference,
    load,
    new_run,
    read_exit,
    serving,
    start_leader,
    wait_for,
)

pytestmark = pytest.mark.integration
PROMPT = list(range(30, 80))


def engine_started(leader_pid: int) -> list[psutil.Process]:
    """The leader's processes once vLLM has started its engine in one of its own, else []."""
    api = psutil.Process(leader_pid).children()
    return descendants(leader_pid) if api and api[0].children() else []


def test_an_untied_model_syncs_and_term_leaves_nothing(tiny_model_untied: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path, tiny_model_untied, "untied")
    first, second = load(tiny_model_untied), new_model(tied=False, seed=1)
    assert not second.config.tie_word_embeddings
    with serving(run, tiny_model_untied) as server:
        assert largest_difference(server.generate(PROMPT), first, PROMPT) < 1e-4
        with server.control() as control:
            transport = SlipstreamTransport(control, torch.device("cpu"), "untied", 1, 60)
            transport.connect()
            transport.send(*delivery(second), label="untied/a1/0")
            assert largest_difference(server.generate(PROMPT), second, PROMPT) < 1e-4
            transport.send(*delivery(first), label="untied/a1/1")
            assert largest_difference(server.generate(PROMPT), first, PROMPT) < 1e-4
            transport.close()
        processes = descendants(server.leader.pid)
        assert len(processes) >= 2
        server.leader.terminate()
        assert server.leader.wait(60) == 0
    wait_for(lambda: all_gone(processes), "the end of every process of the server")
    record = read_exit(run)
    assert (record["role"], record["attempt"], record["returncode"]) == ("server-0", 1, 0)
    assert record["reason"] == "stopped by SIGTERM"
    heartbeat = read_json(run.heartbeat_file("server-0"))
    assert heartbeat is not None
    assert heartbeat["phase"] == "ended"
    assert heartbeat["incarnation"] == record["incarnation"]
    assert not run.endpoint_file().exists(), "it takes its address back"


def test_a_leader_that_is_killed_leaves_no_server(tiny_model_tied: Path, tmp_path: Path) -> None:
    leader = start_leader(new_run(tmp_path, tiny_model_tied, "killed"))
    try:
        processes = wait_for(lambda: engine_started(leader.pid), "the start of the engine", START_S)
    finally:
        leader.kill()
        leader.wait(60)
    wait_for(lambda: all_gone(processes), "the end of the server's processes")


def test_a_server_that_dies_ends_the_leader_with_its_last_lines(tiny_model_tied: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path, tiny_model_tied, "dead")
    with serving(run, tiny_model_tied) as server:
        processes = descendants(server.leader.pid)
        psutil.Process(server.leader.pid).children()[0].send_signal(signal.SIGKILL)
        assert server.leader.wait(60) == 1
    wait_for(lambda: all_gone(processes), "the end of the server's processes")
    record = read_exit(run)
    assert record["returncode"] == 1
    assert "the server ended by SIGKILL" in record["reason"]
    assert "Application startup complete" in record["last_lines"]


def test_a_server_that_does_not_start_is_reported(tiny_model_tied: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path, tiny_model_tied, "refused", extra_args=["--no-such-flag"])
    leader = start_leader(run)
    assert leader.wait(START_S) == 1
    record = read_exit(run)
    assert "the server ended with code 2" in record["reason"]
    assert "--no-such-flag" in record["last_lines"]
    assert not run.endpoint_file().exists()


def test_a_server_that_takes_too_long_is_ended(tiny_model_tied: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path, tiny_model_tied, "slow", startup_timeout=0.5)
    leader = start_leader(run)
    assert leader.wait(START_S) == 1
    assert "not healthy within" in read_exit(run)["reason"]


def test_term_during_the_start_leaves_nothing(tiny_model_tied: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path, tiny_model_tied, "early")
    leader = start_leader(run)
    processes = wait_for(lambda: psutil.Process(leader.pid).children(), "the start of the server", START_S)
    leader.terminate()
    assert leader.wait(60) == 0
    assert all_gone(processes)
    assert read_exit(run)["reason"] == "stopped by SIGTERM"


def test_a_missing_vllm_is_reported(tiny_model_tied: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path, tiny_model_tied, "no-vllm")
    leader = start_leader(run, SLIPSTREAM_VLLM_PYTHON=str(tmp_path / "none"))
    assert leader.wait(60) == 1
    assert "SLIPSTREAM_VLLM_PYTHON" in read_exit(run)["reason"]
