"""One rank of a learner that trains a tiny model on made-up groups: the real leader, torchrun and rank, no server.

As `slipstream.learner.main`, which `INTERPRETER` puts it in the place of.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from slipstream.learner import main as learner_main
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder

PAUSE_ENV = "REPLAYED_LEARNER_PAUSE"  # seconds after each step
INTERPRETER = """#!/bin/sh
for argument; do
    shift
    [ "$argument" = slipstream.learner.main ] && argument=tests.standins.replayed_learner
    set -- "$@" "$argument"
done
exec {python} "$@"
"""


def write_interpreter(path: Path) -> Path:
    """A stand-in for `learner.python`."""
    path.write_text(INTERPRETER.format(python=sys.executable))
    path.chmod(0o755)
    return path


class _Pause(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        time.sleep(float(os.environ.get(PAUSE_ENV, "0")))


def train(run: RunFolder, config: RunConfig, attempt: int, reporter: Any) -> dict[str, Any]:
    from tests.learner_resume import new_trainer

    trainer = new_trainer(run.output(attempt), config.trainer.max_steps)
    trainer.reporter = reporter
    trainer.add_callback(_Pause())
    trainer.train()
    history = trainer.state.log_history
    return {
        "steps": trainer.state.global_step,
        "losses": [line["loss"] for line in history if "loss" in line],
        "norms": [line["grad_norm"] for line in history if "grad_norm" in line],
    }


if __name__ == "__main__":
    learner_main.train = train
    sys.exit(learner_main.main())
