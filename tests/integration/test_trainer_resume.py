"""Checkpoints of the real trainer: stopped and resumed is the same training; a broken checkpoint is none."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from slipstream.learner import checkpoint as ckpt
from slipstream.learner.checkpoint import CheckpointError, RolloutState, complete_checkpoints, latest_complete
from slipstream.learner.room import check_room, room_for, written_bytes
from slipstream.metrics.audit import check_lines
from slipstream.run_folder import RunFolder
from tests.learner_replay import ReplayTrainer, snapshot
from tests.learner_resume import NUM_PROMPTS, new_trainer
from tests.standins.learner_killed import KILLED, LIMITS

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
STEPS = 6


class Stop(RuntimeError):
    """The process dies, as far as the training can tell."""


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            raise Stop


def stopped_at(output_dir: Path, step: int, **changes: Any) -> ReplayTrainer:
    """A training that got so far and died in the next step."""
    trainer = new_trainer(output_dir, STEPS, **changes)
    trainer.add_callback(StopAt(step))
    with pytest.raises(Stop):
        trainer.train()
    return trainer


def resumed_from(checkpoint: Path, output_dir: Path, **changes: Any) -> ReplayTrainer:
    """A new process's training: other first weights, so that what is right comes from the checkpoint."""
    trainer = new_trainer(output_dir, STEPS, seed=1, **changes)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer


def schedule(trainer: ReplayTrainer) -> list[tuple[int, float, float]]:
    """Step, learning rate and loss of each log."""
    return [(log["step"], log["learning_rate"], log["loss"]) for log in trainer.state.log_history if "loss" in log]


