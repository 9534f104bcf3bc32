"""Which token of a packed row attends to which: the row's tree, read off the parent of each token.

The tokens of a row are laid out depth first, so the descendants of token `j` are `j + 1 ... subtree_end[j] - 1`, and
token `i` attends to `j` if and only if `j <= i < subtree_end[j]`.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ROOT = -1


class Segment(NamedTuple):
    """Tokens `[start, end)` without a branch; its descendants are `[end, subtree_end)`. `parent`: index, or `ROOT`."""

    start: int
    end: int
    parent: int
    subtree_end: int


class TreeLayout:
    """The tree of one packed row; made once per row, shared by all layers, kept by gradient checkpointing.

    Args:
        parent: `(N,)` integers, the token before on the path; `ROOT` at the first token of a path.

    Attributes:
        depth, subtree_end: `(N,)` int64, the position on the path, and the end of the token's descendants.
        segments: in the order of the row.

    Raises:
        ValueError: the tokens are not laid out depth first.
    """

    def __init__(self, parent: NDArray[Any]) -> None:
        self.parent = np.asarray(parent, dtype=np.int64)
        self.size = len(self.parent)
        if not self.size:
            raise ValueError("a row without tokens has no layout")
        self.segments = _segments(self.parent)
        self.depth = np.zeros(self.size, dtype=np.int64)
        self.subtree_end = np.zeros(self.size, dtype=np.int64)
        for start, end, _, subtree_end in self.segments:
            before = self.parent[start]
            self.depth[start:end] = np.arange(end - start) + (0 if before == ROOT else self.depth[before] + 1)
            self.subtree_end[start:end] = subtree_end
        self._memo: dict[Hashable, Any] = {}

    def memo(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once per key: the layers of a model share plans, masks and indices."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def tensor(self, name: str, device: torch.device) -> Tensor:
        """`depth` or `subtree_end` on a device."""
        return self.memo((name, device), lambda: torch.from_numpy(getattr(self, name)).to(device))

    def attends(
        self, device: torch.device, window: int | None = None, queries: slice = slice(None), keys: slice = slice(None)
    ) -> Tensor:
        """`(queries, keys)` bool: who attends to whom; with a window, only to the last `window` tokens of the path."""
        index = self.memo(("index", device), lambda: torch.arange(self.size, device=device))
        depth, subtree_end = self.tensor("depth", device), self.tensor("subtree_end", device)
        query = index[queries, None]
        mask = (index[keys] <= query) & (query < subtree_end[keys])
        if window is not None:
            mask &= depth[queries, None] - depth[keys] < window
        return mask


def _segments(parent: NDArray[np.int64]) -> list[Segment]:
    size = len(parent)
    jumps = np.flatnonzero(parent != np.arange(size) - 1)
    branches = parent[jumps]
    starts = np.unique(np.concatenate([[0], jumps, branches[branches != ROOT] + 1]))
    if starts[-1] >= size or (parent >= np.arange(size)).any() or (parent < ROOT).any():
        raise ValueError("the parent of a token must come before it in the row")
    ends = np.append(starts[1:], size)
    before = parent[starts]
    owner = np.where(before == ROOT, ROOT, np.searchsorted(starts, before, side="right") - 1).tolist()
    subtree_end = [size] * len(starts)
    path: list[int] = []
    for index, above in enumerate(owner):
        while path and path[-1] != above:
            subtree_end[path.pop()] = int(starts[index])
        if not path and above != ROOT:
            raise ValueError(f"the row is not laid out depth first at token {starts[index]}")
        path.append(index)
    return [Segment(int(s), int(e), o, u) for s, e, o, u in zip(starts, ends, owner, subtree_end, strict=True)]
