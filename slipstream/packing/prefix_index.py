"""What new sequences have in common with those that the rows of a micro-batch hold. Pure."""

from array import array
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.packing.trie import SortedSequences, common_prefix


@dataclass(frozen=True)
class Gap:
    """Sequences `begin` to `end` of a group belong before the held sequence `at`.

    `left` and `right` are the common prefixes with the neighbours, of the first and of the last of them.
    """

    begin: int
    end: int
    at: int
    left: int
    right: int


class PrefixIndex:
    """The sequences of a micro-batch in lexicographic order over all rows.

    The common prefix of two sequences is the shortest of those between neighbours on the way from one to the other.
    """

    def __init__(self, rows: int) -> None:
        self._num_rows = rows
        self._keys: list[bytes] = []
        self._sequences: list[NDArray[np.int32]] = []
        self._common = array("q")  # with the predecessor
        self._rows = array("q")
        self._places = array("q")  # how many its row held before it
        self._counts = [0] * rows

    def locate(self, group: SortedSequences) -> list[Gap]:
        """Where the sequences of a group belong."""
        keys, first, last = (
            group.keys,
            bisect_right(self._keys, group.keys[0]),
            bisect_right(self._keys, group.keys[-1]),
        )
        places = [first] * len(keys) if first == last else [bisect_right(self._keys, key) for key in keys]
        gaps, begin = [], 0
        for i in range(1, len(keys) + 1):
            if i < len(keys) and places[i] == places[begin]:
                continue
            at, sequences = places[begin], group.sequences
            left = common_prefix(self._sequences[at - 1], sequences[begin]) if at else 0
            right = common_prefix(sequences[i - 1], self._sequences[at]) if at < len(self._keys) else 0
            gaps.append(Gap(begin, i, at, left, right))
            begin = i
        return gaps

    def shared(self, group: SortedSequences, gaps: list[Gap]) -> NDArray[np.int64]:
        """`(n, rows)` nodes that each sequence of a group has in common with each row; `(n, 1)` where all have none."""
        if all(gap.left <= 1 and gap.right <= 1 for gap in gaps):
            return np.zeros((len(group), 1), np.int64)
        common = np.zeros((len(group), self._num_rows), np.int64)
        for gap in gaps:
            within = group.common[gap.begin + 1 : gap.end]
            lefts = np.minimum.accumulate(np.append(gap.left, within))
            rights = np.minimum.accumulate(np.append(gap.right, within[::-1]))[::-1]
            known: dict[tuple[int, int], NDArray[np.int64]] = {}  # most often the same for the whole group
            for i, pair in enumerate(zip(lefts.tolist(), rights.tolist(), strict=True), gap.begin):
                if pair not in known:
                    known[pair] = self._reach(gap.at, *pair)
                common[i] = known[pair]
        return np.maximum(common - 1, 0)

    def _reach(self, at: int, left: int, right: int) -> NDArray[np.int64]:
        """`(rows,)` longest common prefix of a sequence that belongs before `at` with one of each row."""
        reach = np.zeros((2, self._num_rows), np.int64)
        common, rows = np.frombuffer(self._common, np.int64), np.frombuffer(self._rows, np.int64)
        # of several sequences of a row the nearest is assigned last
        if left and at:
            leftward = np.minimum.accumulate(np.append(left, common[1:at][::-1]))
            reach[0, rows[:at]] = leftward[::-1]
        if right and at < len(rows):
            rightward = np.minimum.accumulate(np.append(right, common[at + 1 :]))
            reach[1, rows[at:][::-1]] = rightward[::-1]
        return reach.max(axis=0)

    def insert(self, group: SortedSequences, gaps: list[Gap], row: int) -> None:
        """Hold the sequences of a group, all in one row."""
        place = self._counts[row]
        self._counts[row] += len(group)
        for gap in reversed(gaps):
            at, begin, end = gap.at, gap.begin, gap.end
            if at < len(self._keys):
                self._common[at] = gap.right
            self._keys[at:at] = group.keys[begin:end]
            self._sequences[at:at] = group.sequences[begin:end]
            self._common[at:at] = array("q", [gap.left, *group.common[begin + 1 : end].tolist()])
            self._rows[at:at] = array("q", [row]) * (end - begin)
            self._places[at:at] = array("q", range(place + begin, place + end))

    def by_row(self) -> list[SortedSequences]:
        """The sequences of each row, without sorting them again; `order` is the order in which they came into it."""
        rows, common = np.array(self._rows, np.int64), np.array(self._common, np.int64)
        places = np.array(self._places, np.int64)
        grouped = np.argsort(rows, kind="stable")
        bounds = np.searchsorted(rows[grouped], np.arange(self._num_rows + 1))
        found = []
        for row in range(self._num_rows):
            at = grouped[bounds[row] : bounds[row + 1]]
            within = np.zeros(len(at), np.int64)
            if len(at) > 1:  # the shortest of those on the way from one to the next
                within[1:] = np.minimum.reduceat(common[at[0] + 1 : at[-1] + 1], at[:-1] - at[0])
            sequences = [self._sequences[i] for i in at.tolist()]
            lengths = np.array([len(sequence) for sequence in sequences], np.int64)
            keys = [self._keys[i] for i in at.tolist()]
            found.append(SortedSequences(places[at].tolist(), keys, sequences, within, lengths))
        return found
