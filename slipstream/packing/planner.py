"""Which samples go into which row. Pure: samples in, placement out.

A micro-batch has one row per rank. A row holds at most `token_budget` unique tokens and as many loss terms. A group goes
whole into the row that it leaves cheapest in attention. Where it fits into none, its samples fill one row, then another
while one is empty or the most loaded row, which sets the time of the micro-batch, is not raised; then the micro-batch
closes.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from slipstream.packing.prefix_index import Gap, PrefixIndex
from slipstream.packing.sample import Sample
from slipstream.packing.trie import Row, SortedSequences, attention_pairs, pack, sort_sequences


class MicroBatch:
    """Rows of one micro-batch while they fill.

    Attributes:
        rows: the samples of each rank's row.
        tokens, terms: `(ranks,)` int64, unique tokens and loss terms of each row.
        costs: `(ranks,)` float64, attention cost of each row, in token pairs.
    """

    def __init__(self, ranks: int, token_budget: int) -> None:
        self._budget = token_budget
        self._index = PrefixIndex(ranks)
        self._sorted: list[SortedSequences] | None = None  # of each row, once the micro-batch is closed
        self.rows: list[list[Sample]] = [[] for _ in range(ranks)]
        self.tokens = np.zeros(ranks, np.int64)
        self.terms = np.zeros(ranks, np.int64)
        self.costs = np.zeros(ranks, np.float64)

    def __len__(self) -> int:
        return sum(map(len, self.rows))

    def offer(self, group: Sequence[Sample]) -> list[Sample]:
        """Place what fits of the samples of one group; what is returned belongs into the next micro-batch.

        Every sample must fit into an empty row (`oversize` is dropped before). Not to be called after `spread` or `pack`.
        """
        if not group:
            return []
        sequences = sort_sequences([sample.input_ids for sample in group])
        samples = [group[i] for i in sequences.order]
        if self._place_whole(samples, sequences):
            return []
        while samples:
            taken = self._place_part(samples, sequences)
            if not taken:
                break
            samples, sequences = samples[taken:], sequences.part(taken, len(samples))
        return samples

    def _place_whole(self, samples: list[Sample], sequences: SortedSequences) -> bool:
        gaps = self._index.locate(sequences)
        new = self._new_nodes(sequences, gaps)
        tokens = self.tokens + new.sum(axis=0)
        terms = self.terms + np.count_nonzero(np.concatenate([sample.trained for sample in samples]))
        fits = (tokens <= self._budget) & (terms <= self._budget)
        if not fits.any():
            return False
        costs = self.costs + attention_pairs(new, sequences.lengths[:, None]).sum(axis=0)
        row = int(np.where(fits, costs, np.inf).argmin())
        self._index.insert(sequences, gaps, row)
        self.rows[row] += samples
        self.tokens[row], self.terms[row], self.costs[row] = tokens[row], terms[row], costs[row]
        return True

    def _new_nodes(self, sequences: SortedSequences, gaps: list[Gap]) -> NDArray[np.int64]:
        """`(n, ranks)` nodes that each adds to a row that holds those before it, `(n, 1)` where all rows are alike."""
        return sequences.lengths[:, None] - np.maximum(self._index.shared(sequences, gaps), sequences.shared[:, None])

    def _place_part(self, samples: list[Sample], sequences: SortedSequences) -> int:
        """Fill one row with the first of the samples; how many it took, 0 if the micro-batch is to close."""
        gaps = self._index.locate(sequences)
        new = np.broadcast_to(self._new_nodes(sequences, gaps), (len(samples), len(self.rows)))
        tokens = self.tokens + new.cumsum(axis=0)
        terms = self.terms + np.cumsum([sample.num_trained for sample in samples])[:, None]
        costs = self.costs + attention_pairs(new, sequences.lengths[:, None]).cumsum(axis=0)
        fits = (tokens <= self._budget) & (terms <= self._budget)  # only ever turns from true to false
        row = next((i for i, held in enumerate(self.rows) if not held), None)
        if row is None:
            free = fits[0] & (costs[0] <= self.costs.max())
            if not free.any():
                return 0
            row = int(np.where(free, costs[0], np.inf).argmin())
        taken = int(fits[:, row].sum())
        if not taken:
            return 0
        part = sequences.part(0, taken)
        self._index.insert(part, self._index.locate(part), row)
        self.rows[row] += samples[:taken]
        last = taken - 1
        self.tokens[row], self.terms[row], self.costs[row] = tokens[last, row], terms[last, row], costs[last, row]
        return taken

    def spread(self) -> None:
        """Give empty rows a part of the costliest ones, as far as there are samples: no rank idles while another works.

        The micro-batch is closed with it.
        """
        for row, held in enumerate(self.rows):
            if held:
                continue
            several = np.array([len(other) > 1 for other in self.rows])
            if not several.any():
                return
            self._halve(int(np.where(several, self.costs, -1.0).argmax()), row)

    def _halve(self, donor: int, row: int) -> None:
        """Move samples of `donor` to the empty `row`, such that the costlier of the two is as cheap as can be."""
        in_order = self._in_order()
        sequences = in_order[donor]
        samples = [self.rows[donor][i] for i in sequences.order]
        new, lengths = sequences.lengths - sequences.shared, sequences.lengths
        terms = np.array([sample.num_trained for sample in samples])
        added, alone = attention_pairs(new, lengths), attention_pairs(lengths, lengths)
        kept = added.cumsum()
        given = alone[1:] + (kept[-1] - kept[1:])  # the first given one takes its whole path along
        cut = int(np.maximum(kept[:-1], given).argmin()) + 1
        self.rows[donor], self.rows[row] = samples[:cut], samples[cut:]
        for part, begin, end in ((donor, 0, cut), (row, cut, len(samples))):
            in_order[part] = replace(sequences.part(begin, end), order=list(range(end - begin)))
        self.costs[donor], self.costs[row] = kept[cut - 1], given[cut - 1]
        self.tokens[donor], self.tokens[row] = new[:cut].sum(), lengths[cut] + new[cut + 1 :].sum()
        self.terms[donor], self.terms[row] = terms[:cut].sum(), terms[cut:].sum()

    def _in_order(self) -> list[SortedSequences]:
        if self._sorted is None:
            self._sorted = self._index.by_row()
        return self._sorted

    def pack(self) -> list[Row]:
        """Lay each row out as a prefix trie. The micro-batch is closed with it."""
        return [pack(samples, sequences) for samples, sequences in zip(self.rows, self._in_order(), strict=True)]

    def imbalance(self) -> float:
        """The costliest row's attention cost over the mean; 1 is perfect balance."""
        mean = self.costs.mean()
        return float(self.costs.max() / mean) if mean > 0 else 1.0


def oversize(sample: Sample, token_budget: int) -> bool:
    """Whether the sample fits into no row at all."""
    return len(sample) > token_budget or sample.num_trained > token_budget
