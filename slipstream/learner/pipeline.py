"""Rank 0's half of the pipeline: the feed of samples and the ledger, whatever the samples come from."""

import logging
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.learner import checkpoint as ckpt
from slipstream.learner.duration import changed_settings, nothing_left
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
            while_waiting=trainer.while_waiting,
        )
        if resumed is not None:
            first_epoch = resumed[0].epoch if trainer.num_prompts is None else 0
            self.ledger.restore(remainder, resumed[0].history, first_epoch)
            self._explain(*resumed)
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
        """The weights are delivered: generation may begin, if there is a step left."""
        if self._trainer.state.global_step < self._trainer.duration.max_steps:
            self.feed.open()

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Say which policy the server has now."""

    def server_moved(self) -> bool:
        """Whether another server counts than the one that was delivered to last."""
        return False

    def server_absent(self) -> bool:
        """Whether the server has gone, and no other is there yet. Raises ServerGone once that has lasted too long."""
        return False

    def drain_metrics(self) -> None:
        """Move what was measured elsewhere into the trainer's window."""

    def evaluate(self, request: int) -> dict[str, float]:
        """Metrics of one pass over the held-out prompts."""
        raise ValueError("this pipeline generates nothing, so it cannot evaluate")

    def loop_state(self) -> dict[str, Any]:
        """What the rollout loop wants kept in a checkpoint."""
        return {}

    def _settings(self) -> dict[str, Any]:
        """What a resume may change, but says so."""
        config = self._trainer.args
        names = ["num_train_epochs", "learning_rate", "weight_decay", "num_generations", "max_staleness"]
        names += ["weight_sync_steps", "gradient_accumulation_steps"]
        return {
            "max_steps": self._trainer.duration.known_steps or -1,
            "lr_scheduler_type": str(getattr(config.lr_scheduler_type, "value", config.lr_scheduler_type)),
            **{name: getattr(config, name) for name in names},
            "token_budget": self.token_budget,
            "ranks": self._trainer.accelerator.num_processes,
        }

    def _explain(self, state: ckpt.RolloutState, path: Path) -> None:
        """Say what is different from the run that made the checkpoint."""
        trainer = self._trainer
        before = {"rewards": state.rewards, "loop": state.loop, **state.settings}
        now = {"rewards": trainer.reward_names, "loop": loop_name(trainer.loop_cls), **self._settings()}
        notes = changed_settings(before, now, state.step)
        if left := nothing_left(trainer.duration, state.step, state.position.first_unsettled, state.epoch):
            notes.append(left)
        elif trainer.num_prompts is None:
            notes.append(
                f"an iterable dataset cannot be repositioned: epoch {state.epoch} starts again with its first prompt, "
                f"though {state.prompt + len(state.settled_beyond)} of its prompts were settled"
            )
        for note in notes:
            logger.warning("resumed from step %d: %s", state.step, note)
        trainer.reporter.event("resumed", state.step, checkpoint=str(path), changed="; ".join(notes) or "nothing")

    def group_tokens(self) -> float | None:
        """Mean size of the newest groups, in tokens; None before the first."""
        return None

    def write_state(self, path: Path, step: int, version: int) -> None:
        """Write `rollout_state.json`, and the rest of the groups that the checkpoint splits."""
        trainer = self._trainer
        length = trainer.num_prompts
        position = self.ledger.position
        shuffle, seed = trainer._order
        epoch, prompt = self.ledger.place
        history = self.ledger.history
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
            loop=loop_name(trainer.loop_cls),
            loop_state=self.loop_state(),
            settings=self._settings(),
            outcomes={str(epoch): counts for epoch, counts in history.outcomes.items()},
            split={str(number): group for number, group in history.split.items()},
            group_tokens=self.group_tokens(),
            ledger_step=self.ledger.last_step,
        ).write(path)
        remainder = self.feed.held_of(self.ledger.partly_trained())
        if remainder:
            ckpt.save_samples(path / ckpt.REMAINDER_FILE, remainder)

    def close(self) -> None:
        """Stop what it started; the source must not block any more."""
        self.feed.close()


def loop_name(loop_cls: type) -> str:
    return f"{loop_cls.__module__}:{loop_cls.__qualname__}"


def starting_point(resumed: Resumed | None) -> tuple[Position, list[Any]]:
    """Where the data stands, and the samples that the checkpoint held back.

    An iterable dataset starts over with its first prompt, so what was held back comes again too.
    """
    if resumed is None or resumed[0].dataset_length is None:
        return Position(), []
    return resumed[0].position, ckpt.load_samples(resumed[1] / ckpt.REMAINDER_FILE)
