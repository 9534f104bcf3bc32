"""Tree attention by a flash-attention kernel of the hub: one variable-length call, keys gathered per run.

A run is a stretch of tokens that each follow the one before; its keys are the path from the root to its last token.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from slipstream.packing.attention.layout import ROOT, TreeLayout

AITER, FLASH_3, FLASH_4 = (f"kernels-community/{name}" for name in ("aiter-flash-attn", "flash-attn3", "flash-attn4"))
WITHOUT_SOFTCAP = (AITER, FLASH_4)


class Paths(NamedTuple):
    """`keys`: `(M,)` int64, the paths of all runs one after the other; cumulative lengths are int32."""

    keys: Tensor
    cumulative_queries: Tensor
    cumulative_keys: Tensor
    longest_queries: int
    longest_keys: int


def paths(layout: TreeLayout, device: torch.device) -> Paths:
    starts = np.union1d(np.flatnonzero(layout.parent != np.arange(layout.size) - 1), [0])
    ends = np.append(starts[1:], layout.size)
    found: list[np.ndarray] = []
    for start, end in zip(starts, ends, strict=True):
        before = layout.parent[start]
        own = np.arange(start, end)
        if before != ROOT:
            above = found[np.searchsorted(starts, before, side="right") - 1]
            own = np.concatenate([above[: layout.depth[before] + 1], own])
        found.append(own)
    lengths = [len(path) for path in found]

    def cumulative(sizes: Any) -> Tensor:
        return torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32, device=device)

    return Paths(
        torch.from_numpy(np.concatenate(found)).to(device),
        cumulative(ends - starts),
        cumulative(lengths),
        int((ends - starts).max()),
        max(lengths),
    )


def kernel_repository() -> str | None:
    """The hub kernel for this machine's GPU; None where there is none."""
    if not torch.cuda.is_available():
        return None
    if torch.version.hip:
        return AITER
    major = torch.cuda.get_device_capability()[0]
    return FLASH_4 if major >= 10 else FLASH_3 if major >= 8 else None


def flash_forward(repository: str) -> Callable[..., Tensor]:
    """transformers' call of a hub kernel, which knows each kernel's signature. Raises if it cannot be loaded."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward, lazy_import_flash_attention

    lazy_import_flash_attention(repository)

    return functools.partial(_flash_attention_forward, attn_implementation=repository)


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    forward: Callable[..., Tensor],
) -> Tensor:
    """`query` `(1, heads, N, D)`, `key` `(1, kv_heads, N, D)`, `value` `(1, kv_heads, N, V)`; `(1, heads, N, V)`.

    `forward` takes `(1, tokens, heads, D)` and aligns the causal mask with the last key, as flash-attention does.
    """
    at = layout.memo(("paths", query.device), lambda: paths(layout, query.device))
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    value = functional.pad(value, (0, head_dim - value_dim)) if value_dim < head_dim else value
    out = forward(
        query.transpose(1, 2),
        *(x.index_select(2, at.keys).transpose(1, 2) for x in (key, value)),
        attention_mask=None,
        query_length=layout.size,
        is_causal=True,
        softmax_scale=scale,
        sliding_window=window,
        softcap=softcap,
        cu_seq_lens_q=at.cumulative_queries,
        cu_seq_lens_k=at.cumulative_keys,
        max_length_q=at.longest_queries,
        max_length_k=at.longest_keys,
    )
    return out.transpose(1, 2)[..., :value_dim]
