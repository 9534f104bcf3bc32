"""Planning and packing on whole arrays against a slow implementation with one dictionary entry per node."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.packing.planner import MicroBatch
from slipstream.packing.prefix_index import PrefixIndex
from slipstream.packing.sample import EMPTY, NOT_GENERATED, Sample
from slipstream.packing.trie import ROOT, common_prefixes, pack, sort_sequences

TOKENS = st.sampled_from([0, 1, 2, 300, 70_000])
quick = settings(max_examples=40, deadline=None)


def sample_of(ids, trained, seed=0, head=0, number=0):
    """A sample with made-up numbers; its first token is never trained."""
    rng = np.random.default_rng([seed, len(ids)])
    trained = np.array([False, *trained[1:]])
    terms = int(trained.sum())
    return Sample(
        input_ids=np.array(ids, np.int32),
        trained=trained,
        logprobs=np.where(trained, rng.normal(size=len(ids)), 0).astype(np.float32),
        versions=np.where(trained, 0, NOT_GENERATED).astype(np.int32),
        head_ids=rng.integers(0, 9, (terms, head)).astype(np.int32),
        head_logprobs=rng.normal(size=(terms, head)).astype(np.float32),
        advantage=float(np.float32(rng.normal())),
        number=number,
    )


@st.composite
def masks(draw, length):
    """All after a prompt, several turns with untrained stretches between them, or anything."""
    kind = draw(st.sampled_from(["completion", "turns", "any"]))
    if kind == "completion":
        prompt = draw(st.integers(1, length))
        return [i >= prompt for i in range(length)]
    if kind == "turns":
        edges = sorted(draw(st.lists(st.integers(1, length), min_size=2, max_size=6)))
        return [sum(edge <= i for edge in edges) % 2 == 1 for i in range(length)]
    return draw(st.lists(st.booleans(), min_size=length, max_size=length))


@st.composite
def grown(draw, system, size):
    """Samples of one group: over one prompt, with duplicates, prefixes of each other and later turns among them."""
    prompt = [*system, *draw(st.lists(TOKENS, max_size=4))]
    found = []
    for _ in range(draw(st.integers(1, size))):
        base, kept = prompt, len(prompt)
        if found and draw(st.booleans()):
            base = draw(st.sampled_from(found))
            kept = draw(st.integers(0, len(base)))
        found.append([*base[:kept], *draw(st.lists(TOKENS, min_size=0 if kept else 1, max_size=5))])
    return found


@st.composite
def forests(draw, groups=4):
    """Groups of samples, some with a common system prompt; among them samples of one token and without any term."""
    system = draw(st.lists(TOKENS, max_size=4))
    made = []
    for number in range(draw(st.integers(1, groups))):
        sequences = draw(grown(system if draw(st.booleans()) else [], 5))
        head = draw(st.integers(0, 2))
        made.append(
            [
                sample_of(ids, draw(masks(len(ids))), draw(st.integers(0, 9)), head, number)
                for ids in draw(st.permutations(sequences))
            ]
        )
    return made


def node_keys(samples):
    """The node of each token of each sample: (prefix, next token), the last a leaf of the sample's own."""
    return [
        [(tuple(s.input_ids[: i + 1].tolist()), int(s.input_ids[i + 1])) for i in range(len(s) - 1)]
        + [(tuple(s.input_ids.tolist()), f"leaf of {index}")]
        for index, s in enumerate(samples)
    ]


def count_nodes(samples):
    return len({key for keys in node_keys(samples) for key in keys})


def attention_cost(samples):
    """Each node attends to the nodes on its path, itself among them."""
    return sum(len(prefix) for prefix, _ in {key for keys in node_keys(samples) for key in keys})


def path_to(row, node):
    nodes = [node]
    while row.parent[nodes[0]] != ROOT:
        nodes.insert(0, int(row.parent[nodes[0]]))
    return nodes


def slow_terms(samples):
    """(prefix, target, log-probability, advantage, owner, head) of each trained token, in the order of the samples."""
    terms = []
    for index, sample in enumerate(samples):
        for nth, at in enumerate(np.flatnonzero(sample.trained)):
            ids = sample.input_ids[:at].tolist()
            head = list(zip(sample.head_ids[nth].tolist(), sample.head_logprobs[nth].tolist(), strict=True))
            terms.append((ids, sample.input_ids[at], sample.logprobs[at], sample.advantage, index, head))
    return terms


