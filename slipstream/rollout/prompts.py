"""Which prompt comes next. Pure, but for reading the dataset."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
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


class DatasetFailed(RuntimeError):
    """The dataset raised, or gave something that is no prompt; the message says where."""


class EpochRejected(RuntimeError):
    """`filter_prompt` rejected every prompt of an epoch."""


def prompts(dataset: Any, setup: LoopSetup) -> Iterator[Prompt]:
    """The prompts to generate for, in order, from where the run stands to the end of its data.

    A dataset with a length is visited in the order of `prompt_order`, without what is settled already. An iterable one
    cannot be repositioned: it starts with its first prompt, also after a resume, and once more for each epoch. Where a
    process takes the place of a lost one, it is read from there again, without what has arrived. Raises DatasetFailed.
    """
    return _indexed(dataset, setup) if hasattr(dataset, "__len__") else _streamed(dataset, setup)


async def read_prompts(dataset: Any, setup: LoopSetup) -> AsyncIterator[Prompt]:
    """`prompts`; what an iterable dataset does to make the next one does not hold up the event loop."""
    found = prompts(dataset, setup)
    if hasattr(dataset, "__len__"):
        for prompt in found:
            yield prompt
        return
    loop, reader = asyncio.get_running_loop(), ThreadPoolExecutor(1, "dataset")
    try:
        while (following := await loop.run_in_executor(reader, next, found, None)) is not None:
            yield following
    finally:
        reader.shutdown(wait=False, cancel_futures=True)


def _indexed(dataset: Any, setup: LoopSetup) -> Iterator[Prompt]:
    length = len(dataset)
    order, order_of = None, -1
    for number in setup.position.numbers(setup.end):
        epoch, position = divmod(number, length)
        if order is None or order_of != epoch:
            order, order_of = prompt_order(length, epoch, setup.seed, setup.shuffle), epoch
        row_index = int(order[position])
        try:
            row = dataset[row_index]
        except Exception as error:
            raise _failed(dataset, f"row {row_index}", error) from error
        yield Prompt(number, epoch, position, row_index, _checked(dataset, f"row {row_index}", row))


def _streamed(dataset: Any, setup: LoopSetup) -> Iterator[Prompt]:
    number = 0
    for epoch in itertools.count(setup.first_epoch) if setup.epochs is None else range(setup.first_epoch, setup.epochs):
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)  # a shuffled stream of the datasets library draws another order by it
        position = 0
        rows = iter(dataset)
        while True:
            where = f"prompt {position} of epoch {epoch}"
            try:
                row = next(rows)
            except StopIteration:
                break
            except Exception as error:
                raise _failed(dataset, where, error) from error
            if not setup.position.is_settled(number):
                yield Prompt(number, epoch, position, position, _checked(dataset, where, row))
            position += 1
            number += 1
        if position == 0:
            raise DatasetFailed(
                f"train_dataset ({type(dataset).__name__}) gave no prompt in epoch {epoch}: every iter(train_dataset) must "
                "begin again with the first prompt"
            )


def _failed(dataset: Any, where: str, error: Exception) -> DatasetFailed:
    return DatasetFailed(f"train_dataset ({type(dataset).__name__}) raised at {where}: {type(error).__name__}: {error}")


def _checked(dataset: Any, where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict) or "prompt" not in row:
        raise DatasetFailed(
            f"train_dataset ({type(dataset).__name__}) gave a row without 'prompt' at {where}: {row!r:.200}"
        )
    return row


class RejectionWatch:
    """Raises EpochRejected once a whole epoch was rejected by `filter_prompt`."""

    def __init__(self, last_settled: int = -1) -> None:
        """`last_settled`: the largest prompt number that was settled before; its epoch is not seen whole, and not judged."""
        self._last_settled = last_settled
        self._epoch = -1
        self._seen = self._rejected = 0

    def see(self, prompt: Prompt, rejected: bool) -> None:
        if prompt.number - prompt.position <= self._last_settled:
            return
        if prompt.epoch != self._epoch:
            self.check()
            self._epoch, self._seen, self._rejected = prompt.epoch, 0, 0
        self._seen += 1
        self._rejected += rejected

    def check(self) -> None:
        """Also to be called at the end of the data."""
        if self._seen and self._seen == self._rejected:
            raise EpochRejected(f"filter_prompt rejected every prompt of epoch {self._epoch}: nothing can be trained")
