"""Rows as prefix tries: a token shared by several samples is forwarded once.

A node's key is (token, next token), so each position has one next-token label, and a sample ends on its own leaf.
Nodes are laid out depth first; position id = depth. A node attends to the nodes on its path from the root.

Everything here works on whole arrays: in lexicographic order each sequence shares its longest prefix with a neighbour,
so that the trie is one run of new nodes per sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.packing.sample import EMPTY, Sample

ROOT = -1


@dataclass(frozen=True)
class Row:
    """What one rank forwards in one micro-batch: `N` nodes, `S` segments, `L` loss terms, heads of `K`.

    A segment is a stretch of the layout without a branch: its nodes attend to each other causally and to the whole of
    each segment above it.

    Attributes:
        input_ids, position_ids, parent: `(N,)` int32; `parent` is the node before on the path, `ROOT` at a root.
        segment_start, segment_end: `(S,)` int32, first node and one past the last, in layout order.
        segment_parent: `(S,)` int32, the segment above, which comes earlier; `ROOT` at a root.
        predict: `(L,)` int32, the node that predicts each trained token.
        target, logq, advantage, sample: `(L,)`: token id, sampler log-probability, advantage, index of the sample.
        head_ids, head_logq: `(L, K)`.
        candidate_ids, candidate_offsets: the candidate sets of the loss terms as in `Sample`, or None.
        raw_tokens: tokens of the samples before packing; num_samples: how many.
    """

    input_ids: NDArray[np.int32]
    position_ids: NDArray[np.int32]
    parent: NDArray[np.int32]
    segment_start: NDArray[np.int32]
    segment_end: NDArray[np.int32]
    segment_parent: NDArray[np.int32]
    predict: NDArray[np.int32]
    target: NDArray[np.int32]
    logq: NDArray[np.float32]
    advantage: NDArray[np.float32]
    sample: NDArray[np.int32]
    head_ids: NDArray[np.int32]
    head_logq: NDArray[np.float32]
    raw_tokens: int
    num_samples: int
    candidate_ids: NDArray[np.int32] | None = None
    candidate_offsets: NDArray[np.int64] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_terms(self) -> int:
        return len(self.predict)


def sort_key(sequence: NDArray[np.int32]) -> bytes:
    """Bytes that order sequences lexicographically: token after token, tokens in some fixed order."""
    return np.asarray(sequence, np.int32).tobytes()


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    if not length:
        return 0
    different = a[:length] != b[:length]
    first = int(different.argmax())
    return first if different[first] else length


def common_prefixes(sequences: Sequence[NDArray[np.int32]]) -> list[int]:
    """Length of the prefix that each sequence shares with its predecessor; 0 for the first."""
    width = min(map(len, sequences), default=0)
    if len(sequences) < 2 or not width:
        return [0] * len(sequences)
    heads = np.concatenate([sequence[:width] for sequence in sequences]).reshape(-1, width)
    different = heads[1:] != heads[:-1]
    first = different.argmax(axis=1).tolist()
    for i in np.flatnonzero(heads[1:, -1] == heads[:-1, -1]).tolist():  # perhaps all of the shortest
        if not different[i, first[i]]:
            first[i] = width + common_prefix(sequences[i][width:], sequences[i + 1][width:])
    return [0, *first]


@dataclass(frozen=True)
class SortedSequences:
    """Sequences in lexicographic order.

    Attributes:
        order: index that each had among those given.
        keys: its sort key.
        common: `(n,)` int64, length of the prefix that it shares with its predecessor; 0 at the first.
        lengths: `(n,)` int64.
    """

    order: list[int]
    keys: list[bytes]
    sequences: list[NDArray[np.int32]]
    common: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.order)

    @property
    def shared(self) -> NDArray[np.int64]:
        """`(n,)` nodes that each has in common with those before it.

        One less than the common prefix, since a node is keyed by its next token.
        """
        return np.maximum(self.common - 1, 0)

    def part(self, begin: int, end: int) -> "SortedSequences":
        """Those from `begin` up to `end`, without the ones before."""
        common = self.common[begin:end].copy()
        common[:1] = 0
        where = slice(begin, end)
        return SortedSequences(
            self.order[where], self.keys[where], self.sequences[where], common, self.lengths[begin:end]
        )


def sort_sequences(sequences: Sequence[NDArray[np.int32]]) -> SortedSequences:
    """Sort; equal sequences keep their order.

    Raises:
        ValueError: a sequence is empty.
    """
    given = [sort_key(sequence) for sequence in sequences]
    if not all(given):
        raise ValueError("a sample without tokens cannot be packed")
    order = sorted(range(len(given)), key=given.__getitem__)
    ordered = [sequences[i] for i in order]
    return SortedSequences(
        order=order,
        keys=[given[i] for i in order],
        sequences=ordered,
        common=np.array(common_prefixes(ordered), np.int64),
        lengths=np.array([len(sequence) for sequence in ordered], np.int64),
    )


def sorted_order(sequences: Sequence[NDArray[np.int32]]) -> list[int]:
    """Indices in lexicographic order, so that neighbours share the longest prefixes."""
    return sorted(range(len(sequences)), key=[sort_key(sequence) for sequence in sequences].__getitem__)


def new_nodes(sequences: Sequence[NDArray[np.int32]]) -> list[int]:
    """Nodes that each of the lexicographically sorted sequences adds to the trie of those before it."""
    common = common_prefixes(sequences)
    return [len(sequence) - max(prefix - 1, 0) for sequence, prefix in zip(sequences, common, strict=True)]


def attention_pairs(new: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Attention cost of the last `new` nodes on paths of `lengths`: token pairs, each node seeing the path up to it."""
    return new * (lengths - (new - 1) / 2)


