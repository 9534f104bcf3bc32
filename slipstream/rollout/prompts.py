"""Which prompt comes next. Pure, but for reading the dataset."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slipstream.data import prompt_order
from slipstream.rollout.setup import LoopSetup


@dataclass(frozen=True)
class Prompt:
    """One prompt of one epoch. `number` counts prompts over all epochs; `row_index` is its place in the dataset."""

    number: int
    epoch: int
    position: int
    row_index: int
    row: dict[str, Any]


class EpochRejected(RuntimeError):
    """`filter_prompt` rejected every prompt of an epoch."""


def prompts(dataset: Any, setup: LoopSetup) -> Iterator[Prompt]:
    """The prompts to generate for, in order, from where the run stands to the end of its data.

    A dataset with a length is visited in the order of `prompt_order`, without what is settled already. An iterable one
    cannot be repositioned: it starts with its first prompt, also after a resume, and once more for each epoch.
    """
    return _indexed(dataset, setup) if hasattr(dataset, "__len__") else _streamed(dataset, setup)


def _indexed(dataset: Any, setup: LoopSetup) -> Iterator[Prompt]:
    length = len(dataset)
    order, order_of = None, -1
    for number in setup.position.numbers(setup.end):
        epoch, position = divmod(number, length)
        if order is None or order_of != epoch:
            order, order_of = prompt_order(length, epoch, setup.seed, setup.shuffle), epoch
        row_index = int(order[position])
        yield Prompt(number, epoch, position, row_index, dataset[row_index])


def _streamed(dataset: Any, setup: LoopSetup) -> Iterator[Prompt]:
    number = 0
    for epoch in itertools.count() if setup.epochs is None else range(setup.epochs):
        before = number
        for position, row in enumerate(dataset):
            yield Prompt(number, epoch, position, position, row)
            number += 1
        if number == before:
            raise ValueError(f"the iterable dataset gave no prompt in epoch {epoch}")


class RejectionWatch:
    """Raises EpochRejected once a whole epoch was rejected by `filter_prompt`."""

    def __init__(self) -> None:
        self._epoch = -1
        self._seen = self._rejected = 0

    def see(self, prompt: Prompt, rejected: bool) -> None:
        if prompt.epoch != self._epoch:
            self.check()
            self._epoch, self._seen, self._rejected = prompt.epoch, 0, 0
        self._seen += 1
        self._rejected += rejected

    def check(self) -> None:
        """Also to be called at the end of the data."""
        if self._seen and self._seen == self._rejected:
            raise EpochRejected(f"filter_prompt rejected every prompt of epoch {self._epoch}: nothing can be trained")
