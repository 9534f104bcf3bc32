"""Which prompt comes next."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout.prompts import EpochRejected, Prompt, RejectionWatch, prompts
from slipstream.rollout.setup import LoopSetup, Position


def setup(**changes):
    fields = {"run_id": "r", "attempt": 1, "served_model": "m", "use_generate_route": True, "max_model_len": 8}
    return LoopSetup(**{**fields, "shuffle": False, **changes})


class Rows(list):
    """A dataset with a length."""


class Stream:
    """An iterable dataset: no length, and a fresh pass for each `iter`."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter({"prompt": i} for i in range(self.count))


@given(
    length=st.integers(1, 6),
    epochs=st.integers(1, 3),
    first=st.integers(0, 8),
    beyond=st.frozensets(st.integers(0, 17), max_size=6),
    shuffle=st.booleans(),
)
def test_every_prompt_that_is_not_settled_comes_once_per_epoch(length, epochs, first, beyond, shuffle):
    dataset = Rows({"prompt": i} for i in range(length))
    end = length * epochs
    found = list(prompts(dataset, setup(position=Position(first, beyond), end=end, shuffle=shuffle)))
    assert [p.number for p in found] == [n for n in range(first, end) if n not in beyond]
    for epoch in range(epochs):
        rows = [p.row_index for p in found if p.epoch == epoch]
        assert len(set(rows)) == len(rows)
    assert all(p.row == dataset[p.row_index] and divmod(p.number, length) == (p.epoch, p.position) for p in found)


def test_a_resume_sees_the_same_rows_as_an_uninterrupted_run():
    dataset = Rows({"prompt": i} for i in range(7))
    whole = list(prompts(dataset, setup(end=14, shuffle=True)))
    assert list(prompts(dataset, setup(position=Position(5), end=14, shuffle=True))) == whole[5:]


def test_an_iterable_dataset_starts_over_for_each_epoch_and_on_resume():
    stream = setup(position=Position(4, frozenset({6})), epochs=2)
    found = list(prompts(Stream(3), stream))
    assert [(p.number, p.epoch, p.position) for p in found] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 0, 2),
        (3, 1, 0),
        (4, 1, 1),
        (5, 1, 2),
    ]


def test_an_iterable_dataset_without_a_bound_never_ends():
    found = itertools.islice(prompts(Stream(2), setup()), 5)
    assert [p.epoch for p in found] == [0, 0, 1, 1, 2]


def test_an_iterable_dataset_that_gives_nothing_is_an_error():
    with pytest.raises(ValueError, match="no prompt in epoch 0"):
        next(prompts(Stream(0), setup()))


def test_an_epoch_rejected_as_a_whole_is_an_error_and_one_admitted_prompt_is_enough():
    def see(*rejections):
        watch = RejectionWatch()
        for number, rejected in enumerate(rejections):
            watch.see(Prompt(number, number // 2, number % 2, 0, {}), rejected)
        watch.check()

    see(True, False, False, True)
    with pytest.raises(EpochRejected, match="epoch 1"):
        see(False, True, True, True)
    with pytest.raises(EpochRejected, match="epoch 0"):
        see(True, True, False, False)
