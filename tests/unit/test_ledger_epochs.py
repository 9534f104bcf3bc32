"""Epochs of the ledger: when they are over, that one without a trained sample raises, and that a resume changes nothing."""

import json
import random
from typing import Any

import pytest

from slipstream.learner.ledger import History, Ledger, NothingTrained
from slipstream.learner.plan import StepPlan
from slipstream.rollout.setup import Position
from slipstream.rollout.types import STALE, TRAINED, ZERO_STD, GroupResult
from tests.samples import make_result, make_sample


def dropped(epoch: int, position: int, number: int, reason: str = ZERO_STD) -> GroupResult:
    return GroupResult(number, epoch, position, position, [], {reason: 2})


def train(book: Ledger, number: int, length: int, count: int = 1) -> None:
    samples = [make_sample([1], [2], number=number) for _ in range(count)]
    book.arrived(make_result(number, samples, length))
    book.in_step(StepPlan([], samples).oldest_versions)
    book.step_finished()


def resumed(book: Ledger, length: int | None, step: int, keeps: bool = True) -> Ledger:
    """The ledger of a new process that starts from what a checkpoint keeps of `book`."""
    kept = json.loads(json.dumps([book.history.outcomes, book.history.split]))
    history = History(*({int(key): value for key, value in part.items()} for part in kept))
    new = Ledger(length, book.position if length is not None else Position())
    new.restore([], history if keeps else None, 0 if length is not None else book.place[0])
    new.start_at(step)
    return new


def test_an_epoch_resumed_midway_and_dropped_as_a_whole_raises_at_its_end() -> None:
    book = Ledger(3, Position())
    for number in range(3):
        train(book, number, 3)
    book.arrived(dropped(1, 0, 3))
    new = resumed(book, 3, 3)
    new.arrived(dropped(1, 1, 4))
    with pytest.raises(NothingTrained, match=r"epoch 1 is over .*zero_std: 4, stale: 2"):
        new.arrived(dropped(1, 2, 5, STALE))


def test_what_was_settled_beyond_the_first_unsettled_prompt_counts_too() -> None:
    book = Ledger(2, Position())
    for number in range(2):
        train(book, number, 2)
    book.arrived(dropped(1, 1, 3))
    assert book.position.settled_beyond == {3}
    with pytest.raises(NothingTrained, match="epoch 1"):
        resumed(book, 2, 2).arrived(dropped(1, 0, 2))


def test_what_was_trained_before_the_resume_is_enough() -> None:
    book = Ledger(2, Position())
    train(book, 0, 2)
    new = resumed(book, 2, 1)
    new.arrived(dropped(0, 1, 1))
    new.arrived(dropped(1, 0, 2))
    with pytest.raises(NothingTrained, match="epoch 1"):
        new.arrived(dropped(1, 1, 3))


def test_a_trained_sample_of_a_split_group_is_enough() -> None:
    book = Ledger(2, Position())
    samples = [make_sample([1], [2], number=0, version=v) for v in (3, 4)]
    lines: list[dict[str, Any]] = []
    book.arrived(make_result(0, samples, 2, {"failed": 1}))
    book.arrived(dropped(0, 1, 1))
    book.in_step(StepPlan([], samples[:1]).oldest_versions)
    book.step_finished()
    new = Ledger(2, book.position, lines.append)
    new.restore(samples[1:], book.history)
    new.start_at(1)
    new.dropped(samples[1], STALE)
    outcomes = {"failed": 1, TRAINED: 1, STALE: 1}
    assert lines == [
        {"number": 0, "epoch": 0, "prompt": 0, "row": 0, "outcomes": outcomes, "step": 2, "versions": [3, 3]}
    ], "the line is that of the whole group"


def test_a_checkpoint_without_history_never_raises_for_the_epochs_that_it_had_begun() -> None:
    book = Ledger(2, Position())
    train(book, 0, 2)
    new = resumed(book, 2, 1, keeps=False)
    new.arrived(dropped(0, 1, 1))
    new.arrived(dropped(1, 0, 2))
    with pytest.raises(NothingTrained, match="epoch 1"):
        new.arrived(dropped(1, 1, 3))


def test_without_a_length_an_epoch_is_over_once_the_next_has_begun() -> None:
    book = Ledger(None, Position())
    train(book, 0, 100)
    book.arrived(dropped(0, 1, 1))
    book.arrived(dropped(1, 0, 2))
    assert book.place == (1, 1)
    book.arrived(dropped(1, 1, 3))
    with pytest.raises(NothingTrained, match="epoch 1"):
        book.arrived(dropped(2, 0, 4))


def test_without_a_length_groups_still_under_way_keep_their_epoch_open() -> None:
    book = Ledger(None, Position())
    book.arrived(dropped(0, 0, 0))
    book.arrived(dropped(1, 0, 2))
    assert book.place[0] == 0
    with pytest.raises(NothingTrained, match="epoch 0"):
        book.arrived(dropped(0, 1, 1))


def test_without_a_length_the_end_of_the_data_ends_the_last_epoch() -> None:
    book = Ledger(None, Position())
    train(book, 0, 100)
    book.arrived(dropped(1, 0, 1))
    with pytest.raises(NothingTrained, match="epoch 1"):
        book.data_ended()
    book = Ledger(None, Position())
    train(book, 0, 100)
    book.data_ended()
    assert book.place == (1, 0), "a resume has no pass left"


def test_without_a_length_a_resumed_epoch_remembers_what_was_trained() -> None:
    book = Ledger(None, Position())
    train(book, 0, 100)
    book.arrived(dropped(1, 0, 1))
    train(book, 2, 2)  # epoch 1, prompt 0 again: its number only has to be new
    new = resumed(book, None, 2)
    assert new.place[0] == 1
    new.arrived(dropped(1, 0, 0))
    new.arrived(dropped(2, 0, 1))
    with pytest.raises(NothingTrained, match="epoch 2"):
        new.arrived(dropped(3, 0, 2))


def test_less_than_an_epoch_without_a_trained_sample_raises_at_the_end_of_the_data() -> None:
    book = Ledger(4, Position(), diagnose=lambda: "all rewards are 0")
    book.arrived(dropped(0, 0, 0))
    book.arrived(dropped(0, 1, 1))
    with pytest.raises(NothingTrained, match=r"the data is over .*zero_std: 4(.|\n)*all rewards are 0"):
        book.data_ended()
    book = resumed(book, 4, 1)
    book.data_ended()


@pytest.mark.parametrize("seed", range(100))
def test_stopped_anywhere_and_resumed_it_raises_where_an_uninterrupted_one_does(seed: int) -> None:
    draw = random.Random(seed)
    length, epochs = draw.randint(1, 4), 3
    order = list(range(length * epochs))
    for i in range(len(order) - 1):  # nearly in order, as groups arrive
        if draw.random() < 0.3:
            order[i], order[i + 1] = order[i + 1], order[i]
    trained = {number for number in order if draw.random() < 0.3}
    stop = draw.randint(1, len(order))

    def run(book: Ledger, numbers: list[int]) -> str:
        for number in numbers:
            try:
                if number in trained:
                    train(book, number, length)
                else:
                    book.arrived(dropped(*divmod(number, length), number))
            except NothingTrained as error:
                return f"{number}: {error}"
        return ""

    expected = run(Ledger(length, Position()), order)
    first = Ledger(length, Position())
    found = run(first, order[:stop]) or run(resumed(first, length, 1), order[stop:])
    assert found == expected
