"""Rank 0's samples and ledger: groups in, steps out, and what a checkpoint must keep of them."""

import hashlib
from collections import Counter
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

from slipstream.learner import checkpoint as ckpt
from slipstream.learner.ledger import Ledger
from slipstream.packing.sample import Sample
from slipstream.rollout.setup import Position
from slipstream.rollout.types import FAILED, FOREIGN, OVERSIZE_PROMPT, STALE, ZERO_STD, GroupResult
from slipstream.run_config import RunConfig
from slipstream.run_folder import LEDGER, RunFolder, append_jsonl
from slipstream.serving.labels import parse_label
from tests.doubles.outcomes import ALL_ALIKE, ONE_FAILED, WHOLE, fate, step_size

LOOP = "slipstream.rollout.loop:AsyncRolloutLoop"


def make_sample(number: int, version: int) -> Sample:
    """A sample of four trained tokens. `version` is that of its tokens."""
    from tests.samples import make_sample

    return make_sample([1], [1, 2, 3, 4], number=number, version=version)


class Book:
    """What rank 0 knows of the data.

    Args:
        checkpoint: complete one to go on from, or None.
    """

    def __init__(self, run: RunFolder, config: RunConfig, attempt: int, checkpoint: Path | None) -> None:
        self.run, self.config, self.attempt = run, config, attempt
        data = Path(config.data.source).read_bytes()
        self.length = len(data.splitlines())
        self.fingerprint = hashlib.sha256(data).hexdigest()
        trainer = config.trainer
        self.group = trainer.num_generations
        by_prompts = trainer.max_steps <= 0
        self.end = ceil(Fraction(str(trainer.num_train_epochs)) * self.length) if by_prompts else None
        self.step = self.version = 0
        self.held: list[Sample] = []
        position, state = Position(), None
        if checkpoint is not None:
            ckpt.verify(checkpoint)
            state = ckpt.RolloutState.read(checkpoint)
            state.check_same_data(self.fingerprint, self.length, False, trainer.seed)
            self.step, self.version, position = state.step, state.model_version, state.position
            self.held = ckpt.load_samples(checkpoint / ckpt.REMAINDER_FILE)
        self.ledger = Ledger(self.length, position, self._write)
        if state is not None:
            self.ledger.restore(self.held, state.history)
        self.ledger.start_at(self.step)
        self._arrived = {sample.number for sample in self.held}
        self._taken: list[Sample] = []

    def _write(self, line: dict[str, Any]) -> None:
        self._arrived.discard(line["number"])
        append_jsonl(self.run.records(self.attempt) / LEDGER, line)

    def position(self) -> dict[str, Any]:
        """Where generation (re)starts: what is neither settled nor held here."""
        position = self.ledger.position
        return {
            "first": position.first_unsettled,
            "known": sorted(position.settled_beyond | self._arrived),
            "end": self.end,
        }

    def arrived(self, message: dict[str, Any]) -> None:
        """A group of the rollout process; what becomes of its samples is a hash of its number."""
        number = int(message["number"])
        drawn = fate(number)
        version = parse_label(message["label"], self.run.run_id, self.attempt)
        dropped: Counter[str] = Counter()
        samples: list[Sample] = []
        if drawn == WHOLE:
            dropped[OVERSIZE_PROMPT] = 1
        elif drawn == ALL_ALIKE:
            dropped[ZERO_STD] = self.group
        elif version is None:
            dropped[FOREIGN] = self.group
        else:
            samples = [make_sample(number, version) for _ in range(self.group)]
            if drawn == ONE_FAILED:
                samples.pop()
                dropped[FAILED] = 1
        epoch, position = divmod(number, self.length)
        self._arrived.add(number)
        self.ledger.arrived(GroupResult(number, epoch, position, position, samples, dict(dropped)))
        self.held += samples

    def take(self, more_may_come: bool) -> bool:
        """Take the samples of the next step; False where they are not there yet. Drops what is too old."""
        oldest = self.version - self.config.trainer.max_staleness
        old = [sample for sample in self.held if sample.oldest_version < oldest]
        self.held = [sample for sample in self.held if sample.oldest_version >= oldest]
        for sample in old:
            self.ledger.dropped(sample, STALE)
        size = step_size(self.group)
        if len(self.held) < size and (more_may_come or not self.held):
            return False
        self._taken, self.held = self.held[:size], self.held[size:]
        versions: dict[int, list[int]] = {}
        for sample in self._taken:
            versions.setdefault(sample.number, []).append(sample.oldest_version)
        self.ledger.in_step(versions)
        return True

    def step_finished(self) -> None:
        self.ledger.step_finished()
        self.step += 1

    def write_state(self, path: Path) -> None:
        """`rollout_state.json`, and the rest of the groups that the checkpoint splits."""
        epoch, prompt = self.ledger.place
        history = self.ledger.history
        trainer = self.config.trainer
        ckpt.RolloutState(
            step=self.step,
            epoch=epoch,
            prompt=prompt,
            settled_beyond=sorted(self.ledger.position.settled_beyond),
            model_version=self.version,
            attempt=self.attempt,
            dataset_fingerprint=self.fingerprint,
            dataset_length=self.length,
            shuffle=False,
            seed=trainer.seed,
            rewards=["double_reward"],
            loop=LOOP,
            loop_state={},
            settings={"num_generations": self.group},
            outcomes={str(epoch): counts for epoch, counts in history.outcomes.items()},
            split={str(number): group for number, group in history.split.items()},
            ledger_step=self.ledger.last_step,
        ).write(path)
        split = self.ledger.partly_trained()
        if remainder := [sample for sample in self.held if sample.number in split]:
            ckpt.save_samples(path / ckpt.REMAINDER_FILE, remainder)
