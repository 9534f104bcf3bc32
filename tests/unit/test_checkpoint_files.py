"""Checkpoints that are complete or do not exist."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from slipstream.learner.checkpoint import (
    MARKER,
    STATE_FILE,
    CheckpointError,
    RolloutState,
    complete_checkpoints,
    latest_complete,
    load_samples,
    resume_point,
    rotate,
    rotate_attempts,
    save_samples,
    seal,
    verify,
)
from slipstream.learner.ledger import History
from slipstream.rollout.setup import Position
from slipstream.run_folder import RunFolder
from tests.samples import make_sample

STATE = RolloutState(
    step=5,
    epoch=1,
    prompt=2,
    settled_beyond=[13, 15],
    model_version=5,
    attempt=1,
    dataset_fingerprint="abc",
    dataset_length=10,
    shuffle=True,
    seed=42,
    rewards=["r"],
    loop="m:C",
    loop_state={"seen": 3},
    settings={"max_steps": 7},
    outcomes={"1": {"trained": 3}},
    split={"12": {"row": 4, "outcomes": {"trained": 1}, "versions": [2]}},
)


def make_checkpoint(output: Path, step: int, *, sealed: bool = True) -> Path:
    path = output / f"checkpoint-{step}"
    (path / "sub").mkdir(parents=True)
    (path / "model.bin").write_bytes(b"weights" * 100)
    (path / "sub" / "more.bin").write_bytes(b"")
    if sealed:
        seal(path)
    return path


def test_a_sealed_checkpoint_verifies(tmp_path):
    path = make_checkpoint(tmp_path, 3)
    verify(path)
    assert complete_checkpoints(tmp_path) == [(3, path)]


def test_without_its_marker_it_does_not_exist(tmp_path):
    path = make_checkpoint(tmp_path, 3, sealed=False)
    with pytest.raises(CheckpointError, match="not complete"):
        verify(path)
    assert complete_checkpoints(tmp_path) == []


@pytest.mark.parametrize("name", ["model.bin", "sub/more.bin"])
def test_a_missing_file_is_named(tmp_path, name):
    path = make_checkpoint(tmp_path, 3)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        verify(path)


def test_a_cut_file_is_found_by_its_size_alone(tmp_path):
    path = make_checkpoint(tmp_path, 3)
    (path / "model.bin").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"model\.bin has 5 bytes of 700"):
        verify(path, checksums=False)
    assert complete_checkpoints(tmp_path) == []


def test_a_changed_byte_is_found_by_its_checksum(tmp_path):
    path = make_checkpoint(tmp_path, 3)
    (path / "model.bin").write_bytes(b"Weights" + b"weights" * 99)
    verify(path, checksums=False)
    with pytest.raises(CheckpointError, match=r"model\.bin has another checksum"):
        verify(path)


def test_a_torn_marker_is_damage(tmp_path):
    path = make_checkpoint(tmp_path, 3)
    (path / MARKER).write_text('{"files": {')
    with pytest.raises(CheckpointError, match="damaged"):
        verify(path)


def test_rotation_keeps_the_newest_and_what_is_being_written(tmp_path):
    for step in (2, 10, 9):
        make_checkpoint(tmp_path, step)
    make_checkpoint(tmp_path, 5, sealed=False)  # left by a killed process
    make_checkpoint(tmp_path, 12, sealed=False)  # being written now
    (tmp_path / "checkpoint-best").mkdir()
    rotate(tmp_path, None)
    assert len(list(tmp_path.iterdir())) == 6
    rotate(tmp_path, 2)
    assert {p.name for p in tmp_path.iterdir()} == {
        "checkpoint-9",
        "checkpoint-10",
        "checkpoint-12",
        "checkpoint-best",
    }
    rotate(tmp_path, 5)
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [9, 10]


def run_with(tmp_path, *attempts: tuple[int, list[int]]) -> RunFolder:
    """A run whose attempts (step of their fence, steps of their checkpoints) were begun in this order."""
    run = RunFolder.create(tmp_path, "run")
    for number, (start, steps) in enumerate(attempts, 1):
        assert run.begin_attempt(f"output/a{number - 1}/checkpoint-{start}" if start else None, start) == number
        for step in steps:
            make_checkpoint(run.output(number), step)
    return run


def test_a_run_without_a_checkpoint_starts_from_the_model(tmp_path):
    assert latest_complete(run_with(tmp_path, (0, []))) is None


def test_the_newest_checkpoint_of_the_only_attempt(tmp_path):
    run = run_with(tmp_path, (0, [5, 10]))
    assert latest_complete(run) == (run.output(1) / "checkpoint-10", 10)


def test_what_a_cut_off_attempt_wrote_beyond_the_fence_does_not_count(tmp_path):
    run = run_with(tmp_path, (0, [5, 10, 15]), (10, []))
    assert latest_complete(run) == (run.output(1) / "checkpoint-10", 10)
    make_checkpoint(run.output(2), 12)
    assert latest_complete(run) == (run.output(2) / "checkpoint-12", 12)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_broken_checkpoints_that_are_newer_are_set_aside_and_named(tmp_path):
    run = run_with(tmp_path, (0, [5, 10, 15, 20]), (10, [14, 16]))
    (run.output(2) / "checkpoint-14" / "model.bin").write_bytes(b"cut")
    (run.output(2) / "checkpoint-16" / MARKER).unlink()
    (run.output(2) / "checkpoint-16.bad").mkdir()
    (run.output(1) / "checkpoint-5" / MARKER).unlink()
    found, notes = resume_point(run)
    assert found == (run.output(1) / "checkpoint-10", 10)
    assert len(notes) == 2
    assert "checkpoint-16 was set aside" in notes[0]
    assert "no COMPLETE.json" in notes[0]
    assert "model.bin has 3 bytes of 700" in notes[1]
    assert names(run.output(2)) == {"checkpoint-16.bad", "checkpoint-16.bad2", "checkpoint-14.bad"}
    assert "checkpoint-5" in names(run.output(1)), "what is older than the one that is used is not looked at"
    assert resume_point(run) == (found, [])


def test_what_cannot_be_renamed_is_named_and_passed_over(tmp_path, monkeypatch):
    run = run_with(tmp_path, (0, [5, 10]))
    (run.output(1) / "checkpoint-10" / "model.bin").unlink()

    def read_only(path, target):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "rename", read_only)
    found, notes = resume_point(run)
    assert found == (run.output(1) / "checkpoint-5", 5)
    assert "passed over (it cannot be renamed: Read-only file system)" in notes[0]
    assert "model.bin is missing" in notes[0]


def test_a_file_that_cannot_be_read_is_damage(tmp_path, monkeypatch):
    path = make_checkpoint(tmp_path, 3)

    def broken(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("slipstream.learner.checkpoint._digest", broken)
    with pytest.raises(CheckpointError, match="Input/output error"):
        verify(path)


@pytest.mark.parametrize("marker", ["[]", '{"files": []}', '{"other": {}}'])
def test_a_marker_that_is_none_is_damage(tmp_path, marker):
    path = make_checkpoint(tmp_path, 3)
    (path / MARKER).write_text(marker)
    with pytest.raises(CheckpointError, match="damaged"):
        verify(path)


def test_rotation_over_attempts(tmp_path):
    run = run_with(tmp_path, (0, [5, 10, 15]), (10, []))
    make_checkpoint(run.output(1), 20, sealed=False)  # of a half that is cut off, perhaps under way
    rotate_attempts(run, 2, 1)
    assert names(run.output(1)) == {"checkpoint-5", "checkpoint-10", "checkpoint-15", "checkpoint-20"}, (
        "nothing newer is sealed yet"
    )
    make_checkpoint(run.output(2), 12)
    make_checkpoint(run.output(2), 14, sealed=False)
    rotate_attempts(run, 2, None)
    rotate_attempts(run, 1, 1)
    assert len(names(run.output(1))) == 4, "an attempt that is not the newest deletes nothing"
    rotate_attempts(run, 2, 2)
    assert names(run.output(1)) == {"checkpoint-10", "checkpoint-20"}
    assert names(run.output(2)) == {"checkpoint-12", "checkpoint-14"}
    rotate_attempts(run, 2, 1)
    assert names(run.output(1)) == {"checkpoint-20"}
    assert latest_complete(run) == (run.output(2) / "checkpoint-12", 12)


def test_a_later_fence_below_an_earlier_one_cuts_both_attempts(tmp_path):
    run = run_with(tmp_path, (0, [5, 10]), (10, [15]), (5, []))
    assert latest_complete(run) == (run.output(1) / "checkpoint-5", 5)


def test_of_one_step_the_later_attempt_counts(tmp_path):
    run = run_with(tmp_path, (0, [5, 10]), (5, [10]))
    assert latest_complete(run) == (run.output(2) / "checkpoint-10", 10)


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    run = run_with(tmp_path, (0, [5, 10]))
    (run.output(1) / "checkpoint-10" / "model.bin").write_bytes(b"Weights" + b"weights" * 99)
    assert latest_complete(run) == (run.output(1) / "checkpoint-5", 5)


def test_the_rollout_state_comes_back(tmp_path):
    STATE.write(tmp_path)
    assert RolloutState.read(tmp_path) == STATE
    assert STATE.position == Position(12, frozenset({13, 15}))
    assert STATE.history == History({1: {"trained": 3}}, {12: STATE.split["12"]})


def test_a_state_of_an_older_version_is_read(tmp_path):
    STATE.write(tmp_path)
    value = json.loads((tmp_path / STATE_FILE).read_text())
    for name in ("settings", "outcomes", "split"):
        del value[name]
    (tmp_path / STATE_FILE).write_text(json.dumps(value))
    state = RolloutState.read(tmp_path)
    assert (state.history, state.settings, state.position) == (None, {}, STATE.position)


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=STATE_FILE):
        RolloutState.read(tmp_path)
    (tmp_path / STATE_FILE).write_text('{"step": 1}')
    with pytest.raises(CheckpointError, match="damaged"):
        RolloutState.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dataset_fingerprint": "other"}, "fingerprint"),
        ({"dataset_length": 11}, "length"),
        ({"shuffle": False}, "shuffle"),
        ({"seed": 1}, "seed"),
    ],
)
def test_other_data_is_refused_by_name(change, named):
    STATE.check_same_data("abc", 10, True, 42)
    other = dataclasses.replace(STATE, **change)
    with pytest.raises(CheckpointError, match=named):
        other.check_same_data("abc", 10, True, 42)


def test_samples_survive_the_file(tmp_path):
    first = make_sample([1, 2], [3, 4, 5], number=7, version=3, advantage=-0.25)
    first.head_ids = np.array([[3, 9], [4, -1], [5, 8]], np.int32)
    first.head_logprobs = np.array([[-0.5, -1.5], [-0.25, 0], [-1, -2]], np.float32)
    first.rollout_id, first.reward, first.group_std, first.cost = "id", 0.5, 0.1, 99
    first.rewards_by_name = {"r": (0.5, 0.1), "unscored": (math.nan, math.nan)}
    second = make_sample([1], [2], number=8)
    second.reward = math.nan
    save_samples(tmp_path / "rest.npz", [first, second])
    loaded = load_samples(tmp_path / "rest.npz")
    assert [s.number for s in loaded] == [7, 8]
    for name in ("input_ids", "trained", "logprobs", "versions", "head_ids", "head_logprobs"):
        for old, new in zip([first, second], loaded, strict=True):
            assert getattr(old, name).dtype == getattr(new, name).dtype
            assert np.array_equal(getattr(old, name), getattr(new, name)), name
    assert (loaded[0].advantage, loaded[0].rollout_id, loaded[0].reward, loaded[0].group_std) == (-0.25, "id", 0.5, 0.1)
    assert loaded[0].rewards_by_name["r"] == (0.5, 0.1)
    assert math.isnan(loaded[0].rewards_by_name["unscored"][0])
    assert math.isnan(loaded[1].reward)
    assert loaded[0].cost == 0, "it holds nothing of the new attempt's allowance"
    for sample in loaded:
        sample.check()


def test_no_file_is_no_samples(tmp_path):
    assert load_samples(tmp_path / "rest.npz") == []
