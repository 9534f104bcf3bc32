"""Duration and resume of the real trainer on recorded groups: each step k, each setting that a resume may change."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import dropout

from slipstream.learner import checkpoint as ckpt
from slipstream.learner.checkpoint import CheckpointError, RolloutState
from slipstream.learner.ledger import NothingTrained
from slipstream.metrics.audit import check_lines
from slipstream.rollout.types import STALE, ZERO_STD, GroupResult
from tests.learner_replay import ReplayTrainer, made_up_group, replay_config, snapshot, tiny_model
from tests.learner_resume import NUM_PROMPTS, new_trainer

pytestmark = pytest.mark.integration

STEPS = 6
NEVER_STALE = 100
EVERY_STEP = {"save_steps": 1, "max_staleness": 1}
RARE_DELIVERIES = {"save_steps": 1, "max_staleness": 0, "weight_sync_steps": 3}


class Demanding(ReplayTrainer):
    """Uses random numbers in its forward pass, and half of its groups grow stale."""

    def __init__(self, model: Any, config: Any, groups: list[GroupResult], *args: Any, **others: Any) -> None:
        for group in groups:
            for sample in group.samples:
                sample.versions[sample.trained] = 0 if group.number % 2 else NEVER_STALE
        super().__init__(model, config, groups, *args, **others)
        self.model.model.norm.register_forward_hook(lambda module, _, out: dropout(out, 0.2, module.training))


def logs(trainer: ReplayTrainer) -> list[tuple[Any, ...]]:
    return [
        (log["step"], log["learning_rate"], log["loss"], log["grad_norm"], log["num_tokens"])
        for log in trainer.state.log_history
        if "loss" in log
    ]


@pytest.fixture(scope="module", params=[EVERY_STEP, RARE_DELIVERIES], ids=["each", "third"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ReplayTrainer:
    """The training without an interruption, with a checkpoint at each step; the policy is delivered every 1 or 3."""
    out = tmp_path_factory.mktemp("whole")
    trainer = new_trainer(out, STEPS, kind=Demanding, **request.param)
    trainer.train()
    return trainer


@pytest.mark.parametrize("k", range(1, STEPS))
def test_resumed_from_any_step_it_trains_bit_for_bit_the_same(whole: ReplayTrainer, k: int, tmp_path: Path) -> None:
    folder = Path(str(whole.args.output_dir))
    sync = whole.args.weight_sync_steps
    changes = EVERY_STEP if sync == 1 else RARE_DELIVERIES
    trainer = new_trainer(tmp_path, STEPS, seed=1, kind=Demanding, **changes)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{k}"))

    assert logs(trainer) == logs(whole), "losses, gradient norms, learning rates and tokens of every step"
    assert [step.samples for step in trainer.steps] == [step.samples for step in whole.steps[k:]]
    for name, value in snapshot(whole.model).items():
        assert torch.equal(snapshot(trainer.model)[name], value), name
    ours, theirs = trainer.optimizer.state_dict()["state"], whole.optimizer.state_dict()["state"]
    assert all(torch.equal(ours[i][key], theirs[i][key]) for i in theirs for key in theirs[i])
    for step in range(k + 1, STEPS + 1):
        found, expected = (RolloutState.read(out / f"checkpoint-{step}") for out in (tmp_path, folder))
        assert found == expected
        assert found.model_version == step // sync
    lines = whole.reports.lines
    assert trainer.reports.lines == [line for line in lines if line["step"] > k], "the same ledger, line by line"


def test_the_comparison_is_of_something(whole: ReplayTrainer) -> None:
    """Samples were dropped as stale, groups were split by checkpoints, and the forward pass drew random numbers."""
    outcomes = [line["outcomes"] for line in whole.reports.lines]
    assert any(STALE in o for o in outcomes)
    folder = Path(str(whole.args.output_dir))
    assert any((folder / f"checkpoint-{k}" / ckpt.REMAINDER_FILE).exists() for k in range(1, STEPS))
    assert any(RolloutState.read(folder / f"checkpoint-{k}").split for k in range(1, STEPS))
    model = whole.model
    ids = torch.arange(6)[None]
    model.train()
    assert not torch.equal(model.model(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_staleness_counts_from_the_resumed_version(tmp_path: Path) -> None:
    """A sample of version 0 is within the bound for a new run, and beyond it for one resumed at version 3."""
    new_trainer(tmp_path, 4, kind=Demanding, **EVERY_STEP).train()
    state = RolloutState.read(tmp_path / "checkpoint-3")
    assert state.model_version == 3
    trainer = new_trainer(tmp_path / "a2", STEPS, kind=Demanding, **EVERY_STEP)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    trained = {sample.number % 2 for step in trainer.steps for batch in step.micro_batches for sample in batch}
    assert trained == {0}, "the odd groups are of version 0"
    assert any(STALE in line["outcomes"] for line in trainer.reports.lines)


def epochs_trainer(output_dir: Path, prompts: int, kind: type[ReplayTrainer], budget: int = 64, **changes: Any) -> Any:
    """Groups for three epochs."""
    groups = [made_up_group(number, 3, 5, prompts) for number in range(3 * prompts)]
    settings = {"save_strategy": "steps", "save_steps": 1, **changes}
    texts = [str(i) for i in range(prompts)]
    return kind(tiny_model(0), replay_config(output_dir, **settings), groups, budget, prompts=texts)


class Bounded(ReplayTrainer):
    """Replays as many groups as the rollout process would generate."""

    def make_pipeline(self, end: int | None, resumed: Any) -> Any:
        self._groups = self._groups[:end]
        return super().make_pipeline(end, resumed)


@pytest.mark.parametrize(("epochs", "settled"), [(0.5, 4), (1, 8), (1.5, 12), (1.1, 9)])
def test_epochs_count_prompts(epochs: float, settled: int, tmp_path: Path) -> None:
    trainer = epochs_trainer(tmp_path, 8, Bounded, num_train_epochs=epochs)
    trainer.train()
    assert [line["number"] for line in trainer.reports.lines] == list(range(settled))
    assert trainer.state.epoch == settled / 8
    assert trainer.args.max_steps == -1
    last = ckpt.complete_checkpoints(tmp_path)[-1][1]
    assert RolloutState.read(last).position.first_unsettled == settled, "the last step is saved, off schedule or not"


@pytest.mark.parametrize("stop", [0.5, 1])
def test_more_epochs_can_be_asked_for_at_a_resume(stop: float, tmp_path: Path) -> None:
    first = epochs_trainer(tmp_path / "a1", 6, Bounded, num_train_epochs=stop)
    first.train()
    second = epochs_trainer(tmp_path / "a2", 6, Bounded, num_train_epochs=2)
    second.train(resume_from_checkpoint=str(ckpt.complete_checkpoints(tmp_path / "a1")[-1][1]))
    assert check_lines(first.reports.lines + second.reports.lines, 6, 2) == []


def test_more_steps_than_an_epoch_has_repeat_the_data(tmp_path: Path) -> None:
    trainer = epochs_trainer(tmp_path, 2, Bounded, 20, max_steps=4, num_train_epochs=1)
    trainer.train()
    assert trainer.state.global_step == 4
    assert {line["epoch"] for line in trainer.reports.lines} > {0}
    assert check_lines(trainer.reports.lines, 2, 1) == []


def test_an_epoch_that_comes_to_nothing_after_a_resume_raises(tmp_path: Path) -> None:
    first = epochs_trainer(tmp_path / "a1", 6, Bounded, num_train_epochs=1)
    first.train()
    second = epochs_trainer(tmp_path / "a2", 6, Bounded, num_train_epochs=2)
    for group in second._groups[6:]:
        group.samples, group.dropped = [], {ZERO_STD: 3}
    with pytest.raises(NothingTrained, match=r"epoch 1 is over .*zero_std: 18"):
        second.train(resume_from_checkpoint=str(ckpt.complete_checkpoints(tmp_path / "a1")[-1][1]))


def test_half_an_epoch_that_comes_to_nothing_raises_too(tmp_path: Path) -> None:
    trainer = epochs_trainer(tmp_path, 6, Bounded, num_train_epochs=0.5)
    for group in trainer._groups:
        group.samples, group.dropped = [], {ZERO_STD: 3}
    with pytest.raises(NothingTrained, match=r"the data is over .*zero_std: 9"):
        trainer.train()


def resume_with(
    checkpoint: Path, output_dir: Path, caplog: pytest.LogCaptureFixture, num_steps: int = STEPS, **changes: Any
) -> tuple[ReplayTrainer, str]:
    """A resumed training, and what was said about it."""
    trainer = new_trainer(output_dir, num_steps, **changes)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "slipstream"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer, "\n".join(r.getMessage() for r in caplog.records if "resumed" in r.getMessage())


def test_an_unchanged_resume_has_nothing_to_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    new_trainer(tmp_path, 4).train()
    assert resume_with(tmp_path / "checkpoint-2", tmp_path / "a2", caplog, 4)[1] == ""


def test_a_finished_run_trains_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = new_trainer(tmp_path, 4)
    whole.train()
    for steps in (4, 3):
        trainer, said = resume_with(tmp_path / "checkpoint-4", tmp_path / "a2", caplog, steps, seed=1)
        assert f"the checkpoint is of step 4 and max_steps={steps}: raise max_steps" in said
        assert trainer.steps == []
        for name, value in snapshot(whole.model).items():
            assert torch.equal(snapshot(trainer.model)[name], value), "the checkpoint's model, not the new one"
    assert not list((tmp_path / "a2").glob("checkpoint-*"))


def test_a_finished_epoch_run_trains_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    epochs_trainer(tmp_path / "a1", 6, Bounded, num_train_epochs=1).train()
    second = epochs_trainer(tmp_path / "a2", 6, Bounded, num_train_epochs=1)
    with caplog.at_level(logging.WARNING, "slipstream"):
        second.train(resume_from_checkpoint=str(ckpt.complete_checkpoints(tmp_path / "a1")[-1][1]))
    assert "raise num_train_epochs" in caplog.text
    assert second.steps == []


def test_raised_steps_go_on_with_the_schedule_of_the_new_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new_trainer(tmp_path, 4).train()
    trainer, said = resume_with(tmp_path / "checkpoint-4", tmp_path / "a2", caplog, 8)
    assert "max_steps was 4 at the checkpoint and is 8 now: from step 5 on" in said
    rates = {step: rate for step, rate, *_ in logs(trainer)}
    assert trainer.state.global_step == 8
    assert rates[5] == pytest.approx(0.01 * (8 - 4) / (8 - 2)), "two steps of warm-up, then down to zero at step 8"
    assert rates[8] == pytest.approx(0.01 * (8 - 7) / (8 - 2))


def test_changed_settings_are_explained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    new_trainer(tmp_path, 4).train()
    changes = {"learning_rate": 0.5, "num_generations": 7, "weight_sync_steps": 2, "budget": 40}
    trainer, said = resume_with(tmp_path / "checkpoint-2", tmp_path / "a2", caplog, 4, **changes)
    for expected in (
        "learning_rate was 0.01 at the checkpoint and is 0.5 now: the optimizer and its schedule go on with",
        "num_generations was 8 at the checkpoint and is 7 now: samples that the checkpoint held back",
        "weight_sync_steps was 1 at the checkpoint and is 2 now",
        "token_budget was 16 at the checkpoint and is 40 now",
    ):
        assert expected in said
    assert max(rate for _, rate, *_ in logs(trainer)) <= 0.01, "what was said about the learning rate is true"
    assert RolloutState.read(tmp_path / "a2" / "checkpoint-4").model_version == 3


def test_another_seed_would_be_another_order_and_is_refused(tmp_path: Path) -> None:
    class Reseeded(ReplayTrainer):
        @property
        def _order(self) -> tuple[bool, int]:
            return True, 7

    new_trainer(tmp_path, 2).train()
    with pytest.raises(CheckpointError, match="seed of the order was 42, now it is 7"):
        new_trainer(tmp_path, 4, kind=Reseeded).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_an_old_checkpoint_resumes_the_same_training(tmp_path: Path) -> None:
    """Without what newer versions keep: the weights are the same, only the ledger knows less."""
    whole = new_trainer(tmp_path, STEPS)
    whole.train()
    checkpoint = tmp_path / "checkpoint-2"
    state = json.loads((checkpoint / ckpt.STATE_FILE).read_text())
    for name in ("settings", "outcomes", "split"):
        del state[name]
    (checkpoint / ckpt.STATE_FILE).write_text(json.dumps(state))
    ckpt.seal(checkpoint)
    trainer = new_trainer(tmp_path / "a2", STEPS, seed=1)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert logs(trainer) == logs(whole)
    lines = [line for line in whole.reports.lines if line["step"] <= 2] + trainer.reports.lines
    assert check_lines(lines, NUM_PROMPTS) == []
