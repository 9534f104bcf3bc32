"""Real vLLM servers that die under a learner of two ranks: only the server is started again."""

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from slipstream.config_file import dump_config
from slipstream.learner.checkpoint import RolloutState, latest_complete
from slipstream.metrics.audit import check_lines
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, read_json, read_jsonl, write_atomic, write_json
from slipstream.serving.control import ServerControl, ServerError
from slipstream.serving.stall import look_at
from tests.learner_process import finish, learner, ranks_of, step_of, write_prompts
from tests.serving_process import START_S, start_leader, stop_in_a_delivery, wait_for

pytestmark = pytest.mark.integration

PROMPTS = 180
LEARNER = "thelearner"


def make_run(root: Path, model: Path) -> RunFolder:
    settings: dict[str, Any] = {
        "name": "restart",
        "model": {"name": str(model)},
        "data": {"source": str(write_prompts(root / "train.jsonl", PROMPTS))},
        "reward": {"functions": ["tests.sample_rewards:low_bytes"]},
        "trainer": {
            "max_completion_length": 32,
            "num_generations": 4,
            "token_budget": 256,
            "learning_rate": 1e-3,
            "gradient_checkpointing": False,
            "num_train_epochs": 1,
            "save_steps": 10,
        },
        "server": {"gpus": 0, "max_model_len": 512, "kv_cache_memory": "64M"},
        "learner": {"gpus": 0, "processes_per_node": 2},
    }
    run = RunFolder.create(root / "runs", "restart")
    write_atomic(run.run_file, dump_config(RunConfig.model_validate(settings)))
    run.begin_attempt(None, 0)
    return run


def assign(run: RunFolder, server: str) -> None:
    write_json(run.assignment_file, {"attempt": 1, "server": server, "learner": LEARNER})


@contextlib.contextmanager
def assigned_server(run: RunFolder, incarnation: str) -> Iterator[subprocess.Popen[bytes]]:
    """The server that counts from now on, from its start; however it ends, nothing of it is left."""
    assign(run, incarnation)
    leader = start_leader(run, SLIPSTREAM_INCARNATION=incarnation)
    try:
        yield leader
    finally:
        leader.terminate()
        leader.wait(60)


def control_of(run: RunFolder, incarnation: str, leader: subprocess.Popen[bytes]) -> ServerControl:
    def endpoint() -> Any:
        assert leader.poll() is None, run.log_file("server", 1).read_text()[-3000:]
        found = run.endpoint(1)
        return found if found and found["incarnation"] == incarnation else None

    url = wait_for(endpoint, f"the endpoint of {incarnation}", START_S)["url"]
    return ServerControl(url, run.token_file, 30)


def rank_zero(leader: subprocess.Popen[bytes]) -> psutil.Process:
    (rank,) = [p for p in ranks_of(leader) if p.environ()["RANK"] == "0"]
    return rank


def kill_with_requests_in_flight(server: subprocess.Popen[bytes], control: ServerControl) -> None:
    """Kill vLLM, not its leader."""
    vllm = psutil.Process(server.pid).children()[0]
    wait_for(lambda: look_at(control).running > 0, "a request in flight")
    vllm.send_signal(signal.SIGKILL)
    wait_for(lambda: server.poll() is not None, "the end of the server's leader")


def kill_during_a_delivery(server: subprocess.Popen[bytes], control: ServerControl, rank: psutil.Process) -> None:
    """Kill leader and vLLM, as the loss of their node would, while the server is paused for its weights."""

    stop_in_a_delivery(rank, control)
    server.kill()

    def dead() -> bool:
        try:
            control.call("GET", "/health")
        except ServerError:
            return True
        return False

    wait_for(dead, "the end of vLLM")
    rank.resume()


@pytest.mark.timeout(1200)
def test_a_server_that_dies_twice_costs_no_step_and_no_prompt(
    tiny_model_tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, tiny_model_tied)
    monkeypatch.setenv("SLIPSTREAM_INCARNATION", LEARNER)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(assigned_server(run, "first"))
        job = stack.enter_context(learner(run, 1))
        with control_of(run, "first", first) as control:
            wait_for(lambda: step_of(run) >= 3, "the third step")
            rank = rank_zero(job)
            kill_with_requests_in_flight(first, control)
        assert not run.endpoint_file().exists(), "its leader has taken the address back"
        record = read_json(run.exit_file("server-0", "first")) or {}
        assert "by SIGKILL" in record["reason"]

        def waits() -> bool:
            return (read_json(run.heartbeat_file("learner")) or {}).get("phase") == "waiting for the server"

        wait_for(waits, "the learner's wait")
        before = step_of(run)
        second = stack.enter_context(assigned_server(run, "second"))
        with control_of(run, "second", second) as control:
            wait_for(lambda: step_of(run) >= before + 3, "the third step with the second server")
            kill_during_a_delivery(second, control, rank)
        assert (read_json(run.endpoint_file()) or {})["incarnation"] == "second", "nobody took that one back"

        third = stack.enter_context(assigned_server(run, "third"))
        result = finish(run, job, 1)
        assert third.poll() is None
        assert (read_json(run.heartbeat_file("learner")) or {})["pid"] == rank.pid, "the same learner all the time"

    lines = read_jsonl(run.records(1) / "ledger.jsonl")
    assert check_lines(run.merged_records("ledger.jsonl"), PROMPTS, 1) == []
    assert len(lines) == PROMPTS
    steps = [line["step"] for line in read_jsonl(run.records(1) / "metrics.jsonl") if "loss" in line]
    assert steps == list(range(1, result["steps"] + 1))
    events = [e for e in read_jsonl(run.records(1) / "events.jsonl") if e["event"] == "attached to another server"]
    assert [event["incarnation"] for event in events] == ["second", "third"]
    found = latest_complete(run)
    assert found is not None
    state = RolloutState.read(found[0])
    assert state.model_version == state.step == result["steps"], "a delivery made again is no version of its own"
    outcomes = {outcome for line in lines for outcome in line["outcomes"]}
    assert outcomes <= {"trained", "stale", "zero_std"}, "nothing that the servers gave was refused"
    (record,) = [read_json(path) or {} for path in (run.path / "exit").glob("learner-*.json")]
    assert (record["returncode"], run.attempts()) == (0, [1])
