"""Rows as prefix tries."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.packing.sample import EMPTY
from slipstream.packing.trie import ROOT, attention_mask, new_nodes, pack, segments, sorted_order
from tests.samples import make_sample

P1, P2, P3, A1, A2, B1, B2 = 11, 12, 13, 21, 22, 31, 32

sequences = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=7), min_size=1, max_size=6)


def samples_of(tokens):
    return [make_sample(ids[:1], ids[1:], advantage=float(i)) for i, ids in enumerate(tokens)]


def brute_force_nodes(tokens):
    """Distinct (path to a token, next token), and a leaf of its own for each sample."""
    inner = {tuple(ids[: i + 2]) for ids in tokens for i in range(len(ids) - 1)}
    return len(inner) + len(tokens)


def path(row, node):
    """Nodes from the root to `node`."""
    found = [node]
    while row.parent[found[0]] != ROOT:
        found.insert(0, int(row.parent[found[0]]))
    return found


def test_two_answers_to_one_prompt():
    row = pack([make_sample([P1, P2, P3], [A1, A2]), make_sample([P1, P2, P3], [B1, B2], advantage=-1.0)])
    assert row.num_tokens == 8
    assert row.input_ids.tolist() == [P1, P2, P3, A1, A2, P3, B1, B2]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3, 4]
    assert row.parent.tolist() == [ROOT, 0, 1, 2, 3, 1, 5, 6]
    assert row.predict.tolist() == [2, 3, 5, 6]
    assert row.target.tolist() == [A1, A2, B1, B2]
    assert row.sample.tolist() == [0, 0, 1, 1]
    assert row.advantage.tolist() == [1, 1, -1, -1]
    assert (row.raw_tokens, row.num_samples, row.num_terms) == (10, 2, 4)
    assert segments(row.parent) == [(0, 5), (5, 8)]


def test_the_mask_of_two_answers_to_one_prompt():
    row = pack([make_sample([P1, P2, P3], [A1, A2]), make_sample([P1, P2, P3], [B1, B2])])
    sees = {0: [0], 1: [0, 1], 2: [0, 1, 2], 3: [0, 1, 2, 3], 4: [0, 1, 2, 3, 4]}
    sees |= {5: [0, 1, 5], 6: [0, 1, 5, 6], 7: [0, 1, 5, 6, 7]}
    mask = attention_mask(row.parent)
    assert {i: np.flatnonzero(mask[i]).tolist() for i in range(8)} == sees


def test_the_loss_terms_keep_the_order_of_the_samples():
    """The layout is sorted by tokens; terms and owners follow the order in which the samples were given."""
    row = pack([make_sample([5], [9, 9], advantage=2.0), make_sample([5], [1], advantage=3.0)])
    assert row.target.tolist() == [9, 9, 1]
    assert row.advantage.tolist() == [2, 2, 3]
    assert row.sample.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("tokens", "count"),
    [
        ([[1, 2, 3], [1, 2, 3]], 4),  # twins share all but their leaf
        ([[1, 2], [1, 2, 3]], 4),  # a sample that begins another ends on its own leaf
        ([[1, 2], [3, 4]], 4),  # nothing shared is plain packing
        ([[1, 2], [1, 3]], 4),  # the branch itself costs the last common token again
    ],
)
def test_node_counts_by_hand(tokens, count):
    assert pack(samples_of(tokens)).num_tokens == count


@settings(max_examples=60, deadline=None)
@given(sequences)
def test_a_row_against_brute_force(tokens):
    samples = samples_of(tokens)
    row = pack(samples)
    assert row.num_tokens == brute_force_nodes(tokens)
    order = sorted_order([s.input_ids for s in samples])
    assert sum(new_nodes([samples[i].input_ids for i in order])) == row.num_tokens

    mask = attention_mask(row.parent)
    at = 0
    leaves = set()
    for index, ids in enumerate(tokens):
        for k in range(1, len(ids)):
            nodes = path(row, int(row.predict[at]))
            assert row.input_ids[nodes].tolist() == ids[:k]  # what the term sees is its own sample's prefix
            assert row.position_ids[nodes].tolist() == list(range(k))
            assert np.flatnonzero(mask[nodes[-1]]).tolist() == nodes
            assert (row.target[at], row.sample[at]) == (ids[k], index)
            at += 1
        # the last token: a child of the last term's node that belongs to this sample alone
        leaves |= {n for n in np.flatnonzero(row.parent == nodes[-1]).tolist() if n not in row.parent}
    assert at == row.num_terms
    assert len(leaves) == len(tokens)


def test_heads_of_different_width_are_padded():
    wide, narrow = make_sample([1], [2, 3]), make_sample([1], [4])
    wide.head_ids, wide.head_logprobs = np.array([[2, 3], [3, 2]], np.int32), np.full((2, 2), -1, np.float32)
    narrow.head_ids, narrow.head_logprobs = np.array([[4]], np.int32), np.full((1, 1), -2, np.float32)
    row = pack([wide, narrow])
    assert row.head_ids.tolist() == [[2, 3], [3, 2], [4, EMPTY]]
    assert row.head_logq.tolist() == [[-1, -1], [-1, -1], [-2, 0]]


def test_no_samples_make_a_filler_of_one_token_without_terms():
    row = pack([])
    assert (row.num_tokens, row.num_terms, row.num_samples, row.raw_tokens) == (1, 0, 0, 0)
    assert attention_mask(row.parent).tolist() == [[True]]
