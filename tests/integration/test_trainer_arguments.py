"""Inherited training arguments do what transformers says, through `Trainer.train()` on replayed groups."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from slipstream.learner import trainer as trainer_module
from slipstream.learner.checkpoint import complete_checkpoints
from slipstream.learner.replay import ReplayPipeline
from tests.learner_replay import LEARNING_RATE, ReplayTrainer, made_up_group, replay_config, tiny_model

pytestmark = pytest.mark.integration

GROUPS = 18
STEPS = 6
BUDGET = 48
RATE = 0.01


def trainer_with(folder: Path, dtype: torch.dtype = torch.float64, **changes: Any) -> ReplayTrainer:
    others = {key: changes.pop(key) for key in ("eval_dataset", "callbacks") if key in changes}
    groups = [made_up_group(number, 3, 5, GROUPS) for number in range(GROUPS)]
    config = replay_config(folder, **({"max_steps": STEPS} | changes))
    return Evaluated(tiny_model(dtype=dtype), config, groups, BUDGET, **others)


class EvaluatedPipeline(ReplayPipeline):
    """A pipeline that has an evaluation, of which each gives a smaller reward."""

    def evaluate(self, request: int) -> dict[str, float]:
        return {"reward": 1 / request}


class Evaluated(ReplayTrainer):
    def make_pipeline(self, end: int | None, resumed: Any) -> ReplayPipeline:
        pipeline = super().make_pipeline(end, resumed)
        pipeline.__class__ = EvaluatedPipeline
        return pipeline


def trained(folder: Path, **changes: Any) -> ReplayTrainer:
    trainer = trainer_with(folder, **changes)
    trainer.train()
    return trainer


def logged(trainer: ReplayTrainer, key: str = "loss") -> list[tuple[int, float]]:
    """Step and value of each log that has `key`."""
    return [(log["step"], log[key]) for log in trainer.state.log_history if key in log]


def norm(gradient: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in gradient.values()))


# ---- the optimizer


def test_gradients_are_clipped(tmp_path):
    free = trained(tmp_path / "free").steps[0].gradient
    clipped = trained(tmp_path / "clipped", max_grad_norm=0.01)
    assert norm(free) > 0.1
    assert norm(clipped.steps[0].gradient) == pytest.approx(0.01, rel=1e-3)
    for name, value in clipped.steps[0].gradient.items():
        torch.testing.assert_close(value, free[name] * (0.01 / norm(free)), rtol=1e-3, atol=1e-9)
    assert logged(clipped, "grad_norm")[0][1] == pytest.approx(norm(free), rel=1e-6)


def test_weights_decay_but_for_norms(tmp_path):
    plain = trained(tmp_path / "plain").steps[0]
    decayed = trained(tmp_path / "decayed", weight_decay=0.5).steps[0]
    for name, value in decayed.gradient.items():
        pull = value - plain.gradient[name]
        expected = torch.zeros_like(pull) if "norm" in name else 0.5 * decayed.before[name]
        torch.testing.assert_close(pull, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("changes", "kind", "group"),
    [
        (
            {"optim": "adamw_torch", "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-4},
            "AdamW",
            {"betas": (0.8, 0.9), "eps": 1e-4, "lr": LEARNING_RATE},
        ),
        ({"optim": "sgd", "optim_args": "momentum=0.9,nesterov=true"}, "SGD", {"momentum": 0.9, "nesterov": True}),
        ({"optim": "adafactor"}, "Adafactor", {"relative_step": False}),
    ],
)
def test_the_optimizer_is_the_one_asked_for(tmp_path, changes, kind, group):
    trainer = trained(tmp_path, **changes)
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer).__name__ == kind
    assert {key: optimizer.param_groups[0][key] for key in group} == group
    first = trainer.steps[0]
    assert norm(first.gradient) > 0


def linear(step: int) -> float:
    return 1 - step / STEPS


SCHEDULES = [
    ({"lr_scheduler_type": "constant"}, lambda step: 1.0),
    ({"lr_scheduler_type": "linear"}, linear),
    ({"lr_scheduler_type": "cosine"}, lambda step: 0.5 * (1 + math.cos(math.pi * step / STEPS))),
    (
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 0.0}},
        lambda s: linear(s) ** 2,
    ),
    ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3}, lambda step: min(1.0, step / 3)),
    ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.5}, lambda step: min(1.0, step / 3)),
    (
        {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
        lambda step: step / 2 if step < 2 else 1 / math.sqrt(step / 2),
    ),
    (
        {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": {"num_decay_steps": 2, "decay_type": "linear"},
        },
        lambda step: 1.0 if step < 4 else 1 - (step - 4) / 2,
    ),
]


@pytest.mark.parametrize(("changes", "factor"), SCHEDULES)
def test_the_learning_rate_follows_its_schedule(tmp_path, changes, factor):
    rates = logged(trained(tmp_path, optim="sgd", learning_rate=RATE, **changes), "learning_rate")
    assert [step for step, _ in rates] == list(range(1, STEPS + 1))
    assert [rate for _, rate in rates] == pytest.approx([RATE * factor(step) for step in range(STEPS)])


# ---- logging, saving, evaluating


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"logging_steps": 2}, [2, 4, 6]),
        ({"logging_steps": 2, "logging_first_step": True}, [1, 2, 4, 6]),
        ({"logging_steps": 0.5}, [3, 6]),
    ],
)
def test_logs_come_when_they_should(tmp_path, changes, steps):
    assert [step for step, _ in logged(trained(tmp_path, **changes))] == steps


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"save_strategy": "steps", "save_steps": 4}, [4, 6]),
        ({"save_strategy": "steps", "save_steps": 0.5}, [3, 6]),
        ({"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}, [4, 6]),
        ({"save_strategy": "no"}, []),
    ],
)
def test_checkpoints_come_when_they_should(tmp_path, changes, steps):
    trained(tmp_path, **changes)
    assert [step for step, _ in complete_checkpoints(tmp_path)] == steps


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"eval_strategy": "no"}, [0, 6]),
        ({"eval_strategy": "no", "eval_on_start": True}, [0, 6]),
        ({"eval_strategy": "steps", "eval_steps": 2}, [0, 2, 4, 6]),
        ({"eval_strategy": "steps", "eval_steps": 4}, [0, 4, 6]),
        ({"eval_strategy": "steps", "eval_steps": 0.5}, [0, 3, 6]),
        ({"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 3}, [0, 4, 6]),
        ({"eval_strategy": "steps"}, [0, 1, 2, 3, 4, 5, 6]),  # as often as logs
    ],
)
def test_evaluations_come_when_they_should(tmp_path, changes, steps):
    trainer = trained(tmp_path, eval_dataset=[{"prompt": []}], **changes)
    assert [evaluation["step"] for evaluation in trainer.evaluations] == steps
    assert [step for step, _ in logged(trainer, "eval/reward")] == steps


def test_the_end_of_the_data_is_evaluated_too(tmp_path):
    """It comes unannounced: the number of steps is not known."""
    trainer = trained(tmp_path, max_steps=-1, eval_dataset=[{"prompt": []}], eval_strategy="steps", eval_steps=10_000)
    assert [evaluation["step"] for evaluation in trainer.evaluations] == [0, trainer.state.global_step]


@pytest.mark.parametrize("changes", [{"eval_strategy": "steps"}, {"eval_on_start": True}])
def test_an_evaluation_needs_data(tmp_path, changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))} = .*pass one, or set {next(iter(changes))}="):
        trainer_with(tmp_path, **changes)


def test_tokens_are_counted_once(tmp_path, caplog):
    trainer = trained(tmp_path, include_num_input_tokens_seen="all")
    counted = dict(logged(trainer, "num_tokens"))
    assert list(counted) == list(range(1, STEPS + 1))
    assert dict(logged(trainer, "num_input_tokens_seen")) == counted
    assert sorted(counted.values()) == list(counted.values())
    assert not [record for record in caplog.records if "number of tokens seen" in record.getMessage()]


# ---- memory and precision


class Seen(TrainerCallback):
    """What the model is like while a step is trained."""

    def __init__(self) -> None:
        self.checkpointing: list[bool] = []
        self.dtypes: set[torch.dtype] = set()

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        layer = model.model.layers[0]
        self.checkpointing.append(layer.gradient_checkpointing)
        self.arguments = getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {})
        layer.mlp.up_proj.register_forward_hook(lambda _module, _args, output: self.dtypes.add(output.dtype))


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_activations_are_checkpointed(tmp_path, name, on):
    seen = Seen()
    given = {f"{name}_kwargs": {"use_reentrant": False, "preserve_rng_state": False}} if on else {}
    trained(tmp_path, callbacks=[seen], **{"gradient_checkpointing": True, name: on, **given})
    assert seen.checkpointing == [on] * STEPS
    if on:
        assert seen.arguments["use_reentrant"] is False
        assert seen.arguments["preserve_rng_state"] is False


@pytest.mark.parametrize(("bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_mixed_precision(tmp_path, bf16, dtype):
    seen = Seen()
    trainer = trained(tmp_path, dtype=torch.float32, callbacks=[seen], bf16=bf16)
    assert seen.dtypes == {dtype}
    assert next(trainer.model.parameters()).dtype == torch.float32


def test_the_device_s_cache_is_emptied(tmp_path, monkeypatch):
    emptied: list[int] = []
    monkeypatch.setattr(trainer_module, "clear_device_cache", lambda: emptied.append(trainer.state.global_step))
    trainer = trainer_with(tmp_path, torch_empty_cache_steps=2)
    trainer.train()
    assert emptied == [0, 2, 4]


def test_memory_is_measured(tmp_path):
    trainer = trained(tmp_path, skip_memory_metrics=False)
    assert {"init_mem_cpu_alloc_delta", "train_mem_cpu_peaked_delta"} <= set(trainer.state.log_history[-1])


@pytest.fixture
def reset_determinism() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def test_full_determinism(tmp_path, reset_determinism, monkeypatch):
    for name in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC"):
        monkeypatch.setenv(name, "")
    trainer = trained(tmp_path / "a", full_determinism=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert logged(trainer) == logged(trained(tmp_path / "b", full_determinism=True))


def test_underflow_is_looked_for(tmp_path):
    assert len(logged(trained(tmp_path, debug="underflow_overflow", dtype=torch.float32))) == STEPS


# ---- the rest


@pytest.mark.parametrize(
    ("changes", "order"),
    [
        ({}, (True, 42)),
        ({"seed": 7}, (True, 7)),
        ({"seed": 7, "data_seed": 9}, (True, 9)),
        ({"train_sampling_strategy": "sequential"}, (False, 42)),
    ],
)
def test_the_order_of_prompts(tmp_path, changes, order):
    assert trainer_with(tmp_path, **changes)._order == order


def test_arguments_of_ddp_reach_it(tmp_path):
    given = {"bucket_cap_mb": 7, "broadcast_buffers": False, "static_graph": True, "find_unused_parameters": True}
    trainer = trainer_with(tmp_path, **{f"ddp_{key}": value for key, value in given.items()})
    [handler] = trainer._build_accelerator_args()["kwargs_handlers"]
    assert {key: getattr(handler, key) for key in given} == given


def test_the_log_level_is_set(tmp_path):
    before = transformers.logging.get_verbosity()
    try:
        trainer_with(tmp_path, log_level="error")
        assert transformers.logging.get_verbosity() == transformers.logging.ERROR
    finally:
        transformers.logging.set_verbosity(before)


def test_checkpoints_are_pushed(tmp_path, monkeypatch):
    """Weights are there when transformers begins to copy them; the hub itself is not asked."""
    pushed: list[str] = []

    def push(self: Any, checkpoint: str) -> None:
        assert (Path(checkpoint) / "model.safetensors").is_file()
        pushed.append(Path(checkpoint).name)

    monkeypatch.setattr(ReplayTrainer, "init_hf_repo", lambda self: None)
    monkeypatch.setattr(ReplayTrainer, "_push_from_checkpoint", push)
    monkeypatch.setattr(ReplayTrainer, "_finish_current_push", lambda self: None)
    trained(tmp_path, push_to_hub=True, hub_model_id="me/model", save_strategy="steps", save_steps=3)
    assert pushed == ["checkpoint-3", "checkpoint-6"]


class Counter(TrainerCallback, ExportableState):
    """Counts steps, and says so in checkpoints."""

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


@pytest.mark.parametrize("restored", [True, False])
def test_a_resumed_run_takes_its_checkpoint_and_callbacks_from_the_arguments(tmp_path, restored):
    whole = trained(tmp_path / "a", save_strategy="steps", save_steps=2, callbacks=[Counter()])
    resumed = trained(
        tmp_path / "b",
        callbacks=[Counter()],
        resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"),
        restore_callback_states_from_checkpoint=restored,
    )
    assert [step for step, _ in logged(resumed)] == [1, 2, 3, 4, 5, 6]
    assert [loss for _, loss in logged(resumed)] == pytest.approx([loss for _, loss in logged(whole)], rel=1e-9)
    [counter] = [c for c in resumed.callback_handler.callbacks if isinstance(c, Counter)]
    assert counter.count == (6 if restored else 4)