def check_row(samples):
    row = pack(samples)
    keys = node_keys(samples)
    assert row.num_tokens == count_nodes(samples)
    assert (row.num_samples, row.raw_tokens) == (len(samples), sum(map(len, samples)))
    paths = [path_to(row, node) for node in range(row.num_tokens)]
    tokens = [tuple(row.input_ids[path].tolist()) for path in paths]
    assert sorted(tokens) == sorted(prefix for prefix, _ in {key for each in keys for key in each})
    assert row.position_ids.tolist() == [len(path) - 1 for path in paths]

    # depth first: what lies below a node follows it without a gap
    below = defaultdict(list)
    for path in paths:
        for node in path:
            below[node].append(path[-1])
    assert all(nodes == list(range(node, node + len(nodes))) for node, nodes in below.items())

    # every sample has a path with its own leaf, and its terms are predicted on it
    leaves = [node for node in range(row.num_tokens) if node not in row.parent]
    assert len(leaves) == len(samples)
    assert sorted(tokens[leaf] for leaf in leaves) == sorted(tuple(s.input_ids.tolist()) for s in samples)
    expected = slow_terms(samples)
    assert row.num_terms == len(expected)
    label = {}
    for at, (ids, target, logq, advantage, owner, head) in enumerate(expected):
        node = int(row.predict[at])
        assert list(tokens[node]) == ids
        assert label.setdefault(node, target) == target, "one label for each position"
        assert node not in leaves
        assert (row.target[at], row.logq[at], row.advantage[at], row.sample[at]) == (target, logq, advantage, owner)
        found = zip(row.head_ids[at].tolist(), row.head_logq[at].tolist(), strict=True)
        assert [entry for entry in found if entry[0] != EMPTY] == head

    check_segments(row, paths)


def check_segments(row, paths):
    starts, ends = row.segment_start.tolist(), row.segment_end.tolist()
    assert starts == [0, *ends[:-1]]
    assert ends[-1] == row.num_tokens
    children = defaultdict(list)
    for node, parent in enumerate(row.parent.tolist()):
        children[parent].append(node)
    # a segment begins at a root and behind each branch, nowhere else
    begins = {node for parent, nodes in children.items() for node in nodes if parent == ROOT or len(nodes) > 1}
    assert set(starts) == begins
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        above, nodes = int(row.segment_parent[i]), []
        while above != ROOT:
            nodes = [*range(starts[above], ends[above]), *nodes]
            above = int(row.segment_parent[above])
        for node in range(start, end):
            assert [*nodes, *range(start, node + 1)] == paths[node]


@quick
@given(forests())
def test_a_row_equals_the_slow_trie(groups):
    check_row([sample for group in groups for sample in group])


def test_term_predictors_deep_in_runs_of_others():
    """Each sample branches off the one before, so that the last one's path crosses every run."""
    turns = [[1, 2, 3, 4], [1, 2, 3, 9, 4], [1, 2, 3, 9, 9, 4], [1, 2, 3, 9, 9, 9, 4], [1, 2, 3, 9, 9, 9, 9]]
    check_row([sample_of(ids, [True] * len(ids), seed) for seed, ids in enumerate(turns)])


def test_token_ids_of_several_bytes_are_not_mistaken_for_each_other():
    ids = [[1, 256, 1], [1, 1, 256], [1, 256, 65536], [256, 1, 1], [1, 256]]
    check_row([sample_of(each, [True] * len(each), seed) for seed, each in enumerate(ids)])


def test_a_sample_without_tokens_is_refused():
    with pytest.raises(ValueError, match="without tokens"):
        pack([sample_of([1, 2], [False, True]), sample_of([], [])])


def slow_common(a, b):
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    return common


@quick
@given(st.lists(st.lists(TOKENS, min_size=1, max_size=8), min_size=1, max_size=8))
def test_common_prefixes_of_neighbours(lists):
    arrays = [np.array(ids, np.int32) for ids in lists]
    assert common_prefixes(arrays) == [0, *(slow_common(a, b) for a, b in pairwise(lists))]
    trie = sort_sequences(arrays)
    ordered = [lists[i] for i in trie.order]
    assert [array.tolist() for array in trie.sequences] == ordered
    # in sorted order the neighbour before has the longest common prefix of all before
    longest = [max((slow_common(ids, other) for other in ordered[:i]), default=0) for i, ids in enumerate(ordered)]
    assert trie.common.tolist() == longest


