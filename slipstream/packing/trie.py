"""Rows as prefix tries: a token shared by several samples is forwarded once.

A node's key is (token, next token), so each position has one next-token label, and a sample ends on its own leaf.
Nodes are laid out depth first; position id = depth. A node attends to the nodes on its path from the root.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.packing.sample import EMPTY, Sample

ROOT = -1


@dataclass(frozen=True)
class Row:
    """What one rank forwards in one micro-batch: `N` nodes, `L` loss terms, heads of `K`.

    Attributes:
        input_ids, position_ids, parent: `(N,)` int32; `parent` is the node before on the path, `ROOT` at a root.
        predict: `(L,)` int32, the node that predicts each trained token.
        target, logq, advantage, sample: `(L,)`: token id, sampler log-probability, advantage, index of the sample.
        head_ids, head_logq: `(L, K)`.
        candidate_ids, candidate_offsets: the candidate sets of the loss terms as in `Sample`, or None.
        raw_tokens: tokens of the samples before packing; num_samples: how many.
    """

    input_ids: NDArray[np.int32]
    position_ids: NDArray[np.int32]
    parent: NDArray[np.int32]
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


def sorted_order(sequences: Sequence[NDArray[np.int32]]) -> list[int]:
    """Indices in lexicographic order of the token ids, so that neighbours share the longest prefixes."""
    keys = [sequence.astype(">i4").tobytes() for sequence in sequences]
    return sorted(range(len(sequences)), key=keys.__getitem__)


def shared_nodes(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many nodes two samples share: one less than their common prefix, since a node is keyed by its next token."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    common = int(different[0]) if len(different) else length
    return max(common - 1, 0)


def new_nodes(sequences: Sequence[NDArray[np.int32]]) -> list[int]:
    """Nodes that each of the lexicographically sorted sequences adds to the trie of those before it."""
    return [
        len(sequence) - (shared_nodes(sequences[i - 1], sequence) if i else 0) for i, sequence in enumerate(sequences)
    ]


def pack(samples: Sequence[Sample]) -> Row:
    """Lay the samples out as one prefix trie. Without samples: a filler row of one node and no loss term."""
    if not samples:
        return _filler()
    sequences = [sample.input_ids for sample in samples]
    parts: list[NDArray[np.int32]] = []
    depths: list[NDArray[np.int32]] = []
    parents: list[NDArray[np.int32]] = []
    paths: dict[int, NDArray[np.int32]] = {}
    size = 0
    previous: int | None = None
    for index in sorted_order(sequences):
        ids = sequences[index]
        shared = 0 if previous is None else shared_nodes(sequences[previous], ids)
        fresh = np.arange(size, size + len(ids) - shared, dtype=np.int32)
        head = paths[previous][:shared] if previous is not None else fresh[:0]
        paths[index] = np.concatenate([head, fresh])
        before = fresh - 1
        before[0] = head[-1] if shared else ROOT
        parts.append(ids[shared:])
        depths.append(np.arange(shared, len(ids), dtype=np.int32))
        parents.append(before)
        size += len(fresh)
        previous = index

    predict, target, logq, advantage, owner = [], [], [], [], []
    for index, sample in enumerate(samples):
        where = np.flatnonzero(sample.trained)
        predict.append(paths[index][where - 1])
        target.append(sample.input_ids[where])
        logq.append(sample.logprobs[where])
        advantage.append(np.full(len(where), sample.advantage, dtype=np.float32))
        owner.append(np.full(len(where), index, dtype=np.int32))
    head_ids, head_logq = _stack_heads(samples)
    candidate_ids, candidate_offsets = stack_candidates(samples)
    return Row(
        input_ids=np.concatenate(parts),
        position_ids=np.concatenate(depths),
        parent=np.concatenate(parents),
        predict=np.concatenate(predict),
        target=np.concatenate(target),
        logq=np.concatenate(logq),
        advantage=np.concatenate(advantage),
        sample=np.concatenate(owner),
        head_ids=head_ids,
        head_logq=head_logq,
        raw_tokens=sum(map(len, samples)),
        num_samples=len(samples),
        candidate_ids=candidate_ids,
        candidate_offsets=candidate_offsets,
    )


def _stack_heads(samples: Sequence[Sample]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    width = max(sample.head_ids.shape[1] for sample in samples)
    ids = [np.pad(s.head_ids, ((0, 0), (0, width - s.head_ids.shape[1])), constant_values=EMPTY) for s in samples]
    logq = [np.pad(s.head_logprobs, ((0, 0), (0, width - s.head_logprobs.shape[1]))) for s in samples]
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
