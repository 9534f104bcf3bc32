"""Leaving for real: all ranks save at the same step and end, and a resumed attempt loses nothing; stopping at once."""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from aiohttp import web
from transformers import TrainerCallback

from slipstream.learner.checkpoint import RolloutState, complete_checkpoints
from slipstream.metrics.audit import check_lines
from slipstream.process import INCARNATION_ENV
from slipstream.run_folder import RunFolder, read_json, write_json
from tests.fault_proxy import GENERATION, FaultProxy
from tests.learner_process import begin_attempt, finish, learner, learner_run, ranks_of, reach, write_prompts
from tests.learner_replay import ReplayTrainer, snapshot
from tests.learner_resume import new_trainer
from tests.serving_process import VllmServer, all_gone, end_delivery, wait_for

pytestmark = pytest.mark.integration

PROMPTS = 40
STEPS = 6


# ---- the trainer alone


class TellAt(TrainerCallback):
    """The leader writes the leave file while a step is trained."""

    def __init__(self, run: RunFolder, step: int) -> None:
        self._run, self._step = run, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self._step:
            write_json(self._run.leave_file("abcd"), {"signal": "SIGUSR2"})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv(INCARNATION_ENV, "abcd")
    monkeypatch.setattr("slipstream.learner.leave.LOOK_S", 0.0)
    folder = RunFolder.create(tmp_path / "runs", "run")
    folder.begin_attempt(None, 0)
    return folder


def trainer_of(run: RunFolder, attempt: int, seed: int = 0, **changes: Any) -> ReplayTrainer:
    return new_trainer(run.output(attempt), STEPS, seed, run_dir=str(run.path), attempt=attempt, **changes)


@pytest.mark.parametrize("step", [2, 3])
def test_what_left_and_was_resumed_is_the_same_training(step: int, run: RunFolder, tmp_path: Path) -> None:
    """On a step that the schedule saves, and on one that it does not."""
    whole = new_trainer(tmp_path / "whole", STEPS)
    whole.train()
    first = trainer_of(run, 1)
    first.add_callback(TellAt(run, step))
    first.train()
    assert (first.left, first.state.global_step) == ("SIGUSR2", step)
    assert [saved for saved, _ in complete_checkpoints(run.output(1))] == sorted({2, step})
    run.leave_file("abcd").unlink()
    second = trainer_of(run, 2, seed=1)
    second.train(resume_from_checkpoint=str(run.output(1) / f"checkpoint-{step}"))
    assert (second.left, second.state.global_step) == (None, STEPS)
    found = snapshot(second.model)
    for name, value in snapshot(whole.model).items():
        assert torch.equal(found[name], value), name
    lines = [line for line in first.reports.lines if line["step"] <= step] + second.reports.lines
    assert lines == whole.reports.lines


def test_before_the_first_step_nothing_is_saved(run: RunFolder) -> None:
    write_json(run.leave_file("abcd"), {"signal": "SIGTERM"})
    trainer = trainer_of(run, 1)
    trainer.train()
    assert (trainer.left, trainer.state.global_step) == ("SIGTERM", 0)
    assert list(run.output(1).glob("checkpoint-*")) == []


def test_a_saved_step_is_not_saved_again(run: RunFolder) -> None:
    first = trainer_of(run, 1, save_steps=1)
    first.add_callback(TellAt(run, 2))
    first.train()
    checkpoint = run.output(1) / "checkpoint-2"
    before = {path: path.stat().st_ino for path in checkpoint.rglob("*")}
    second = trainer_of(run, 2)
    second.train(resume_from_checkpoint=str(checkpoint))  # told to leave from the first moment
    assert (second.left, second.state.global_step) == ("SIGUSR2", 2)
    assert {path: path.stat().st_ino for path in checkpoint.rglob("*")} == before
    assert list(run.output(2).glob("checkpoint-*")) == []


# ---- a whole learner


def exit_record(run: RunFolder) -> dict[str, Any]:
    records = [read_json(path) or {} for path in (run.path / "exit").glob("learner-*.json")]
    return dict(max(records, key=lambda record: record["time"]))


