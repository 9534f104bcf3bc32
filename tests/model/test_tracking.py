"""`report_to`: what is refused before anything is allocated, where files lie, and that no tracker ends a run."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from slipstream.learner.reporter import Reporter
from slipstream.preflight import _integrations
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, read_jsonl
from slipstream.tracking import INTEGRATIONS, environment_of, report_problem, without_secrets
from tests.learner_replay import ReplayTrainer, made_up_group, replay_config, tiny_model

GROUPS = 9


def trainer_of(run: RunFolder, attempt: int = 1, **changes: Any) -> ReplayTrainer:
    settings = {"logging_steps": 2, "save_strategy": "steps", "save_steps": 2, "run_name": run.run_id, **changes}
    config = replay_config(run.output(attempt), **settings)
    groups = [made_up_group(number, 3, 5, GROUPS) for number in range(GROUPS)]
    trainer = ReplayTrainer(tiny_model(), config, groups, 40)
    trainer.reporter = Reporter(run, attempt)
    return trainer


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    run = RunFolder.create(tmp_path, "run-1")
    run.begin_attempt(None, 0)
    for name, value in environment_of(run.trackers, run.run_id).items():
        monkeypatch.setenv(name, value)
    return run


# ---- refused


def test_what_is_not_installed_is_refused_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INTEGRATIONS, "wandb", (("no_such_module",), "wandb"))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"report_to = \['wandb'\]: wandb is not installed here: run `pip install wandb`"
    ):
        replay_config(tmp_path, report_to=["wandb"])
    config = RunConfig.model_validate(
        {
            "name": "t",
            "model": {"name": "m"},
            "data": {"source": "d"},
            "reward": {"functions": ["f:f"]},
            "trainer": {"report_to": ["wandb"]},
        }
    )
    (problem,) = _integrations(config)
    assert (problem.key, problem.severity) == ("trainer.report_to", "error")
    assert "pip install wandb" in problem.message
    elsewhere = config.model_copy(update={"learner": config.learner.model_copy(update={"python": "/other/python"})})
    assert _integrations(elsewhere) == [], "its packages are seen only there"


def test_an_unknown_name_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no integration 'tensorbord': choose among azure_ml, .*tensorboard"):
        replay_config(tmp_path, report_to="tensorbord")


def test_transformers_knows_them_and_none_is_always_there() -> None:
    assert set(INTEGRATIONS) >= set(integration_utils.INTEGRATION_TO_CALLBACK)
    assert report_problem("none") is None
    assert report_problem("tensorboard") is None


# ---- tensorboard


def scalars(run: RunFolder) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(run.trackers / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found: dict[str, dict[int, float]] = {}
    for tag in events.Tags()["scalars"]:
        steps = [event.step for event in events.Scalars(tag)]
        # transformers' summary of the training has an epoch too
        assert tag == "train/epoch" or len(steps) == len(set(steps)), f"{tag} twice at a step: {steps}"
        found[tag] = {event.step: event.value for event in events.Scalars(tag)}
    return found


def assert_same(found: dict[str, dict[int, float]], lines: list[dict[str, Any]]) -> None:
    """Every number of metrics.jsonl is there, under its name with transformers' prefix."""
    for line in lines:
        for name, value in line.items():
            if isinstance(value, int | float) and name not in ("step", "time", "attempt"):
                assert math.isclose(found[f"train/{name}"][line["step"]], value, rel_tol=1e-6, abs_tol=1e-9), name


def test_tensorboard_gets_what_metrics_jsonl_has(run: RunFolder) -> None:
    trainer_of(run, report_to=["tensorboard"]).train()
    lines = read_jsonl(run.records(1) / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 5]
    assert all("batch/packing_ratio" in line and "sampling/masked_mean" in line for line in lines)
    assert_same(scalars(run), lines)


