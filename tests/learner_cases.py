"""The cases in which the trainer's loss is compared with the reference, with any number of ranks."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.rollout.types import GroupResult
from tests.learner_replay import (
    VOCABULARY,
    ReplayTrainer,
    Step,
    keep_only_first,
    made_up_group,
    replay_config,
    tiny_model,
)

BUDGET = 48  # a group or two per row


@dataclass(frozen=True)
class Case:
    """`groups` prompts of 3 rollouts each; `lone`: only one sample of the one group is left."""

    config: dict[str, Any] = field(default_factory=dict)
    head_size: int = 5
    groups: int = 5
    budget: int = BUDGET
    deal: int | None = None
    lone: bool = False
    candidates: int | None = None

    @property
    def data(self) -> list[GroupResult]:
        groups = [
            made_up_group(number, 3, self.head_size, self.groups, self.candidates) for number in range(self.groups)
        ]
        return [keep_only_first(group) for group in groups] if self.lone else groups


ACCUMULATION = {"gradient_accumulation_steps": 3}
CLIPPED = {"score_centering": False, "epsilon": 0.1, "epsilon_high": 0.35}
WIDE = {
    "score_centering": False,
    "epsilon": 0.99,
    "epsilon_high": 99.0,
    "vllm_importance_sampling_clip_min": 0.01,
    "vllm_importance_sampling_clip_max": 100.0,
}
ONE_MICRO_BATCH: dict[str, Any] = {"groups": 4, "budget": 1_000}

CASES = {
    "centering, full head": Case(head_size=VOCABULARY, groups=3),
    "centering, full head, accumulation": Case({**ACCUMULATION, "gradient_checkpointing": True}, VOCABULARY, groups=16),
    "centering, partial head": Case({"gradient_checkpointing": True}),
    "centering, partial head, accumulation": Case({**ACCUMULATION, "temperature": 0.7}, groups=16),
    "clipped": Case({**CLIPPED, "temperature": 0.7}),
    "clipped, accumulation": Case({**CLIPPED, **ACCUMULATION, "gradient_checkpointing": True}, groups=16),
    "lone sample, centering": Case(groups=1, lone=True),
    "lone sample, hardly clipped, accumulation": Case({**WIDE, **ACCUMULATION}, groups=1, lone=True),
    "candidates, centering": Case({"top_k": 12, "temperature": 0.7}, candidates=12),
    "candidates, clipped, accumulation": Case({**CLIPPED, **ACCUMULATION, "top_k": 12}, groups=16, candidates=12),
    "one micro-batch": Case(**ONE_MICRO_BATCH),
    "one micro-batch, dealt": Case(deal=1, **ONE_MICRO_BATCH),
    "one micro-batch, clipped": Case(CLIPPED, **ONE_MICRO_BATCH),
    "one micro-batch, clipped, dealt": Case(CLIPPED, deal=2, **ONE_MICRO_BATCH),
}


def run_case(case: Case, output_dir: Path) -> list[Step]:
    """Train one epoch; its optimizer steps."""
    trainer = ReplayTrainer(tiny_model(), replay_config(output_dir, **case.config), case.data, case.budget, case.deal)
    trainer.train()
    return trainer.steps
