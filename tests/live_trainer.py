"""The real trainer, in this process or as a script, against a server that runs already.

python -m tests.live_trainer RUN_DIR SERVER_URL MODEL TOKEN_FILE ATTEMPT DIES_AT: an attempt of a run whose rollout loop has a
state; it kills itself with SIGKILL in step DIES_AT.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from slipstream.config import AsyncGRPOConfig
from slipstream.learner.reporter import Reporter
from slipstream.learner.trainer import AsyncGRPOTrainer
from slipstream.rollout.loop import AsyncRolloutLoop
from slipstream.run_folder import RunFolder
from tests.sample_rewards import low_bytes

NUM_ROWS = 16
KEPT = 4  # every fourth row is generated for in each epoch


def row(number: int) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"count {number}"}]}


class Stream:
    """An iterable dataset of `count` prompts that raises at one of them."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self._count, self._fails_at = count, fails_at

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self._count):
            if number == self._fails_at:
                raise OSError("the disk is gone")
            yield row(number)


class OncePerRow(AsyncRolloutLoop):
    """Generates for most rows in the first epoch only, and counts the processes that it has lived in."""

    seen: dict[int, int]
    lives: int

    async def setup(self) -> None:
        self.seen, self.lives = {}, 1

    def filter_prompt(self, row_index: int, row: dict[str, Any], epoch: int) -> bool:
        return self.seen.setdefault(row_index, epoch) == epoch or row_index % KEPT == 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {str(row): epoch for row, epoch in self.seen.items()}, "lives": self.lives}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = {int(row): epoch for row, epoch in state["seen"].items()}
        self.lives = state["lives"] + 1


class StatefulTrainer(AsyncGRPOTrainer):
    loop_cls = OncePerRow


class Dies(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def live_trainer(
    url: str,
    model: Path,
    token_file: Path,
    output_dir: Path,
    dataset: Any,
    kind: type[AsyncGRPOTrainer] = AsyncGRPOTrainer,
    reporter: Reporter | None = None,
    **changes: Any,
) -> AsyncGRPOTrainer:
    """About three prompts a step, a checkpoint at each."""
    settings = {
        "token_budget": 256,
        "num_generations": 4,
        "max_completion_length": 12,
        "learning_rate": 1e-3,
        "save_steps": 1,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "vllm_server_base_url": url,
        "vllm_server_token_file": str(token_file),
        **changes,
    }
    config = AsyncGRPOConfig(output_dir=str(output_dir), **settings)
    trainer = kind(str(model), low_bytes, config, dataset, reporter=reporter)
    trainer.remove_callback(PrinterCallback)
    return trainer


def main(run_dir: str, url: str, model: str, token_file: str, attempt: int, dies_at: int) -> None:
    run = RunFolder(Path(run_dir))
    trainer = live_trainer(
        url,
        Path(model),
        Path(token_file),
        run.output(attempt),
        Dataset.from_list([row(number) for number in range(NUM_ROWS)]),
        StatefulTrainer,
        Reporter(run, attempt),
        num_train_epochs=2,
        run_dir=run_dir,
        attempt=attempt,
    )
    trainer.add_callback(Dies(dies_at))
    checkpoint = run.fence(attempt).get("checkpoint")
    trainer.train(resume_from_checkpoint=str(run.path / checkpoint) if checkpoint else None)


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]), int(sys.argv[6]))
