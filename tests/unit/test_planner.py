"""Placement of samples into rows, as properties."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.packing.planner import MicroBatch, oversize
from slipstream.packing.trie import pack
from tests.samples import make_sample


@st.composite
def streams(draw):
    """(groups, ranks, budget): groups of answers to prompts of different lengths, each of which fits a row."""
    budget = draw(st.integers(4, 40))
    groups = []
    for number in range(draw(st.integers(1, 8))):
        prompt = [100 + number, *[1] * draw(st.integers(0, max(budget // 2 - 2, 0)))]
        longest = budget - len(prompt)
        answers = draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=longest), min_size=1, max_size=5))
        groups.append([make_sample(prompt, answer, number=number) for answer in answers])
    return groups, draw(st.integers(1, 4)), budget


def identities(samples):
    return [id(sample) for sample in samples]


def plan(groups, ranks, budget):
    """All micro-batches of a stream, as the feed makes them: a rest opens the next one."""
    batches, current = [], MicroBatch(ranks, budget)
    for group in groups:
        rest = current.offer(group)
        while rest:
            batches.append(current)
            current = MicroBatch(ranks, budget)
            before = len(rest)
            rest = current.offer(rest)
            assert len(rest) < before, "a fresh micro-batch takes at least one sample"
    return [*batches, current]


@settings(max_examples=40, deadline=None)
@given(streams(), st.booleans())
def test_no_sample_is_lost_or_doubled_and_the_budget_holds(stream, spread):
    groups, ranks, budget = stream
    batches = plan(groups, ranks, budget)
    for batch in batches:
        if spread:
            batch.spread()
        assert len(batch.rows) == ranks
        for samples, row in zip(batch.rows, batch.pack(), strict=True):
            assert repr(row) == repr(pack(samples)), "the order that the planner knows is the one that pack would find"
            assert row.num_tokens <= budget
            assert row.num_terms <= budget
    placed = [sample for batch in batches for samples in batch.rows for sample in samples]
    assert sorted(identities(placed)) == sorted(identities(s for group in groups for s in group))
    assert sum(len(batch) for batch in batches) == len(placed)


@settings(max_examples=40, deadline=None)
@given(streams())
def test_after_spreading_no_row_is_empty_while_another_has_two(stream):
    groups, ranks, budget = stream
    for batch in plan(groups, ranks, budget):
        batch.spread()
        sizes = [len(samples) for samples in batch.rows]
        assert min(sizes) > 0 or max(sizes) <= 1


@settings(max_examples=40, deadline=None)
@given(streams())
def test_groups_come_in_order(stream):
    """No sample of a later group is in an earlier micro-batch than one of an earlier group."""
    groups, ranks, budget = stream
    numbers = [sorted({s.number for samples in b.rows for s in samples}) for b in plan(groups, ranks, budget)]
    for before, after in pairwise(numbers):
        if before and after:
            assert before[-1] <= after[0]


@settings(max_examples=40, deadline=None)
@given(streams())
def test_a_group_stays_together_where_a_row_has_room(stream):
    groups, ranks, budget = stream
    batch = MicroBatch(ranks, budget)
    for group in groups:
        used = [(pack(samples).num_tokens if samples else 0) for samples in batch.rows]
        terms = [sum(s.num_trained for s in samples) for samples in batch.rows]
        mine = pack(group)
        fits = [
            t + mine.num_tokens <= budget and n + mine.num_terms <= budget for t, n in zip(used, terms, strict=True)
        ]
        rest = batch.offer(group)
        holders = [samples for samples in batch.rows if {*identities(samples)} & {*identities(group)}]
        if any(fits):
            assert not rest
            assert len(holders) == 1
        if rest:
            break


def test_a_row_bounds_terms_too():
    """Twelve answers that share everything but the leaf: 3 + 11 tokens, but 24 terms."""
    batch = MicroBatch(1, 20)
    twins = [make_sample([1], [2, 3]) for _ in range(12)]
    rest = batch.offer(twins)
    assert (len(batch), len(rest)) == (10, 2)


def test_a_group_larger_than_a_row_fills_the_empty_rows():
    group = [make_sample([1], [k] * 5) for k in range(2, 8)]
    batch = MicroBatch(2, 12)
    rest = batch.offer(group)
    assert [len(samples) for samples in batch.rows] == [2, 2]
    assert len(rest) == 2


def test_the_next_group_goes_to_the_cheapest_row():
    batch = MicroBatch(2, 30)
    long, short, third = make_sample([1], [2] * 20), make_sample([3], [4] * 5), make_sample([5], [6] * 3)
    for sample in (long, short, third):
        assert batch.offer([sample]) == []
    assert [identities(samples) for samples in batch.rows] == [[id(long)], [id(short), id(third)]]


def test_imbalance_is_the_costliest_row_over_the_mean():
    batch = MicroBatch(2, 30)
    batch.offer([make_sample([1], [2] * 3)])
    assert batch.imbalance() == pytest.approx(2.0)  # the other row is empty
    batch.offer([make_sample([3], [4] * 3)])
    assert batch.imbalance() == pytest.approx(1.0)


@pytest.mark.parametrize(("length", "expected"), [(8, False), (9, True)])
def test_oversize_is_what_fits_no_row(length, expected):
    assert oversize(make_sample([1], [2] * (length - 1)), 8) is expected
