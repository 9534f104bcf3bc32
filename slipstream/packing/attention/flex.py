"""Tree attention by `flex_attention`: for GPUs without a flash-attention kernel, and for float32 on any GPU."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from slipstream.packing.attention.layout import TreeLayout

BLOCK = 128


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`query` `(1, heads, N, D)`, `key`, `value` `(1, kv_heads, N, D)`; `(1, heads, N, D)`."""
    mask = layout.memo(("flex", window, query.device), lambda: block_mask(layout, window, query.device))
    heads, kv_heads = query.shape[1], key.shape[1]
    grouped = heads != kv_heads
    if grouped and heads & (heads - 1):  # the grouped kernel wants a power of two
        key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
        grouped = False
    attention = _compiled() if query.device.type != "cpu" else flex_attention
    cap = None if softcap is None else _soft_cap(softcap)
    return attention(query, key, value, score_mod=cap, block_mask=mask, scale=scale, enable_gqa=grouped)


def block_mask(layout: TreeLayout, window: int | None, device: torch.device) -> BlockMask:
    """Which squares of `BLOCK` tokens hold a pair that attends, found without the `N x N` mask."""
    needed, full = needed_blocks(layout, window)
    subtree_end, depth = layout.tensor("subtree_end", device), layout.tensor("depth", device)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & (query < subtree_end[key])
        return seen if window is None else seen & (depth[query] - depth[key] < window)

    def ordered(blocks: np.ndarray) -> tuple[Tensor, Tensor]:
        count = blocks.sum(1, dtype=np.int32)
        order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
        return tuple(torch.from_numpy(x)[None, None].to(device) for x in (count, order))  # type: ignore[return-value]

    return BlockMask.from_kv_blocks(
        *ordered(needed & ~full), *ordered(full), BLOCK_SIZE=BLOCK, mask_mod=attends, seq_lengths=(layout.size,) * 2
    )


def needed_blocks(layout: TreeLayout, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """`(blocks, blocks)` bool, queries by keys: may hold a pair that attends; and all its pairs do."""
    starts = np.arange(0, layout.size, BLOCK)
    queries, keys = starts[:, None], starts[None]
    last, first = (f.reduceat(layout.subtree_end, starts) for f in (np.maximum, np.minimum))
    needed = (queries >= keys) & (queries < last)
    full = (queries > keys) & (queries + BLOCK <= first)
    if window is not None:
        deepest, shallowest = (f.reduceat(layout.depth, starts) for f in (np.maximum, np.minimum))
        needed &= shallowest[:, None] - deepest < window
        full &= deepest[:, None] - shallowest < window
    return needed, full


def _soft_cap(cap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