@quick
@given(forests(groups=8), st.integers(1, 4), st.randoms(use_true_random=False))
def test_what_a_group_shares_with_each_row(groups, rows, random):
    index, held = PrefixIndex(rows), [[] for _ in range(rows)]
    for group in groups:
        trie = sort_sequences([sample.input_ids for sample in group])
        gaps = index.locate(trie)
        found = np.broadcast_to(index.shared(trie, gaps), (len(group), rows))
        for i, ids in enumerate(trie.sequences):
            for row in range(rows):
                expected = max((slow_common(ids, other) - 1 for other in held[row]), default=0)
                assert found[i, row] == max(expected, 0)
        row = random.randrange(rows)
        index.insert(trie, gaps, row)
        held[row] += trie.sequences


@quick
@given(forests(groups=8), st.integers(1, 4), st.integers(0, 12), st.booleans())
def test_the_planner_counts_as_the_slow_trie_does(groups, ranks, slack, spread):
    """Tokens, terms and attention cost of each row, whatever is shared within groups and between them."""
    budget = max(len(sample) for group in groups for sample in group) + slack
    batches, current = [], MicroBatch(ranks, budget)
    for group in groups:
        rest = current.offer(group)
        while rest:
            batches.append(current)
            current = MicroBatch(ranks, budget)
            rest = current.offer(rest)
    placed = []
    for batch in [*batches, current]:
        if spread:
            batch.spread()
            sizes = [len(samples) for samples in batch.rows]
            assert min(sizes) > 0 or max(sizes) <= 1
        for row, samples in enumerate(batch.rows):
            placed += samples
            assert batch.tokens[row] == count_nodes(samples) <= budget
            assert batch.terms[row] == sum(int(s.trained.sum()) for s in samples) <= budget
            assert batch.costs[row] == attention_cost(samples)
    assert sorted(map(id, placed)) == sorted(id(sample) for group in groups for sample in group)


@quick
@given(forests(groups=8), st.integers(1, 4), st.integers(0, 12))
def test_a_group_is_placed_by_the_rules(groups, ranks, slack):
    """Whole where it fits; else not at all, or over empty rows and rows below the most loaded one."""
    budget = max(len(sample) for group in groups for sample in group) + slack
    batch = MicroBatch(ranks, budget)
    for group in groups:
        before, costs = [list(samples) for samples in batch.rows], batch.costs.copy()
        wholes = [
            attention_cost([*held, *group])
            if count_nodes([*held, *group]) <= budget and sum(s.num_trained for s in [*held, *group]) <= budget
            else None
            for held in before
        ]
        rest = batch.offer(group)
        changed = [row for row in range(ranks) if len(batch.rows[row]) > len(before[row])]
        assert all(batch.rows[row][: len(before[row])] == before[row] for row in changed)
        if any(whole is not None for whole in wholes):
            assert not rest
            assert wholes[changed[0]] == min(whole for whole in wholes if whole is not None)
            assert len(changed) == 1
        elif all(before):
            for row in changed:
                first = batch.rows[row][len(before[row])]
                # earlier parts may have raised the most loaded row further
                assert attention_cost([*before[row], first]) <= max(costs.max(), batch.costs.max())
            if ranks == 1:
                assert not changed, "a micro-batch of one row does not split a group that can be whole in the next"
        if rest:
            assert all(batch.rows), "no row stays empty while samples are turned away"
            break


def test_what_is_shared_is_seen_past_the_sequences_of_other_rows():
    """Inserted before another one, whose distance to its predecessor changes with that."""
    index = PrefixIndex(2)
    for row, ids in enumerate([[1, 5, 5, 5], [1, 5, 5, 4]]):
        trie = sort_sequences([np.array(ids, np.int32)])
        index.insert(trie, index.locate(trie), row)
    trie = sort_sequences([np.array([1, 5, 5, 6], np.int32)])
    assert index.shared(trie, index.locate(trie)).tolist() == [[2, 2]]


def test_a_group_goes_where_its_prefix_makes_it_cheaper():
    """Row 1 costs less by itself, but row 0 holds five of the group's seven nodes."""
    batch = MicroBatch(2, 60)
    held, other, shared = [7] * 6 + [1], [8] * 6, [7] * 6 + [9]
    for ids in (held, other, shared):
        assert batch.offer([sample_of(ids, [True] * len(ids))]) == []
    assert [len(samples) for samples in batch.rows] == [2, 1]
    assert batch.costs.tolist() == [28 + 6 + 7, 21]
