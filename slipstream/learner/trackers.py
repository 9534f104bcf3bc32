"""Integrations of transformers in a run: none of them can end it, and each is closed only when the last has been logged."""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from slipstream.tracking import without_secrets

logger = logging.getLogger(__name__)

MOST_FAILURES = 3  # in a row
EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
Failed = Callable[[str, str], None]


class Tracker:
    """Stands between the trainer and an integration's callback.

    What the callback raises is warned of once. It is left alone from then on where it could not begin, or has failed
    `MOST_FAILURES` times in a row. Its end is put off until `finish`: the run's last evaluation is logged after what
    transformers takes for the end.
    """

    def __init__(self, callback: TrainerCallback, failed: Failed) -> None:
        """`failed` is told the first failure: the callback's class, and the error."""
        self.callback = callback
        self._failed = failed
        self._failures = 0
        self._warned = self._off = False
        self._end: Callable[[], Any] | None = None
        for event in EVENTS:
            setattr(callback, event, functools.partial(self._call, event, getattr(callback, event)))

    def _call(self, event: str, method: Callable[..., Any], args: Any, state: Any, control: Any, **others: Any) -> Any:
        if self._off:
            return None
        if event == "on_train_end":
            self._end = functools.partial(self._try, event, method, args, state, control, **others)
            return None
        if event == "on_train_begin" and isinstance(self.callback, TensorBoardCallback):
            hide_void_steps(self.callback, state.global_step)
        return self._try(event, method, args, state, control, **others)

    def _try(self, event: str, method: Callable[..., Any], *args: Any, **others: Any) -> Any:
        try:
            result = method(*args, **others)
        except Exception as error:
            self._failures += 1
            self._off = event == "on_train_begin" or self._failures >= MOST_FAILURES
            if not self._warned:
                self._warned = True
                text = without_secrets(f"{type(error).__name__}: {error}", os.environ)
                self._failed(type(self.callback).__name__, text)
            return None
        if event == "on_log":
            self._failures = 0
        return result

    def finish(self) -> None:
        """Nothing more will be logged."""
        end, self._end = self._end, None
        if end is not None:
            end()


def hide_void_steps(callback: TensorBoardCallback, step: int) -> None:
    """Let TensorBoard forget what an earlier attempt logged beyond the step that this one resumes from."""
    writer: Any = callback._SummaryWriter
    if step and writer is not None and not isinstance(writer, functools.partial):
        callback._SummaryWriter = functools.partial(writer, purge_step=step + 1)  # type: ignore[assignment]


def track(callbacks: list[TrainerCallback], report_to: list[str], failed: Failed) -> list[Tracker]:
    """Put a `Tracker` before each of the callbacks that stand for what `report_to` names."""
    kinds = tuple(get_reporting_integration_callbacks(report_to))
    return [Tracker(callback, failed) for callback in callbacks if isinstance(callback, kinds)] if kinds else []
