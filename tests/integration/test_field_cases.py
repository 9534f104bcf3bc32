"""Failures that users of systems like this one report, each with what happens here. Those that need real processes.

`docs/async_grpo.md` has the table of all of them.
"""

import asyncio
import dataclasses
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from aiohttp import web
from peft import PeftModel

from slipstream.learner.ledger import NothingTrained
from slipstream.metrics.audit import check_lines
from slipstream.rollout.types import STALE, TRAINED
from slipstream.run_folder import RunFolder, read_json
from tests.fault_proxy import GENERATION, FaultProxy, prompt_tokens
from tests.learner_process import (
    begin_attempt,
    finish,
    learner,
    learner_run,
    ranks_of,
    reach,
    rollout_process,
    step_of,
    write_prompts,
)
from tests.learner_resume import NUM_PROMPTS, new_trainer
from tests.models import byte_tokenizer
from tests.serving_process import VllmServer, all_gone, load, reference_logprobs, wait_for

pytestmark = pytest.mark.integration

PROMPTS = 40


# ---- one process crashed, the rest held on


def test_a_rollout_process_that_hangs_ends_everything_where_none_may_be_started_again(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    """One that dies is seen at once, and replaced: `test_worker_respawn.py`."""
    data = write_prompts(tmp_path / "train.jsonl", PROMPTS)
    run = learner_run(
        tmp_path / "runs",
        "crash",
        vllm_server,
        data,
        max_steps=100_000,
        learning_rate=1e-5,
        rollout_worker_timeout=40.0,
        rollout_worker_restarts=0,
    )
    with learner(run, 1) as leader:
        wait_for(lambda: step_of(run) >= 2, "the second step", 240)
        family = psutil.Process(leader.pid).children(recursive=True)
        rollout_process(leader).send_signal(signal.SIGSTOP)
        wait_for(lambda: leader.poll() is not None, "the end of the learner")
    assert leader.returncode != 0
    wait_for(lambda: all_gone(family), "the end of every process of the learner")
    (record,) = (run.path / "exit").glob("learner-*.json")
    assert "the rollout process has not beaten for" in (read_json(record) or {})["reason"]


# ---- a straggler blocked its group, and again after every resume; prompts skipped over save and restore, mostly long
# ---- ones; resume with a full buffer


def write_long_second_prompt(path: Path) -> Path:
    rows = [{"prompt": [{"role": "user", "content": f"count {i}"}]} for i in range(PROMPTS)]
    rows[1]["prompt"][0]["content"] = "a long story " * 8
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def holding(vllm_server: VllmServer) -> Iterator[tuple[FaultProxy, threading.Event]]:
    """A proxy that lets requests for the long prompt wait until the event is set."""
    release, tokenizer = threading.Event(), byte_tokenizer()

    async def hold(request: web.Request, body: bytes) -> None:
        if request.path in GENERATION and "token_ids" in json.loads(body):
            while "a long story" in tokenizer.decode(prompt_tokens(body)) and not release.is_set():
                await asyncio.sleep(0.02)

    with FaultProxy(vllm_server.base_url, hold=hold) as proxy:
        yield proxy, release
        release.set()


def settled(run: RunFolder) -> list[int]:
    return [line["prompt"] for line in run.merged_records("ledger.jsonl")]


def test_a_long_prompt_that_hangs_holds_up_nothing_before_and_after_a_resume_and_is_not_skipped(
    vllm_server: VllmServer, holding: tuple[FaultProxy, threading.Event], tmp_path: Path
) -> None:
    proxy, release = holding
    server = dataclasses.replace(vllm_server, base_url=proxy.url)
    data = write_long_second_prompt(tmp_path / "train.jsonl")
    # far ahead of training, so that much is generated and queued when the learner is killed
    settings = {"num_train_epochs": 1, "max_staleness": 100, "learning_rate": 1e-5, "token_budget": 192}
    sections: dict[str, dict[str, object]] = {"data": {"shuffle": False}, "learner": {"processes_per_node": 1}}
    run = learner_run(tmp_path / "runs", "straggler", server, data, sections=sections, **settings)
    with learner(run, 1) as leader:
        wait_for(lambda: 0 in settled(run), "the prompt before the straggler")
        reach(run, leader, max(3, step_of(run) + 2))
        ranks_of(leader)[0].send_signal(signal.SIGKILL)
        wait_for(lambda: leader.poll() is not None, "the end of the learner after a rank was killed")

    attempt = begin_attempt(run, server)
    fence = run.fence(attempt)
    assert fence["checkpoint"], "no complete checkpoint was left"
    state = json.loads((run.path / fence["checkpoint"] / "rollout_state.json").read_text())
    assert state["prompt"] == 1, "the straggler is the first that is not settled"
    assert state["settled_beyond"], "and what came after it is not generated again"
    before = len(settled(run))
    with learner(run, attempt) as leader:
        wait_for(lambda: len(settled(run)) >= PROMPTS - 12, "the others beside the straggler, after the resume", 240)
        assert len(settled(run)) > before
        assert 1 not in settled(run)
        release.set()
        finish(run, leader, attempt)
    lines = list(run.merged_records("ledger.jsonl"))
    assert check_lines(lines, PROMPTS, 1) == []
    (long,) = [line for line in lines if line["prompt"] == 1]
    assert set(long["outcomes"]) == {TRAINED}


# ---- rollouts sampled the base model although adapters were published


def test_rollouts_of_a_run_with_an_adapter_come_from_the_adapted_model(vllm_server: VllmServer, tmp_path: Path) -> None:
    data = write_prompts(tmp_path / "train.jsonl", PROMPTS)
    adapter = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8, "processes_per_node": 1}
    run = learner_run(
        tmp_path / "runs",
        "adapter",
        vllm_server,
        data,
        sections={"learner": adapter},
        max_steps=6,
        max_staleness=0,
        learning_rate=0.02,
    )
    with learner(run, 1) as leader:
        result = finish(run, leader, 1)
    steps = [line for line in run.merged_records("metrics.jsonl") if "loss" in line]
    assert len(steps) == 6
    assert max(line["sampling/sampling_logp_difference/max"] for line in steps) < 1e-3

    base = load(vllm_server.model)
    prompt, completion = list(range(10, 60)), list(range(60, 80))
    plain = reference_logprobs(base, prompt, completion)
    adapted = PeftModel.from_pretrained(base, result["model"]).eval()
    difference = (reference_logprobs(adapted, prompt, completion) - plain).abs().max()
    assert difference > 0.1, "the base model would have been seen in the log-probabilities"