def assert_same_end(trainer: ReplayTrainer, whole: ReplayTrainer) -> None:
    expected = snapshot(whole.model)
    found = snapshot(trainer.model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{name} differs by {(found[name] - value).abs().max().item():.1e}"
    assert trainer.state.global_step == whole.state.global_step == STEPS
    assert schedule(trainer) == schedule(whole)


def states(output_dir: Path) -> dict[int, dict[str, Any]]:
    return {step: json.loads((path / ckpt.STATE_FILE).read_text()) for step, path in complete_checkpoints(output_dir)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ReplayTrainer:
    """The training without an interruption."""
    trainer = new_trainer(tmp_path_factory.mktemp("whole"), STEPS)
    trainer.train()
    return trainer


@pytest.mark.parametrize("checkpoint", [2, 4])
def test_stopped_and_resumed_is_the_same_training(whole: ReplayTrainer, checkpoint: int, tmp_path: Path) -> None:
    stopped_at(tmp_path / "a1", checkpoint + 1)
    trainer = resumed_from(tmp_path / "a1" / f"checkpoint-{checkpoint}", tmp_path / "a2")
    assert_same_end(trainer, whole)
    expected = states(Path(str(whole.args.output_dir)))
    assert expected.keys() == {2, 4, 6}
    for step, state in (states(tmp_path / "a1") | states(tmp_path / "a2")).items():
        assert state == expected[step]


def test_a_group_that_a_checkpoint_splits_is_trained_once(whole: ReplayTrainer, tmp_path: Path) -> None:
    first = stopped_at(tmp_path / "a1", 3)
    checkpoint = tmp_path / "a1" / "checkpoint-2"
    remainder = ckpt.load_samples(checkpoint / ckpt.REMAINDER_FILE)
    before = [i for step in first.steps[:2] for i in step.samples]
    split = {sample.number for sample in remainder}
    assert len(split) == 1
    assert any(i.startswith(f"{split.copy().pop()}-") for i in before), "the group was not split"

    second = resumed_from(checkpoint, tmp_path / "a2")
    after = [i for step in second.steps for i in step.samples]
    assert {sample.rollout_id for sample in remainder} <= set(after)
    assert len(before + after) == len(set(before + after))
    assert sorted(before + after) == sorted(i for step in whole.steps for i in step.samples)

    lines = [line for line in first.reports.lines if line["step"] <= 2] + second.reports.lines
    assert check_lines(lines, NUM_PROMPTS) == []
    assert {line["number"] for line in lines} == {line["number"] for line in whole.reports.lines}
    state = RolloutState.read(checkpoint)
    assert not split & {line["number"] for line in lines if line["step"] <= 2}
    assert state.position.first_unsettled == min(split)
    assert state.model_version == 2


def test_a_checkpoint_between_groups_has_no_remainder(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, 2, budget=1_000)
    trainer.train()
    path = tmp_path / "checkpoint-1"
    assert not (path / ckpt.REMAINDER_FILE).exists()
    state = RolloutState.read(path)
    assert (state.epoch, state.prompt, state.settled_beyond) == (1, 0, [])


def test_a_different_dataset_is_refused(whole: ReplayTrainer, tmp_path: Path) -> None:
    checkpoint = Path(str(whole.args.output_dir)) / "checkpoint-2"
    prompts = [str(i) for i in range(NUM_PROMPTS)]
    for word, changes in {
        "fingerprint": {"prompts": [*prompts[:-1], "another"]},
        "length": {"prompts": prompts[:-1]},
        "seed of the order": {"data_seed": 7},
        "shuffle": {"train_sampling_strategy": "sequential"},
    }.items():
        trainer = new_trainer(tmp_path, STEPS, **changes)
        before = snapshot(trainer.model)
        with pytest.raises(CheckpointError, match=word):
            trainer.train(resume_from_checkpoint=str(checkpoint))
        assert all(torch.equal(before[name], value) for name, value in snapshot(trainer.model).items())


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    new_trainer(tmp_path, 2).train()
    weights = tmp_path / "checkpoint-2" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has another checksum"):
        resumed_from(weights.parent, tmp_path / "a2")


def test_resuming_a_finished_training_leaves_its_checkpoint_alone(whole: ReplayTrainer) -> None:
    output_dir = Path(str(whole.args.output_dir))
    files = {p: p.stat().st_ino for p in (output_dir / f"checkpoint-{STEPS}").rglob("*")}
    trainer = new_trainer(output_dir, STEPS, seed=1)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == STEPS
    assert {p: p.stat().st_ino for p in (output_dir / f"checkpoint-{STEPS}").rglob("*")} == files


@pytest.mark.parametrize("limit", [1, 2])
def test_no_complete_checkpoint_goes_before_the_next_is_sealed(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal, seen = ckpt.seal, []

    def watched(path: Path) -> None:
        before = [step for step, _ in complete_checkpoints(tmp_path)]
        seal(path)
        seen.append((before, [step for step, _ in complete_checkpoints(tmp_path)]))

    monkeypatch.setattr(ckpt, "seal", watched)
    new_trainer(tmp_path, STEPS, save_total_limit=limit).train()
    kept = [2, 4][-limit:]
    assert seen == [([], [2]), ([2], [2, 4]), (kept, [*kept, 6])]
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [2, 4, 6][-limit:]
    assert len(list(tmp_path.glob("checkpoint-*"))) == limit


def test_a_write_that_fails_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = ckpt.RolloutState.write

    def full(state: RolloutState, path: Path) -> None:
        if state.step == 4:
            raise OSError(28, "No space left on device")
        save(state, path)

    monkeypatch.setattr(ckpt.RolloutState, "write", full)
    trainer = new_trainer(tmp_path, STEPS, save_total_limit=1)
    with pytest.raises(CheckpointError, match="No space left"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    ckpt.verify(tmp_path / "checkpoint-2")
    assert trainer.args.save_total_limit == 1


@pytest.mark.parametrize(("first_refused", "left"), [(2, []), (4, ["checkpoint-2"])])
def test_a_checkpoint_that_has_no_room_is_not_begun(
    first_refused: int, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first by an estimate, the next by the size of the one before."""
    asked: list[int] = []

    def check(folder: Path, needed: int, step: int) -> None:
        monkeypatch.setattr("slipstream.learner.room.free_bytes", lambda _: needed if step == first_refused else None)
        asked.append(needed)
        check_room(folder, needed, step)

    monkeypatch.setattr("slipstream.learner.saving.check_room", check)
    trainer = new_trainer(tmp_path, STEPS, save_total_limit=1)
    with pytest.raises(ckpt.NotWritten, match=f"step {first_refused} was not begun: it takes about .* make room"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == left
    parameters = sum(p.numel() for p in trainer.model.parameters())
    assert asked[0] == pytest.approx(3 * 8 * parameters, rel=0.01), "float64: the weights and AdamW's two moments"
    for path in tmp_path.glob("checkpoint-*"):
        ckpt.verify(path)
        assert asked[-1] == written_bytes(path) > asked[0]


def test_the_trained_model_is_written_where_there_is_room_or_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = new_trainer(tmp_path, 2, save_total_limit=1)
    trainer.train()
    size = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    monkeypatch.setattr("slipstream.learner.room.free_bytes", lambda _: int(room_for(size)) - 1)
    with pytest.raises(ckpt.NotWritten, match=r"the trained model was not begun: it takes about .* make room"):
        trainer.save_final(tmp_path / "final")
    assert not (tmp_path / "final").exists()
    ckpt.verify(tmp_path / "checkpoint-2")
    monkeypatch.setattr("slipstream.learner.room.free_bytes", lambda _: int(room_for(size)) + 1)
    trainer.save_final(tmp_path / "final")
    written = sum(path.stat().st_size for path in (tmp_path / "final").glob("*.safetensors"))
    assert written == pytest.approx(size, rel=0.05), "what was expected"


def test_a_trained_model_that_is_cut_short_by_the_quota_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = new_trainer(tmp_path, 2, save_total_limit=1)
    trainer.train()

    def full(folder: str) -> None:
        Path(folder).mkdir()
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(trainer, "save_model", full)
    with pytest.raises(ckpt.NotWritten, match=r"the trained model could not be written.*quota exceeded"):
        trainer.save_final(tmp_path / "final")
    assert not (tmp_path / "final").exists()
    ckpt.verify(tmp_path / "checkpoint-2")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run folder whose `output` has one training for each way to end in the middle of a checkpoint."""
    run = RunFolder.create(tmp_path_factory.mktemp("runs"), "broken")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.standins.learner_killed", str(run.path / "output")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == [*(f"{p}: 0" for p in LIMITS), *(f"{p}: killed" for p in KILLED)], done.stderr
    return run


@pytest.mark.parametrize("point", KILLED)
def test_killed_in_a_checkpoint_then_resumed(
    broken: RunFolder, point: str, whole: ReplayTrainer, tmp_path: Path
) -> None:
    output_dir = broken.path / "output" / point
    assert (output_dir / "checkpoint-4").is_dir(), "it died before the checkpoint"
    last = 4 if "rotation" in point else 2
    assert [step for step, _ in complete_checkpoints(output_dir)] == [last]
    run = RunFolder.create(tmp_path, "run")
    run.begin_attempt(None, 0)
    run.output(1).symlink_to(output_dir)
    assert latest_complete(run) == (run.output(1) / f"checkpoint-{last}", last)
    with pytest.raises(CheckpointError):
        resumed_from(output_dir / f"checkpoint-{6 - last}", tmp_path / "refused")
    trainer = new_trainer(output_dir, STEPS, seed=1)
    trainer.train(resume_from_checkpoint=True)
    assert_same_end(trainer, whole)
    assert [step for step, _ in complete_checkpoints(output_dir)][-1] == STEPS


@pytest.mark.parametrize("point", LIMITS)
def test_no_room_for_a_checkpoint(broken: RunFolder, point: str) -> None:
    output_dir = broken.path / "output" / point
    outcome = json.loads((broken.path / "output" / f"{point}.json").read_text())
    assert outcome["raised"] == "NotWritten", outcome
    assert "make room" in outcome["message"]
    assert [path.name for path in output_dir.glob("checkpoint-*")] == ["checkpoint-2"]
    ckpt.verify(output_dir / "checkpoint-2")