def pack(samples: Sequence[Sample], in_order: SortedSequences | None = None) -> Row:
    """Lay the samples out as one prefix trie. Without samples: a filler row of one node and no loss term.

    Args:
        samples: of one row.
        in_order: their sequences sorted, where that is known.

    Raises:
        ValueError: a sample has no tokens.
    """
    if not samples:
        return _filler()
    sequences = [sample.input_ids for sample in samples]
    trie = sort_sequences(sequences) if in_order is None else in_order
    shared = trie.shared
    new = trie.lengths - shared
    end = np.cumsum(new)
    start = end - new
    offset = start - shared  # node = offset + depth, for the nodes of a sequence's own run
    above = _runs_above(shared.tolist())
    branch = np.where(above == ROOT, ROOT, offset[above] + shared - 1)

    size = int(end[-1])
    parent = np.arange(-1, size - 1, dtype=np.int32)
    parent[start] = branch
    segment_start, segment_end, segment_parent = _segments(start, branch, size)

    own = np.empty(len(samples), np.int64)  # the run of each sample
    own[trie.order] = np.arange(len(samples))
    lengths = trie.lengths[own]
    ends = np.cumsum(lengths)
    where = np.flatnonzero(np.concatenate([sample.trained for sample in samples]))
    bounds = np.searchsorted(where, ends)
    counts = np.diff(bounds, prepend=0)
    # `where` counts along the samples; a term's predictor is one node before its target
    predict = where + np.repeat(offset[own] + lengths - ends - 1, counts)
    _into_shared_runs(predict, bounds, counts, own, start, shared, offset, above)

    head_ids, head_logq = _stack_heads(samples)
    candidate_ids, candidate_offsets = stack_candidates(samples)
    return Row(
        input_ids=np.concatenate([ids[before:] for ids, before in zip(trie.sequences, shared.tolist(), strict=True)]),
        position_ids=np.arange(size, dtype=np.int32) - np.repeat(offset.astype(np.int32), new),
        parent=parent,
        segment_start=segment_start,
        segment_end=segment_end,
        segment_parent=segment_parent,
        predict=predict.astype(np.int32),
        target=np.concatenate(sequences)[where],
        logq=np.concatenate([sample.logprobs for sample in samples])[where],
        advantage=np.repeat(np.array([sample.advantage for sample in samples], np.float32), counts),
        sample=np.repeat(np.arange(len(samples), dtype=np.int32), counts),
        head_ids=head_ids,
        head_logq=head_logq,
        raw_tokens=int(ends[-1]),
        num_samples=len(samples),
        candidate_ids=candidate_ids,
        candidate_offsets=candidate_offsets,
    )


def _runs_above(shared: list[int]) -> NDArray[np.int64]:
    """For each run of nodes, the one that it branches off: the last before it that begins less deep. `ROOT` at depth 0."""
    above: list[int] = []
    open_runs: list[int] = []
    for run, depth in enumerate(shared):
        while open_runs and shared[open_runs[-1]] >= depth:
            open_runs.pop()
        above.append(open_runs[-1] if open_runs else ROOT)
        open_runs.append(run)
    return np.array(above, np.int64)