# ---- token budget too small: samples dropped, the loader blocked silently


def test_a_token_budget_below_every_sample_ends_the_run_with_the_key(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, 6, budget=2)
    with pytest.raises(NothingTrained, match="oversize: raise token_budget"):
        trainer.train()
    assert len(trainer.reports.lines) == NUM_PROMPTS, "each was counted and settled"
    assert trainer.state.global_step == 0


# ---- after a resume, staleness capacity counted from version 0


def test_staleness_of_a_resumed_training_counts_from_the_checkpoint_s_version(tmp_path: Path) -> None:
    """Everything was sampled at version 0, so after four steps all is too old; counted anew, it would be trained."""
    first = new_trainer(tmp_path / "a1", 6, max_staleness=3)
    first.train()
    assert first.state.global_step == 4
    assert any(STALE in line["outcomes"] for line in first.reports.lines)
    second = new_trainer(tmp_path / "a2", 6, seed=1, max_staleness=3)
    second.train(resume_from_checkpoint=str(tmp_path / "a1" / "checkpoint-4"))
    assert second.state.global_step == 4
    assert second.reports.lines
    assert {name for line in second.reports.lines for name in line["outcomes"]} <= {STALE, TRAINED}
    assert all(line["outcomes"].get(STALE) for line in second.reports.lines)
    assert torch.isfinite(next(second.model.parameters())).all()
