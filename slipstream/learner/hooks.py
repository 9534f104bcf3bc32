"""Where transformers' training loop meets the trainer."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from slipstream.learner.trainer import AsyncGRPOTrainer


class Hooks(TrainerCallback):
    """Where the transformers loop calls back."""

    def __init__(self, trainer: "AsyncGRPOTrainer") -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._trainer.duration.known_steps:
            open_ended(self._trainer.callback_handler.callbacks)
        self._trainer._start_pipeline()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer._optimizer_begun = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer._finish_step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.logging_strategy != "no":
            control.should_log = True  # the steps since the last multiple of logging_steps, if any


def open_ended(callbacks: Iterable[Any]) -> None:
    """Progress bars that count steps: how many there will be is not known, and no number stands for that."""
    for callback in callbacks:
        bar = getattr(callback, "training_bar", None)
        if bar is not None and hasattr(bar, "total"):
            bar.total = None
            bar.refresh()


class Steps:
    """The "data loader": asks the trainer for one micro-batch after the other, and for no more than a step needs."""

    def __init__(self, trainer: "AsyncGRPOTrainer") -> None:
        self._trainer = trainer

    def __iter__(self) -> Any:
        while (step := self._trainer._next_step()) is not None:
            yield from step