def test_a_resumed_run_goes_on_with_the_same_curves(run: RunFolder) -> None:
    """The first attempt's steps beyond the checkpoint are void, in metrics.jsonl and in TensorBoard."""
    trainer_of(run, report_to=["tensorboard"]).train()
    checkpoint = run.output(1) / "checkpoint-2"
    attempt = run.begin_attempt(str(checkpoint.relative_to(run.path)), 2)
    second = trainer_of(run, attempt, report_to=["tensorboard"])
    second.train(resume_from_checkpoint=str(checkpoint))
    lines = list(run.merged_records("metrics.jsonl"))
    assert [(line["attempt"], line["step"]) for line in lines] == [(1, 2), (2, 4), (2, 5)]
    found = scalars(run)
    assert sorted(found["train/loss"]) == [2, 4, 5]
    assert_same(found, lines)


# ---- trackers that fail


class Broken(TrainerCallback):
    """Stands for an integration; fails where it is told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: dict[str, set[int]] = {}  # event: which of its calls

    def _called(self, event: str) -> None:
        self.calls.append(event)
        if self.calls.count(event) in self.fails.get(event, ()):
            raise ConnectionError("no route to https://tracker with key 0123456789secret")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._called("begin")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self._called("log")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._called("end")


@pytest.mark.parametrize(
    ("fails", "calls"),
    [
        ({}, ["begin", *["log"] * 6, "end"]),
        ({"log": {1, 3, 5}}, ["begin", *["log"] * 6, "end"]),  # now and then: it is still asked
        ({"log": set(range(9))}, ["begin", *["log"] * 3]),  # always: no more
        ({"begin": {1}}, ["begin"]),
        ({"end": {1}}, ["begin", *["log"] * 6, "end"]),
    ],
)
def test_a_tracker_that_fails_is_warned_of_once_and_ends_nothing(
    run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails: dict[str, set[int]],
    calls: list[str],
) -> None:
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Broken)
    monkeypatch.setenv("TRACKER_API_KEY", "0123456789secret")
    trainer = trainer_of(run, report_to=["tensorboard"], logging_steps=1)
    (broken,) = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Broken)]
    broken.fails = fails
    with caplog.at_level(logging.WARNING, logger="slipstream.learner.window_log"):
        trainer.train()
    assert trainer.state.global_step == 5
    assert [line["step"] for line in read_jsonl(run.records(1) / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert broken.calls == calls
    warned = [record.getMessage() for record in caplog.records]
    events = [e for e in read_jsonl(run.records(1) / "events.jsonl") if e["event"] == "tracker_failed"]
    assert len(warned) == len(events) == bool(fails)
    for text in [*warned, *(event["error"] for event in events)]:
        assert "ConnectionError: no route" in text
        assert "0123456789secret" not in text


def test_other_callbacks_may_end_a_run(run: RunFolder) -> None:
    trainer = trainer_of(run)
    broken = Broken()
    broken.fails = {"log": {1}}
    trainer.add_callback(broken)
    with pytest.raises(ConnectionError):
        trainer.train()


# ---- where files lie


def test_a_run_keeps_its_files_and_one_name_for_all_attempts(tmp_path: Path) -> None:
    variables = environment_of(tmp_path / "run-1" / "trackers", "run-1")
    assert variables["WANDB_RUN_ID"] == "run-1"
    assert variables["WANDB_RESUME"] == "allow"
    for name in ("TENSORBOARD_LOGGING_DIR", "TRACKIO_DIR", "WANDB_DIR"):
        assert Path(variables[name]).is_relative_to(tmp_path / "run-1" / "trackers")


def test_values_of_secret_variables_are_blotted_out() -> None:
    environment = {"WANDB_API_KEY": "abcdefgh12", "HF_TOKEN": "hf_abcdefgh", "PATH": "/usr/local/bin", "A_KEY": "short"}
    text = without_secrets("abcdefgh12 and hf_abcdefgh in /usr/local/bin, short", environment)
    assert text == "*** and *** in /usr/local/bin, short"
