"""What a trainer logs: each window over all ranks, in numbers and words, and what is known without a step."""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from slipstream.learner.completions import print_completions
from slipstream.learner.narrator import Narrator, known_without_a_step
from slipstream.learner.pipeline import Pipeline
from slipstream.learner.reporter import Reporter
from slipstream.metrics.window import Window, kind_of

logger = logging.getLogger(__name__)

SPEAK_AFTER_S = 60.0


class WindowLog:
    """The logging half of `AsyncGRPOTrainer`; transformers' `Trainer` comes after it among the bases."""

    speak_after_s: float = SPEAK_AFTER_S
    args: Any
    state: Any
    accelerator: Any
    reporter: Reporter
    completions: list[dict[str, Any]]  # since the last log
    _window: Window
    _narrator: Narrator
    _pipeline: Pipeline | None
    _objects: Any
    _last_sign: float

    if TYPE_CHECKING:

        @property
        def num_prompts(self) -> int | None: ...

    @property
    def _is_main(self) -> bool:
        return bool(self.accelerator.process_index == 0)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        window, end = "loss" in logs, "train_runtime" in logs
        if end:
            self._log_rest()
        if window:
            logs.update(self._reduce_window())
        self._count_epochs()
        if self._pipeline is not None and window:
            logs["num_tokens"] = self.state.num_input_tokens_seen
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if not end:  # before anything that hears of it: what a callback raises must not lose the window
            self._record(logs, self._narrator.window if window else None)
        super().log(logs, start_time)  # type: ignore[misc]

    def _count_epochs(self) -> None:
        if self._pipeline is None:
            return
        ledger = self._pipeline.ledger
        # of a dataset of unknown length only whole passes can be told
        self.state.epoch = ledger.settled / self.num_prompts if self.num_prompts else float(ledger.place[0])

    def _record(self, logs: dict[str, float], say: Callable[[dict[str, float]], dict[str, str]] | None) -> None:
        """Write a line of metrics.jsonl, on rank 0."""
        if not self._is_main:
            return
        values = {k: v for k, v in logs.items() if isinstance(v, (int, float))}
        self.reporter.metrics(self.state.global_step, values, say(values) if say else {})
        self._print_completions()

    def _log_rest(self) -> None:
        """The end: groups that were dropped after the last window, if any, are told all the same."""
        rest = {name: value for name, value in self._reduce_window().items() if known_without_a_step(name)}
        if "frac_reward_zero_std" not in rest and not any(kind_of(n) == "sum" and v for n, v in rest.items()):
            return
        self._count_epochs()
        if self.state.epoch is not None:
            rest["epoch"] = self.state.epoch
        self._record(rest, self._narrator.window)
        super().log(rest)  # type: ignore[misc]

    def _tracker_failed(self, name: str, error: str) -> None:
        logger.warning("%s failed, and the run goes on without what it missed (metrics.jsonl has it): %s", name, error)
        self.reporter.event("tracker_failed", self.state.global_step, tracker=name, error=error)

    def speak_if_silent(self) -> None:
        """On rank 0, while it waits for samples: log what is known without a step once there was none for a minute."""
        now = time.monotonic()
        since = None if self._pipeline is None else self._pipeline.feed.waiting_since
        if self._pipeline is None or since is None or now - max(self._last_sign, since) < self.speak_after_s:
            return
        self._last_sign = now
        self._pipeline.drain_metrics()
        values = self._window.reduce(known_without_a_step)
        self._count_epochs()
        if self.state.epoch is not None:
            values["epoch"] = self.state.epoch
        self._record(values, lambda found: self._narrator.window(found, now - since))
        super().log(values)  # type: ignore[misc]

    @property
    def diagnosis(self) -> str:
        """What the rewards seen so far say, in words."""
        return self._narrator.diagnosis(self._window.peek())

    def _print_completions(self) -> None:
        rows, self.completions = self.completions, []
        if self.args.log_completions:
            print_completions(rows, self.state.global_step, self.args.num_completions_to_print)

    def _reduce_window(self) -> dict[str, float]:
        """The window over all ranks; the same on each. Begins a new one."""
        merged = self._merged_window()
        self._window.reduce()
        return merged.reduce()

    def _merged_window(self) -> Window:
        """What is in the window by now, over all ranks; the same on each."""
        if self._pipeline is not None:
            self._pipeline.drain_metrics()
        states: list[Any] = [self._window.state()]
        if self._objects is not None:
            states = [None] * self.accelerator.num_processes
            dist.all_gather_object(states, self._window.state(), group=self._objects)
        merged = Window()
        for part in states:
            merged.merge(part)
        return merged
