"""Which prompt comes next."""

import asyncio
import itertools
import threading

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout.prompts import DatasetFailed, EpochRejected, Prompt, RejectionWatch, prompts, read_prompts
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


def test_an_iterable_dataset_starts_over_for_each_epoch():
    found = list(prompts(Stream(3), setup(epochs=2)))
    assert [(p.number, p.epoch, p.position) for p in found] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 0, 2),
        (3, 1, 0),
        (4, 1, 1),
        (5, 1, 2),
    ]


def test_of_an_iterable_dataset_what_has_arrived_is_left_out_after_a_lost_process():
    found = list(prompts(Stream(3), setup(position=Position(2, frozenset({4})), epochs=2)))
    assert [(p.number, p.epoch, p.position) for p in found] == [(2, 0, 2), (3, 1, 0), (5, 1, 2)]


def test_an_epoch_that_is_not_seen_whole_is_not_judged():
    """The rest of it may be what the filter rejects; of the next one all is seen."""
    watch = RejectionWatch(last_settled=1)
    for prompt in prompts(Rows({"prompt": i} for i in range(3)), setup(position=Position(2), end=3)):
        watch.see(prompt, True)
    watch.check()
    for prompt in prompts(Rows({"prompt": i} for i in range(3)), setup(position=Position(3), end=6)):
        watch.see(prompt, True)
    with pytest.raises(EpochRejected, match="epoch 1"):
        watch.check()


def test_an_iterable_dataset_without_a_bound_never_ends():
    found = itertools.islice(prompts(Stream(2), setup()), 5)
    assert [p.epoch for p in found] == [0, 0, 1, 1, 2]


def test_an_iterable_dataset_that_gives_nothing_is_an_error():
    with pytest.raises(DatasetFailed, match=r"train_dataset \(Stream\) gave no prompt in epoch 0"):
        next(prompts(Stream(0), setup()))


def test_an_iterator_that_cannot_begin_again_is_an_error_in_the_second_epoch():
    once = iter([{"prompt": 0}])
    found = prompts(once, setup(epochs=2))
    assert next(found).epoch == 0
    with pytest.raises(DatasetFailed, match="gave no prompt in epoch 1: every iter"):
        next(found)


def test_after_a_resume_an_iterable_dataset_goes_on_with_the_epoch_that_was_not_over():
    found = list(prompts(Stream(2), setup(first_epoch=1, epochs=3)))
    assert [(p.number, p.epoch, p.position) for p in found] == [(0, 1, 0), (1, 1, 1), (2, 2, 0), (3, 2, 1)]
    assert list(prompts(Stream(2), setup(first_epoch=3, epochs=3))) == [], "the run had ended"


def test_a_shuffled_stream_draws_the_order_of_its_epoch_also_after_a_resume():
    rows = [{"prompt": i} for i in range(20)]
    stream = Dataset.from_list(rows).to_iterable_dataset().shuffle(seed=3, buffer_size=20)
    whole = [p.row["prompt"] for p in prompts(stream, setup(epochs=2))]
    assert sorted(whole[:20]) == sorted(whole[20:]) == list(range(20))
    assert whole[:20] != whole[20:]
    assert [p.row["prompt"] for p in prompts(stream, setup(first_epoch=1, epochs=2))] == whole[20:]


class Breaks(Stream):
    def __iter__(self):
        yield from super().__iter__()
        raise OSError("the disk is gone")


class BreaksIndexed(Rows):
    def __getitem__(self, index):
        raise OSError("the disk is gone")


def test_a_dataset_that_raises_is_named_with_the_place():
    found = prompts(Breaks(2), setup())
    assert [next(found).position for _ in range(2)] == [0, 1]
    with pytest.raises(DatasetFailed, match=r"\(Breaks\) raised at prompt 2 of epoch 0: OSError: the disk") as caught:
        next(found)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(DatasetFailed, match=r"\(BreaksIndexed\) raised at row 0: OSError"):
        next(prompts(BreaksIndexed([{}]), setup()))


@pytest.mark.parametrize("row", [{"question": "?"}, "text", None])
def test_a_row_without_a_prompt_is_named_with_the_place(row):
    with pytest.raises(DatasetFailed, match="without 'prompt' at prompt 0 of epoch 0"):
        next(prompts(iter([row]), setup()))


class Slow(Stream):
    """Its second prompt takes until the test says so."""

    def __init__(self):
        super().__init__(3)
        self.asked, self.go_on = threading.Event(), threading.Event()

    def __iter__(self):
        yield {"prompt": 0}
        self.asked.set()
        assert self.go_on.wait(60)
        yield {"prompt": 1}


def test_a_slow_stream_does_not_hold_up_the_event_loop():
    stream = Slow()

    async def read():
        found = []

        async def reader():
            async for prompt in read_prompts(stream, setup(epochs=1)):
                found.append(prompt.position)

        task = asyncio.create_task(reader())
        while not stream.asked.is_set():
            await asyncio.sleep(0.001)
        assert found == [0]  # we run while the dataset blocks its own thread
        stream.go_on.set()
        await asyncio.wait_for(task, 60)
        return found

    assert asyncio.run(read()) == [0, 1]


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
