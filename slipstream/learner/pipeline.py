"""Rank 0's half of the pipeline: the feed of samples and the ledger, whatever the samples come from."""

import logging
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.learner import checkpoint as ckpt
from slipstream.learner.feed import SampleFeed
from slipstream.learner.ledger import Ledger
from slipstream.learner.planner import Source
from slipstream.learner.sync import PolicySync
from slipstream.rollout.setup import Position

if TYPE_CHECKING:
    from slipstream.learner.trainer import AsyncGRPOTrainer

logger = logging.getLogger(__name__)

Resumed = tuple[ckpt.RolloutState, Path]


class Pipeline(ABC):
    """What the trainer needs on rank 0: a feed, a ledger, a way to deliver the policy, and the state to save.

    Args:
        trainer: whose settings, dataset and reporter are used.
        source: where groups come from.
        token_budget: most tokens of a row.
        resumed: the checkpoint's rollout state and path, or None.
    """

    def __init__(self, trainer: "AsyncGRPOTrainer", source: Source, token_budget: int, resumed: Resumed | None) -> None:
        config = trainer.args
        self._trainer = trainer
        self.token_budget = token_budget
        position, remainder = starting_point(resumed)
        self.ledger = Ledger(trainer.num_prompts, position, trainer.reporter.ledger, lambda: trainer.diagnosis)
        self.feed = SampleFeed(
            source,
            self.ledger,
            trainer._window,
            ranks=trainer.accelerator.num_processes,
            accumulation=config.gradient_accumulation_steps,
            token_budget=token_budget,
            max_staleness=config.max_staleness,
            warn=logger.warning,
            while_waiting=trainer.speak_if_silent,
        )
        self.ledger.restore(remainder)
        self.feed.hold(remainder)
        self._fingerprint = trainer.data_fingerprint

    @abstractmethod
    def make_sync(self, version: int) -> PolicySync:
        """The delivery of the policy, starting at `version`."""

    def start(self, version: int, step: int) -> None:
        """The model is ready; `step` optimizer steps are done."""
        self.set_version(version)
        self.ledger.start_at(step)

    def open(self) -> None:
        """The weights are delivered: generation may begin."""
        self.feed.open()

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Say which policy the server has now."""

    def drain_metrics(self) -> None:
        """Move what was measured elsewhere into the trainer's window."""

    def evaluate(self, request: int) -> dict[str, float]:
        """Metrics of one pass over the held-out prompts."""
        raise ValueError("this pipeline generates nothing, so it cannot evaluate")

    def loop_state(self) -> dict[str, Any]:
        """What the rollout loop wants kept in a checkpoint."""
        return {}

    def write_state(self, path: Path, step: int, version: int) -> None:
        """Write `rollout_state.json`, and the rest of the groups that the checkpoint splits."""
        trainer = self._trainer
        length = trainer.num_prompts
        position = self.ledger.position
        shuffle, seed = trainer._order
        epoch, prompt = divmod(position.first_unsettled, length or sys.maxsize)
        ckpt.RolloutState(
            step=step,
            epoch=epoch,
            prompt=prompt,
            settled_beyond=sorted(position.settled_beyond),
            model_version=version,
            attempt=trainer.args.attempt,
            dataset_fingerprint=self._fingerprint,
            dataset_length=length,
            shuffle=shuffle,
            seed=seed,
            rewards=trainer.reward_names,
            loop=f"{trainer.loop_cls.__module__}:{trainer.loop_cls.__qualname__}",
            loop_state=self.loop_state(),
        ).write(path)
        remainder = self.feed.held_of(self.ledger.partly_trained())
        if remainder:
            ckpt.save_samples(path / ckpt.REMAINDER_FILE, remainder)

    def close(self) -> None:
        """Stop what it started; the source must not block any more."""
        self.feed.close()


def starting_point(resumed: Resumed | None) -> tuple[Position, list[Any]]:
    """Where the data stands, and the samples that the checkpoint held back.

    An iterable dataset starts over, so what was held back comes again too.
    """
    if resumed is None or resumed[0].dataset_length is None:
        return Position(), []
    return resumed[0].position, ckpt.load_samples(resumed[1] / ckpt.REMAINDER_FILE)
