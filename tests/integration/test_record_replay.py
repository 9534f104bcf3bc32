"""A live run is recorded; replayed, it takes the same steps without a server."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config import AsyncGRPOConfig
from slipstream.data import training_data
from slipstream.learner.leader import read_config
from slipstream.learner.main import trainer_arguments
from slipstream.learner.replay import RECORDING, NotARecording, recorded
from slipstream.learner.replayed import ReplayedTrainer
from slipstream.run_folder import RunFolder, read_json, read_jsonl
from tests.learner_process import finish, learner, learner_run, write_prompts
from tests.sample_rewards import low_bytes
from tests.serving_process import VllmServer

pytestmark = pytest.mark.integration

PROMPTS, STEPS = 24, 5


def replay(run: RunFolder, output_dir: Path, checkpoint: Path | None = None) -> ReplayedTrainer:
    """Train on the recording of the run's first attempt with its own settings, in this process."""
    config = read_config(run)
    arguments = trainer_arguments(config, run, 1, read_json(run.endpoint_file()) or {}, has_gpu=False)
    args = AsyncGRPOConfig(**{**arguments, "output_dir": str(output_dir), "run_dir": None, "ddp_backend": None})
    recording = run.records(1) / RECORDING
    trainer = ReplayedTrainer(config.model.name, [low_bytes], args, training_data(config.data), recording=recording)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return trainer


def losses(logs: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in logs if "loss" in line}


def test_a_recorded_run_replayed_takes_the_same_steps(vllm_server: VllmServer, tmp_path: Path) -> None:
    data = write_prompts(tmp_path / "train.jsonl", PROMPTS)
    settings = {
        "sections": {"learner": {"processes_per_node": 1}},
        "max_steps": STEPS,
        "record_samples": True,
        "token_budget": 128,
    }
    run = learner_run(tmp_path / "runs", "recorded", vllm_server, data, **settings)
    with learner(run, 1) as leader:
        finish(run, leader, 1)
    live = losses(read_jsonl(run.records(1) / "metrics.jsonl"))
    assert sorted(live) == list(range(1, STEPS + 1))
    versions = {int(v) for g in recorded(run.records(1) / RECORDING) for s in g.samples for v in s.versions}
    assert versions - {-1, 0}, "with the versions of the policies that made them"

    torch.set_num_threads(1)
    whole = replay(run, tmp_path / "whole")
    assert losses(whole.state.log_history) == live
    ledger = read_jsonl(run.records(1) / "ledger.jsonl")
    assert {line["number"] for line in ledger if line["outcomes"].get("trained")}

    rest = replay(run, tmp_path / "rest", run.output(1) / "checkpoint-2")
    found = losses([log for log in rest.state.log_history if log["step"] > 2])
    assert found == {step: values for step, values in live.items() if step > 2}


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / RECORDING).write_bytes(b"")
    with pytest.raises(NotARecording, match="record_samples = true"):
        ReplayedTrainer("model", recording=tmp_path / RECORDING)