def leave(run: RunFolder, leader: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Send USR2, wait for the end; the exit record."""
    family = psutil.Process(leader.pid).children(recursive=True)
    leader.send_signal(signal.SIGUSR2)
    wait_for(lambda: leader.poll() is not None, "the learner's leaving")
    log = run.log_file("learner", run.attempts()[-1])
    assert leader.returncode == 0, log.read_text()[-4000:]
    wait_for(lambda: all_gone(family), "the end of every process of the learner")
    assert read_json(run.path / "result.json") is None
    return exit_record(run)


def test_it_leaves_though_no_server_has_ever_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor writes nothing but the file, and the ranks wait for an address."""
    (tmp_path / "token").write_text("none")
    nowhere = SimpleNamespace(base_url="http://127.0.0.1:1", token_file=tmp_path / "token", model="no-model")
    data = write_prompts(tmp_path / "train.jsonl", 8)
    run = learner_run(tmp_path / "runs", "alone", nowhere, data)  # type: ignore[arg-type]
    run.endpoint_file().unlink()
    write_json(run.assignment_file, {"attempt": 1, "server": "queued", "learner": "abcd"})
    monkeypatch.setenv(INCARNATION_ENV, "abcd")

    def waits() -> bool:
        assert leader.poll() is None, run.log_file("learner", 1).read_text()[-4000:]
        return (read_json(run.heartbeat_file("learner")) or {}).get("phase") == "waiting for the server"

    with learner(run, 1) as leader:
        wait_for(waits, "that it waits for a server")
        family = psutil.Process(leader.pid).children(recursive=True)
        write_json(run.leave_file("abcd"), {"signal": "supervisor", "why": "the server is queued"})
        wait_for(lambda: leader.poll() is not None, "the learner's leaving")
        wait_for(lambda: all_gone(family), "the end of every process of the learner")
    record = exit_record(run)
    assert (leader.returncode, record["returncode"], record["left"], record["final"]) == (0, 0, 0, False)
    assert record["reason"] == "left before the first step: supervisor"
    assert read_json(run.path / "result.json") is None


class Gate:
    """How many requests for generation may pass. A run whose data is longer cannot end before it is told to leave."""

    def __init__(self) -> None:
        self.allowed = PROMPTS // 2
        self.asked = 0
        self.over = False

    async def __call__(self, request: web.Request, body: bytes) -> None:
        if request.path in GENERATION:
            self.asked += 1
            mine = self.asked
            while mine > self.allowed and not self.over:
                await asyncio.sleep(0.02)


@pytest.fixture
def held(vllm_server: VllmServer) -> Iterator[tuple[VllmServer, Gate]]:
    """The server behind a proxy that lets half of a run's prompts pass."""
    gate = Gate()
    with FaultProxy(vllm_server.base_url, hold=gate) as proxy:
        yield dataclasses.replace(vllm_server, base_url=proxy.url), gate
        gate.over = True


def test_both_ranks_leave_at_the_same_step_and_a_resumed_attempt_reaches_the_end(
    held: tuple[VllmServer, Gate], tmp_path: Path
) -> None:
    server, gate = held
    data = write_prompts(tmp_path / "train.jsonl", PROMPTS)
    run = learner_run(tmp_path / "runs", "leaving", server, data, num_train_epochs=1, save_steps=100)
    with learner(run, 1) as leader:
        reach(run, leader, 2)
        record = leave(run, leader)
    step = record["left"]
    assert step >= 2
    assert (record["returncode"], record["final"]) == (0, False)
    assert record["reason"] == f"saved at step {step} and left: SIGUSR2"
    beats = {who: read_json(run.heartbeat_file(who)) or {} for who in ("learner", "learner-1")}
    assert {(beat["phase"], beat["step"]) for beat in beats.values()} == {("left", step)}
    assert {beat["incarnation"] for beat in beats.values()} == {record["incarnation"]}
    assert [saved for saved, _ in complete_checkpoints(run.output(1))] == [step]
    assert not (run.output(1) / "final").exists()
    gate.over = True
    attempt = begin_attempt(run, server)
    assert run.fence(attempt)["step"] == step
    with learner(run, attempt) as leader:
        finish(run, leader, attempt)
    assert check_lines(run.merged_records("ledger.jsonl"), PROMPTS, 1) == []
    steps = [line["step"] for line in run.merged_records("metrics.jsonl") if "loss" in line]
    assert steps == list(range(1, steps[-1] + 1)), "no step is missing, and none is redone"


def test_it_leaves_while_it_waits_for_rollouts_that_do_not_come(held: tuple[VllmServer, Gate], tmp_path: Path) -> None:
    server, gate = held
    data = write_prompts(tmp_path / "train.jsonl", PROMPTS)
    one = {"learner": {"processes_per_node": 1}}
    run = learner_run(tmp_path / "runs", "waiting", server, data, sections=one, num_train_epochs=1, save_steps=100)
    with learner(run, 1) as leader:
        reach(run, leader, 1)
        seen: list[dict[str, Any]] = []

        def stands_still() -> bool:
            """The same progress in beats of three seconds."""
            beat = read_json(run.heartbeat_file("learner")) or {}
            if not seen or seen[0]["progress"] != beat["progress"]:
                seen[:] = [beat]
            return beat["phase"] == "waiting for rollouts" and beat["time"] - seen[0]["time"] >= 3

        wait_for(stands_still, "that training waits")
        record = leave(run, leader)
    step = record["left"]
    assert record["reason"] == f"saved at step {step} and left: SIGUSR2"
    assert [saved for saved, _ in complete_checkpoints(run.output(1))] == [step]
    state = RolloutState.read(run.output(1) / f"checkpoint-{step}")
    assert state.ledger_step in (step, step + 1)
    gate.over = True
    attempt = begin_attempt(run, server)
    with learner(run, attempt) as leader:
        finish(run, leader, attempt)
    assert check_lines(run.merged_records("ledger.jsonl"), PROMPTS, 1) == []


def test_a_cancelled_learner_stops_at_once_though_a_rank_does_not_listen(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    data = write_prompts(tmp_path / "train.jsonl", PROMPTS)
    run = learner_run(tmp_path / "runs", "cancelled", vllm_server, data, max_steps=100_000, learning_rate=1e-5)
    with learner(run, 1) as leader:
        reach(run, leader, 1)
        family = psutil.Process(leader.pid).children(recursive=True)
        for process in ranks_of(leader):  # one that is stopped hears no TERM
            os.kill(process.pid, signal.SIGSTOP)
        write_json(run.cancel_file, {"who": "a test", "why": "enough"})
        leader.send_signal(signal.SIGTERM)
        wait_for(lambda: leader.poll() is not None, "the leader's end", 60)
        wait_for(lambda: all_gone(family), "the end of every process of the learner")
    end_delivery(vllm_server)
    record = exit_record(run)
    assert (record["returncode"], record["reason"], record["left"]) == (0, "stopped by SIGTERM", None)
    assert json.loads((run.path / "cancel.json").read_text())["who"] == "a test"
