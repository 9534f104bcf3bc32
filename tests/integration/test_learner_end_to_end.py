"""A real learner under torchrun with two ranks, its rollout process, and a real vLLM server."""

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from slipstream.learner.checkpoint import RolloutState
from slipstream.metrics.audit_records import audit_run
from slipstream.run_folder import read_jsonl
from tests.learner_process import begin_attempt, finish, learner, learner_run, ranks_of, step_of, write_prompts
from tests.serving_process import VllmServer, stop_in_a_delivery, wait_for

pytestmark = pytest.mark.integration

PROMPTS = 40
EPOCHS = 2
STEPS = 20


def test_killed_half_way_and_resumed_every_prompt_is_settled_exactly_once_per_epoch(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    data = write_prompts(tmp_path / "train.jsonl", PROMPTS)
    run = learner_run(tmp_path / "runs", "epochs", vllm_server, data, num_train_epochs=EPOCHS)
    with learner(run, 1) as leader:
        wait_for(lambda: step_of(run) >= 4, "the fourth step")
        family = psutil.Process(leader.pid).children(recursive=True)
        ranks_of(leader)[0].send_signal(signal.SIGKILL)
        wait_for(lambda: leader.poll() is not None, "the end of the learner after a rank was killed")
        assert leader.returncode != 0
    wait_for(lambda: not any(p.is_running() for p in family), "the end of every process of the learner")

    attempt = begin_attempt(run, vllm_server)
    assert run.fence(attempt)["checkpoint"], "no complete checkpoint was left"
    with learner(run, attempt) as leader:
        finish(run, leader, attempt)

    lines = list(run.merged_records("ledger.jsonl"))
    assert audit_run(run).findings == ()
    assert len(lines) == PROMPTS * EPOCHS
    steps = [line["step"] for line in run.merged_records("metrics.jsonl") if "loss" in line]
    assert steps == list(range(1, steps[-1] + 1)), "the numbering goes on"
    state = RolloutState.read(run.path / run.fence(attempt)["checkpoint"])
    generated = [line for line in lines if line["step"] > state.step and line["number"] not in state.split]
    oldest = [line["versions"][0] for line in generated if line["versions"]]
    assert min(oldest) >= state.model_version, "what is generated after a resume starts at the resumed version"
    for line in run.merged_records("metrics.jsonl"):
        if "loss" in line:
            assert 0 <= line["sample/staleness_mean"] <= line["sample/staleness_max"] <= 4


def kill_during_a_delivery(leader: subprocess.Popen[bytes], server: VllmServer) -> None:
    """Kill rank 0 while the server is paused for its weights."""
    (rank,) = [p for p in ranks_of(leader) if p.environ()["RANK"] == "0"]
    with server.control() as control:
        stop_in_a_delivery(rank, control)
        rank.kill()


def test_killed_during_a_delivery_and_resumed_ends_at_the_same_last_step(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    data = write_prompts(tmp_path / "train.jsonl", PROMPTS)
    schedule = {"max_steps": STEPS, "lr_scheduler_type": "linear", "gradient_accumulation_steps": 2}
    run = learner_run(tmp_path / "runs", "delivery", vllm_server, data, **schedule)
    with learner(run, 1) as leader:
        wait_for(lambda: step_of(run) >= 2, "the second step")
        family = psutil.Process(leader.pid).children(recursive=True)
        heard = [c.laddr.ip for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert heard
        assert set(heard) <= {"127.0.0.1", "::1"}, "nothing of a learner can be reached from elsewhere"
        kill_during_a_delivery(leader, vllm_server)
        wait_for(lambda: leader.poll() is not None, "the end of the learner after a rank was killed")
    with vllm_server.control() as control:
        assert control.is_paused(), "nobody resumed it"

    attempt = begin_attempt(run, vllm_server)
    assert run.fence(attempt)["step"] >= 2
    with learner(run, attempt) as leader:
        assert finish(run, leader, attempt)["steps"] == STEPS
    logged = {line["step"]: line["learning_rate"] for line in run.merged_records("metrics.jsonl") if "loss" in line}
    assert sorted(logged) == list(range(1, STEPS + 1))
    for step, rate in logged.items():
        assert rate == pytest.approx(1e-3 * (1 - (step - 1) / STEPS)), "the same schedule before and after the resume"
    state = RolloutState.read(run.output(attempt) / f"checkpoint-{STEPS}")
    assert (state.model_version, state.attempt) == (STEPS, attempt)
    assert audit_run(run).findings == ()
    assert read_jsonl(run.records(1) / "metrics.jsonl"), "the first attempt's records stay"