def _segments(
    start: NDArray[np.int64], branch: NDArray[np.int64], size: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Cut the runs behind each node that others branch off."""
    starts = np.unique(np.concatenate([start, branch[branch != ROOT] + 1]))
    ends = np.append(starts[1:], size)
    above = starts - 1
    at = np.searchsorted(starts, start)
    above[at] = branch
    parents = np.searchsorted(starts, above, side="right") - 1  # before the first start: ROOT
    return starts.astype(np.int32), ends.astype(np.int32), parents.astype(np.int32)


def _into_shared_runs(
    predict: NDArray[np.int64],
    bounds: NDArray[np.int64],
    counts: NDArray[np.int64],
    own: NDArray[np.int64],
    start: NDArray[np.int64],
    shared: NDArray[np.int64],
    offset: NDArray[np.int64],
    above: NDArray[np.int64],
) -> None:
    """Move terms whose predictor lies before their sample's own run to the run that holds that node, in place."""
    holders = np.flatnonzero(counts)
    early = holders[predict[(bounds - counts)[holders]] < start[own[holders]]]  # their first term is the least deep
    for index in early.tolist():
        run = int(own[index])
        terms = predict[bounds[index] - counts[index] : bounds[index]]
        rest = int(np.searchsorted(terms, start[run]))
        depth = terms[:rest] - offset[run]
        while rest:
            run = int(above[run])
            left = int(np.searchsorted(depth[:rest], shared[run]))
            terms[left:rest] = depth[left:rest] + offset[run]
            rest = left


def _stack_heads(samples: Sequence[Sample]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    width = max(sample.head_ids.shape[1] for sample in samples)
    ids = [sample.head_ids for sample in samples]
    logq = [sample.head_logprobs for sample in samples]
    for i, head in enumerate(ids):
        if head.shape[1] < width:
            missing = ((0, 0), (0, width - head.shape[1]))
            ids[i], logq[i] = np.pad(head, missing, constant_values=EMPTY), np.pad(logq[i], missing)
    return np.concatenate(ids), np.concatenate(logq)


def stack_candidates(samples: Sequence[Sample]) -> tuple[NDArray[np.int32] | None, NDArray[np.int64] | None]:
    """The candidate sets of all samples' trained tokens, in the order of the samples; None where no sample has any."""
    if all(sample.candidate_ids is None for sample in samples):
        return None, None
    ids, lengths = [], []
    for sample in samples:
        if sample.candidate_ids is None or sample.candidate_offsets is None:
            lengths.append(np.zeros(sample.num_trained, np.int64))
        else:
            ids.append(sample.candidate_ids)
            lengths.append(np.diff(sample.candidate_offsets))
    return np.concatenate(ids), np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))])


def _filler() -> Row:
    nothing, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Row(
        input_ids=np.zeros(1, np.int32),
        position_ids=np.zeros(1, np.int32),
        parent=np.full(1, ROOT, np.int32),
        segment_start=np.zeros(1, np.int32),
        segment_end=np.ones(1, np.int32),
        segment_parent=np.full(1, ROOT, np.int32),
        predict=nothing,
        target=nothing,
        logq=floats,
        advantage=floats,
        sample=nothing,
        head_ids=np.zeros((0, 0), np.int32),
        head_logq=np.zeros((0, 0), np.float32),
        raw_tokens=0,
        num_samples=0,
    )


def segments(parent: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Runs `[start, end)` of nodes that each follow their predecessor in the layout."""
    starts = np.flatnonzero(parent != np.arange(len(parent)) - 1)
    starts = np.union1d(starts, [0])
    return list(zip(starts.tolist(), [*starts[1:].tolist(), len(parent)], strict=True))


def attention_mask(parent: NDArray[np.int32]) -> NDArray[np.bool_]:
    """`(N, N)` bool: `[i, j]` where node `i` attends to node `j`."""
    size = len(parent)
    mask = np.zeros((size, size), dtype=np.bool_)
    for start, end in segments(parent):
        if parent[start] != ROOT:
            mask[start:end] = mask[parent[start]]
        mask[start:end, start:end] = np.tri(end - start, dtype=np.bool_)
    return mask
