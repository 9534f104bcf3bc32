"""Duration and resume of the real trainer with its rollout process and a real vLLM server."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.learner.checkpoint import RolloutState, complete_checkpoints, latest_complete
from slipstream.learner.reporter import Reporter
from slipstream.metrics.audit import check_lines
from slipstream.rollout.types import FILTERED
from slipstream.rollout.worker import RolloutWorkerError
from slipstream.run_folder import RunFolder
from tests.live_trainer import KEPT, NUM_ROWS, Stream, live_trainer
from tests.serving_process import VllmServer

pytestmark = pytest.mark.integration


class Lines(Reporter):
    """Keeps the ledger's lines and the events."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []

    def ledger(self, line: dict[str, Any]) -> None:
        self.lines.append(line)

    def event(self, kind: str, step: int, **values: Any) -> None:
        self.events.append({"event": kind, "step": step, **values})


def train(
    server: VllmServer, output_dir: Path, dataset: Any, resume: Path | None = None, **changes: Any
) -> tuple[Any, Lines]:
    """A finished training, and what it reported."""
    reports = Lines()
    place = (server.base_url, server.model, server.token_file, output_dir)
    trainer = live_trainer(*place, dataset, reporter=reports, **changes)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return trainer, reports


def test_an_iterable_dataset_is_passed_over_once_per_epoch_and_starts_its_epoch_again_on_resume(
    vllm_server: VllmServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, reports = train(vllm_server, tmp_path / "a1", Stream(7), num_train_epochs=2)
    assert check_lines(reports.lines, 7, 2) == []
    assert len(reports.lines) == 14
    assert trainer.args.max_steps == -1

    second = [
        (step, path)
        for step, path in complete_checkpoints(tmp_path / "a1")
        if RolloutState.read(path).epoch == 1 and step < trainer.state.global_step
    ]
    assert second, "no checkpoint within the second epoch"
    step, path = second[-1]
    with caplog.at_level(logging.WARNING, "slipstream"):
        _, after = train(vllm_server, tmp_path / "a2", Stream(7), path, num_train_epochs=2)
    assert f"resumed from step {step}: an iterable dataset cannot be repositioned: epoch 1 starts again" in caplog.text
    assert sorted((line["epoch"], line["prompt"]) for line in after.lines) == [(1, prompt) for prompt in range(7)]
    assert all(line["step"] > step for line in after.lines)
    assert after.events[0]["event"] == "resumed"


def test_more_steps_than_an_iterable_dataset_has_repeat_it(vllm_server: VllmServer, tmp_path: Path) -> None:
    trainer, reports = train(vllm_server, tmp_path, Stream(2), max_steps=4)
    assert trainer.state.global_step == 4
    assert {line["epoch"] for line in reports.lines} > {0, 1}
    assert check_lines(reports.lines, 2, 1) == []


def test_a_dataset_that_raises_ends_the_run_with_its_place_and_traceback(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    with pytest.raises(RolloutWorkerError) as caught:
        train(vllm_server, tmp_path, Stream(7, fails_at=4), num_train_epochs=1)
    message = str(caught.value)
    assert "train_dataset (Stream) raised at prompt 4 of epoch 0: OSError: the disk is gone" in message
    assert "in __iter__" in message, "the dataset's own line"


def test_an_empty_iterable_dataset_is_refused_before_anything_starts(vllm_server: VllmServer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train_dataset is empty: it is iterable, and gave no row"):
        train(vllm_server, tmp_path, Stream(0), num_train_epochs=1)


def test_a_fraction_of_an_iterable_dataset_is_refused_before_anything_starts(
    vllm_server: VllmServer, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"num_train_epochs=1\.5"):
        train(vllm_server, tmp_path, Stream(3), num_train_epochs=1.5)


def attempt(run: RunFolder, server: VllmServer, dies_at: int) -> tuple[int, subprocess.CompletedProcess[str]]:
    """One attempt of the run as a process of its own."""
    found = latest_complete(run)
    number = run.begin_attempt(str(found[0].relative_to(run.path)) if found else None, found[1] if found else 0)
    arguments = [run.path, server.base_url, server.model, server.token_file, number, dies_at]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "tests.live_trainer", *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    return number, done


def test_a_loop_s_own_state_survives_a_kill(vllm_server: VllmServer, tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "stateful")
    _, first = attempt(run, vllm_server, dies_at=4)
    assert first.returncode == -signal.SIGKILL, first.stderr[-4000:]
    number, second = attempt(run, vllm_server, dies_at=0)
    assert second.returncode == 0, second.stderr[-4000:]
    assert run.fence(number)["step"] == 3

    lines = list(run.merged_records("ledger.jsonl"))
    assert check_lines(lines, NUM_ROWS, 2) == []
    before = {line["row"] for line in lines if line["step"] <= 3}
    assert any(row % KEPT for row in before), "nothing that only the first process saw"
    again = {line["row"] for line in lines if line["epoch"] == 1 and FILTERED not in line["outcomes"]}
    assert again == {row for row in range(NUM_ROWS) if row % KEPT == 0}, "the second process knows what the first saw"
    state = RolloutState.read(complete_checkpoints(run.output(number))[-1][1])
    assert state.loop_state["lives"] == 2
