"""A training whose checkpoints split groups, for the tests of resuming."""

from pathlib import Path
from typing import Any, TypeVar

from tests.learner_replay import ReplayTrainer, made_up_group, replay_config, tiny_model

Trainer = TypeVar("Trainer", bound=ReplayTrainer)

NUM_PROMPTS = 24
BUDGET = 16  # less than a group needs, so that a micro-batch ends within a group


def new_trainer(
    output_dir: Path,
    num_steps: int,
    seed: int = 0,
    prompts: list[str] | None = None,
    budget: int = BUDGET,
    kind: type[Trainer] = ReplayTrainer,  # type: ignore[assignment]
    **changes: Any,
) -> Trainer:
    """AdamW with a decaying learning rate, a checkpoint every second step. `seed`: of the model's first weights."""
    settings = {
        "max_steps": num_steps,
        "optim": "adamw_torch",
        "learning_rate": 0.01,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
        "max_grad_norm": 1.0,
        "save_strategy": "steps",
        "save_steps": 2,
        **changes,
    }
    groups = [made_up_group(number, 4, 5, NUM_PROMPTS) for number in range(NUM_PROMPTS)]
    return kind(tiny_model(seed), replay_config(output_dir, **settings), groups, budget, prompts=prompts)
