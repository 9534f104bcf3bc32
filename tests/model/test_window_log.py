"""No step and no group is missing from the windows that a run logs, and none is in two."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm
from transformers import TrainerCallback

from slipstream.learner.reporter import Reporter
from slipstream.learner.window_log import known_without_a_step
from slipstream.rollout.types import ZERO_STD, EndOfData, GroupResult
from slipstream.run_folder import read_jsonl
from tests.learner_replay import ReplayTrainer, made_up_group, replay_config, tiny_model

GROUPS = 9
SUMMED = ("batch/samples_per_step", "batch/forwarded_tokens_per_step")


class Recorded(Reporter):
    def __init__(self) -> None:
        super().__init__()
        self.windows: list[tuple[int, dict[str, float], dict[str, str]]] = []

    def metrics(self, step: int, values: dict[str, float], texts: dict[str, str] | None = None) -> None:
        self.windows.append((step, values, texts or {}))


class Stop(RuntimeError):
    pass


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            raise Stop


def same_rewards(number: int) -> GroupResult:
    observations = [("frac_reward_zero_std", 1.0, 1.0), ("reward", 0.0, 3.0), ("reward_dropped", 0.0, 1.0)]
    return GroupResult(number, 0, number, number, [], {ZERO_STD: 3}, observations=observations)


def trainer_of(folder: Path, groups: list[GroupResult] | None = None, **changes: Any) -> ReplayTrainer:
    groups = groups or [made_up_group(number, 3, 5, GROUPS) for number in range(GROUPS)]
    trainer = ReplayTrainer(tiny_model(), replay_config(folder, **changes), groups, 40)
    trainer.reporter = Recorded()
    return trainer


def windows(trainer: ReplayTrainer) -> list[tuple[int, dict[str, float], dict[str, str]]]:
    return [entry for entry in trainer.reporter.windows if "loss" in entry[1]]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def each(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The windows of a run that logs each step."""
    trainer = trainer_of(tmp_path_factory.mktemp("each"))
    trainer.train()
    return [values for _, values, _ in windows(trainer)]


@pytest.mark.parametrize("changes", [{}, {"max_steps": 5}], ids=["the data ends unannounced", "a last step"])
@pytest.mark.parametrize(("every", "logged"), [(2, [2, 4, 5]), (5, [5]), (7, [5]), (1, [1, 2, 3, 4, 5])])
def test_the_last_steps_are_logged_too_and_once(
    tmp_path: Path, each: list[dict[str, float]], every: int, logged: list[int], changes: dict[str, int]
) -> None:
    trainer = trainer_of(tmp_path, logging_steps=every, **changes)
    trainer.train()
    found = windows(trainer)
    assert len(each) == 5
    assert [step for step, _, _ in found] == logged
    assert len(trainer.reporter.windows) == len(found)
    begins = [0, *logged[:-1]]
    for (end, values, _), begin in zip(found, begins, strict=True):
        steps = each[begin:end]
        for name in (*SUMMED, "loss"):
            mean = sum(step[name] for step in steps) / len(steps)
            assert values[name] == pytest.approx(mean, rel=1e-4, abs=1e-6), name
        assert values["sample/forwarded_tokens_max"] == max(step["sample/forwarded_tokens_max"] for step in steps)
    assert found[-1][1]["num_tokens"] == sum(step["batch/forwarded_tokens_per_step"] for step in each)


class Streamed(ReplayTrainer):
    num_prompts = None  # type: ignore[assignment]


def test_of_data_without_a_length_the_epoch_is_the_number_of_whole_passes(tmp_path: Path) -> None:
    groups = [made_up_group(number, 3, 5, 4) for number in range(8)]
    trainer = Streamed(tiny_model(), replay_config(tmp_path, num_train_epochs=2), groups, 40)
    trainer.reporter = Recorded()
    trainer.train()
    epochs = [values["epoch"] for _, values, _ in windows(trainer)]
    assert set(epochs) == {0.0, 1.0}
    assert epochs == sorted(epochs)


class Bar(TrainerCallback):
    """As transformers' own keeps it."""

    def __init__(self) -> None:
        self.training_bar = tqdm(total=sys.maxsize, file=io.StringIO())


@pytest.mark.parametrize(("max_steps", "total"), [(-1, None), (2, sys.maxsize)])
def test_a_progress_bar_has_no_end_where_the_number_of_steps_is_not_known(
    tmp_path: Path, max_steps: int, total: int | None
) -> None:
    trainer = trainer_of(tmp_path, max_steps=max_steps)
    bar = Bar()
    trainer.callback_handler.callbacks.insert(0, bar)
    trainer.train()
    assert bar.training_bar.total == total


def test_groups_dropped_after_the_last_step_are_told(tmp_path: Path) -> None:
    groups = [made_up_group(number, 3, 5, GROUPS) for number in range(5)] + [same_rewards(n) for n in range(5, GROUPS)]
    trainer = trainer_of(tmp_path, groups, max_staleness=0)  # all that the first step leaves is too old
    trainer.train()
    assert [step for step, _, _ in windows(trainer)] == [1]
    (step, rest, texts) = trainer.reporter.windows[-1]  # type: ignore[attr-defined]
    assert step == trainer.state.global_step == 1
    assert "loss" not in rest
    assert rest["sample/dropped_zero_std_count"] == 12
    assert rest["sample/dropped_stale_count"] > 0
    assert rest["epoch"] == 1
    assert all(known_without_a_step(name) or name == "epoch" for name in rest)
    assert "100% of the groups have no reward spread" in texts["saturation"]
    total = sum(v.get("sample/dropped_zero_std_count", 0) for _, v, _ in trainer.reporter.windows)  # type: ignore[attr-defined]
    assert total == 12


def test_a_checkpoint_keeps_the_open_window(tmp_path: Path, each: list[dict[str, float]]) -> None:
    """Killed in the fourth step: the third is in the checkpoint, and in no log. The resumed run's first window has it."""
    first = trainer_of(tmp_path / "a", logging_steps=2, save_strategy="steps", save_steps=3)
    first.add_callback(StopAt(3))
    with pytest.raises(Stop):
        first.train()
    assert [step for step, _, _ in windows(first)] == [2]
    second = trainer_of(tmp_path / "b", logging_steps=2)
    second.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    found = windows(second)
    assert [step for step, _, _ in found] == [4, 5]
    for name in SUMMED:
        assert found[0][1][name] == pytest.approx((each[2][name] + each[3][name]) / 2), name
    assert found[0][1]["loss"] == pytest.approx(each[3]["loss"]), "of the steps that this process has done"


def test_the_line_is_written_before_anything_else_hears_of_it(tmp_path: Path) -> None:
    class Broken(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            raise Stop

    trainer = trainer_of(tmp_path)
    trainer.add_callback(Broken())
    with pytest.raises(Stop):
        trainer.train()
    assert [step for step, _, _ in windows(trainer)] == [1]


def test_without_a_run_metrics_lie_in_the_output_folder(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.reporter = Reporter(folder=tmp_path)
    trainer.train()
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    json.dumps(lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_the_end_of_the_data_brings_the_last_report() -> None:
    assert EndOfData(3, [("rollout/vllm_retry_count", 2.0, 1.0)]) == EndOfData(3)
