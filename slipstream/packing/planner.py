"""Which samples go into which row. Pure: samples in, placement out.

A micro-batch has one row per rank. A row holds at most `token_budget` unique tokens and as many loss terms. The samples
of a group stay together while a row has room for all of them; a micro-batch closes when the next group fits nowhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.packing.sample import Sample
from slipstream.packing.trie import new_nodes, sorted_order


@dataclass
class _Load:
    """A row in the making. `cost` is the attention cost, in token pairs."""

    samples: list[Sample] = field(default_factory=list)
    tokens: int = 0
    terms: int = 0
    cost: float = 0.0


class MicroBatch:
    """Rows of one micro-batch while they fill."""

    def __init__(self, ranks: int, token_budget: int) -> None:
        self._budget = token_budget
        self._loads = [_Load() for _ in range(ranks)]

    def __len__(self) -> int:
        return sum(len(load.samples) for load in self._loads)

    @property
    def rows(self) -> list[list[Sample]]:
        """The samples of each rank's row."""
        return [load.samples for load in self._loads]

    def _fits(self, load: _Load, tokens: int, terms: int) -> bool:
        return load.tokens + tokens <= self._budget and load.terms + terms <= self._budget

    def _put(self, load: _Load, samples: Sequence[Sample], nodes: Sequence[int]) -> None:
        load.samples.extend(samples)
        load.tokens += sum(nodes)
        load.terms += sum(sample.num_trained for sample in samples)
        # a new node of a sample attends to all nodes before it on the path
        load.cost += sum(n * (len(s) - (n - 1) / 2) for s, n in zip(samples, nodes, strict=True))

    def offer(self, group: Sequence[Sample]) -> list[Sample]:
        """Place what fits of the samples of one group; what is returned belongs into the next micro-batch.

        Every sample must fit into an empty row (`oversize` is dropped before).
        """
        order = sorted_order([sample.input_ids for sample in group])
        samples = [group[i] for i in order]
        nodes = new_nodes([sample.input_ids for sample in samples])
        tokens, terms = sum(nodes), sum(sample.num_trained for sample in samples)
        rooms = [load for load in self._loads if self._fits(load, tokens, terms)]
        if rooms:
            self._put(min(rooms, key=lambda load: (load.cost, load.tokens)), samples, nodes)
            return []
        empty = [load for load in self._loads if not load.samples]
        if not empty:
            return list(samples)
        # larger than a row, or a rank would stay empty: split in sorted order, so that each part shares its prefix
        while samples and empty:
            load = empty.pop(0)
            nodes = new_nodes([sample.input_ids for sample in samples])
            take, used, used_terms = 0, 0, 0
            for sample, count in zip(samples, nodes, strict=True):
                if used + count > self._budget or used_terms + sample.num_trained > self._budget:
                    break
                take, used, used_terms = take + 1, used + count, used_terms + sample.num_trained
            self._put(load, samples[:take], nodes[:take])
            samples = samples[take:]
        return samples

    def spread(self) -> None:
        """Give empty rows samples of the fullest ones, as far as there are samples: no rank idles while another works."""
        for load in self._loads:
            if load.samples:
                continue
            donor = max(self._loads, key=lambda other: len(other.samples))
            half = len(donor.samples) // 2
            if half == 0:
                return
            kept, given = donor.samples[: len(donor.samples) - half], donor.samples[len(donor.samples) - half :]
            for target, samples in ((donor, kept), (load, given)):
                target.samples, target.tokens, target.terms, target.cost = [], 0, 0, 0.0
                ordered = [samples[i] for i in sorted_order([s.input_ids for s in samples])]
                self._put(target, ordered, new_nodes([s.input_ids for s in ordered]))

    def imbalance(self) -> float:
        """The costliest row's attention cost over the mean; 1 is perfect balance."""
        costs = np.array([load.cost for load in self._loads])
        return float(costs.max() / costs.mean()) if costs.mean() > 0 else 1.0


def oversize(sample: Sample, token_budget: int) -> bool:
    """Whether the sample fits into no row at all."""
    return len(sample) > token_budget or sample.num_trained > token_budget
