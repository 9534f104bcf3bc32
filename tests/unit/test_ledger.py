"""Settling of prompts."""

import contextlib
import random
from collections import Counter

import pytest

from slipstream.learner.ledger import Ledger, NothingTrained
from slipstream.learner.plan import StepPlan
from slipstream.metrics.audit import check_lines
from slipstream.rollout.setup import Position
from slipstream.rollout.types import OVERSIZE, STALE, TRAINED, ZERO_STD
from tests.samples import make_result, make_sample


def group(number, count, length=10, dropped=None, version=0):
    samples = [make_sample([1], [2], number=number, version=version) for _ in range(count)]
    return samples, make_result(number, samples, length, dropped)


def versions(samples):
    """The oldest versions by prompt, as a plan has them."""
    return StepPlan([], samples).oldest_versions


def ledger(length=10, position=None):
    lines = []
    return Ledger(length, position or Position(), lines.append), lines


def test_a_prompt_is_settled_by_the_step_that_trains_its_last_sample():
    book, lines = ledger()
    samples, result = group(0, 3, version=4)
    samples[2].versions[:] = 6
    book.arrived(result)
    book.in_step(versions(samples[:2]))
    assert lines == [], "a step that has not finished settles nothing"
    book.step_finished()
    assert lines == []
    assert book.partly_trained() == {0}
    book.in_step(versions(samples[2:]))
    book.step_finished()
    assert lines == [
        {"number": 0, "epoch": 0, "prompt": 0, "row": 0, "outcomes": {TRAINED: 3}, "step": 2, "versions": [4, 6]}
    ]
    assert book.position == Position(1, frozenset())
    assert book.partly_trained() == set()


def test_a_dropped_group_is_settled_at_once_in_the_step_in_progress():
    book, lines = ledger()
    book.start_at(7)
    book.arrived(group(13, 0, dropped={ZERO_STD: 8})[1])
    assert [(line["epoch"], line["prompt"], line["outcomes"], line["step"]) for line in lines] == [
        (1, 3, {ZERO_STD: 8}, 8)
    ]
    assert book.position == Position(0, frozenset({13}))


def test_the_last_step_is_that_of_the_newest_line():
    """What is dropped while no further step comes has the number of a step that there never is."""
    book, lines = ledger()
    book.start_at(7)
    assert book.last_step == 7
    book.arrived(group(0, 0, dropped={ZERO_STD: 8})[1])
    assert book.last_step == lines[-1]["step"] == 8
    book.step_finished()
    book.step_finished()
    assert book.last_step == 9


def test_outcomes_of_one_prompt_add_up():
    book, lines = ledger()
    samples, result = group(0, 3, dropped={"failed": 1})
    book.arrived(result)
    book.dropped(samples[0], STALE)
    book.dropped(samples[1], OVERSIZE)
    assert book.partly_trained() == set()
    book.in_step(versions([samples[2]]))
    book.step_finished()
    assert lines[0]["outcomes"] == {"failed": 1, STALE: 1, OVERSIZE: 1, TRAINED: 1}


def test_the_position_moves_over_what_was_settled_beyond_it():
    book, _ = ledger(position=Position(3, frozenset({4, 6})))
    assert book.settled == 5
    book.arrived(group(3, 0, dropped={STALE: 1})[1])
    assert book.position == Position(5, frozenset({6}))
    assert list(book.position.numbers(9)) == [5, 7, 8]
    assert book.settled == 6


def test_a_restored_remainder_settles_its_prompt_and_survives_a_second_checkpoint():
    book, lines = ledger()
    samples, _ = group(2, 2)
    book.restore(samples)
    assert book.partly_trained() == {2}, "its other samples were trained before the resume"
    book.in_step(versions(samples[:1]))
    book.step_finished()
    assert (lines, book.partly_trained()) == ([], {2})
    book.dropped(samples[1], STALE)
    assert [line["number"] for line in lines] == [2]


def test_an_epoch_without_a_trained_sample_says_why():
    book, _ = ledger(length=2)
    book.arrived(group(0, 0, 2, {ZERO_STD: 4})[1])
    with pytest.raises(NothingTrained, match=r"epoch 0 .*zero_std: 4, stale: 3"):
        book.arrived(group(1, 0, 2, {STALE: 3})[1])


def test_one_trained_sample_in_the_epoch_is_enough():
    book, lines = ledger(length=2)
    samples, result = group(0, 1, 2)
    book.arrived(result)
    book.in_step(versions(samples))
    book.step_finished()
    book.arrived(group(1, 0, 2, {ZERO_STD: 4})[1])
    assert len(lines) == 2


@pytest.mark.parametrize("seed", range(150))
def test_any_interleaving_settles_each_prompt_exactly_once(seed):
    """Arrivals, drops and steps in random order; what an epoch without a trained sample raises is not the matter here."""
    draw = random.Random(seed)
    length, epochs = draw.randint(1, 4), draw.randint(1, 2)
    beyond = {n for n in range(1, length * epochs) if draw.random() < 0.2}
    start = Position(0, frozenset(beyond))
    book, lines = ledger(length, start)
    to_come = list(start.numbers(length * epochs))
    draw.shuffle(to_come)
    waiting, in_step, expected = [], [], Counter()
    while to_come or waiting or in_step:
        action = draw.choice(["arrive", "drop", "train", "finish"])
        if action == "arrive" and to_come:
            samples, result = group(
                to_come.pop(), draw.randint(1, 3), length, {ZERO_STD: 1} if draw.random() < 0.3 else None
            )
            expected.update(result.dropped)
            book.arrived(result)
            waiting += samples
        elif action == "drop" and waiting:
            expected[STALE] += 1
            with contextlib.suppress(NothingTrained):
                book.dropped(waiting.pop(draw.randrange(len(waiting))), STALE)
        elif action == "train" and waiting:
            in_step.append(waiting.pop(draw.randrange(len(waiting))))
            book.in_step(versions(in_step[-1:]))
        elif action == "finish":
            book.step_finished()
            expected[TRAINED] += len(in_step)
            in_step = []
        open_numbers = {s.number for s in waiting + in_step} | set(to_come)
        settled = set(range(length * epochs)) - open_numbers
        assert {line["number"] for line in lines} | beyond == settled
        first = next(n for n in range(length * epochs + 1) if n not in settled)
        assert book.position == Position(first, frozenset(n for n in settled if n > first))
    assert sum((Counter(line["outcomes"]) for line in lines), Counter()) == +expected
    assert check_lines([{"epoch": n // length, "prompt": n % length} for n in beyond] + lines, length, epochs) == []
