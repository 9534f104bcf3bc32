"""Gated DeltaNet layers over a tree: the convolution reads a token's own path, and the delta rule starts each segment
from the state that its parent segment ended with.

The layers of transformers call two functions of their module and hand them the row's layout; these take their place.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from slipstream.packing.attention.layout import ROOT, TreeLayout

MODEL_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
CHUNK = 64  # of the chunked delta rule: segments are padded to a multiple of it


class Batch(NamedTuple):
    """Segments of one level of the tree and about one length.

    Attributes:
        tokens: `(segments, length)` int64; the number of tokens in the row where a segment is padded.
        parents, segments: indices of segments; `keep`: whether some of them have descendants.
    """

    tokens: Tensor
    parents: list[int]
    segments: list[int]
    keep: bool


def install(model: torch.nn.Module) -> None:
    """Let the Gated DeltaNet layers of a model follow the layout; ordinary forwards are as before.

    Raises ValueError if this version of transformers computes those layers in another way.
    """
    for kind in {type(m) for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet")}:
        module: Any = sys.modules[kind.__module__]
        called = set(_names(kind.forward))
        for name, make in (("causal_conv1d_fn", _tree_convolution), ("torch_chunk_gated_delta_rule", _tree_rule)):
            function = getattr(module, name, None)
            if function is None or name not in called:
                raise ValueError(
                    f"{kind.__name__} of this version of transformers does not call {name}: use transformers 5.24"
                )
            if not hasattr(function, "without_tree"):
                setattr(module, name, make(function))


def _names(function: Any) -> tuple[str, ...]:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__.co_names


def _tree_convolution(without_tree: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def convolution(hidden: Tensor, *args: Any, tree_layout: TreeLayout | None = None, **kwargs: Any) -> Tensor:
        if tree_layout is None:
            return without_tree(hidden, *args, **kwargs)
        return tree_convolution(hidden, tree_layout, *args, activation=kwargs.get("activation"))

    convolution.without_tree = without_tree  # type: ignore[attr-defined]
    return convolution


def _tree_rule(without_tree: Callable[..., Any]) -> Callable[..., Any]:
    def rule(*args: Any, tree_layout: TreeLayout | None = None, **kwargs: Any) -> Any:
        if tree_layout is None:
            return without_tree(*args, **kwargs)
        if kwargs.pop("initial_state", None) is not None or kwargs.pop("output_final_state", False):
            raise ValueError("a packed row is forwarded without a cache: pass use_cache=False")
        return tree_delta_rule(without_tree, *args, layout=tree_layout, **kwargs), None

    rule.without_tree = without_tree  # type: ignore[attr-defined]
    return rule


def tree_convolution(
    hidden: Tensor, layout: TreeLayout, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None
) -> Tensor:
    """Causal depthwise convolution along the path. `hidden` `(1, C, N)`, `weight` `(C, width)`; `(1, C, N)`."""
    width = weight.shape[-1]
    before = layout.memo(("before", width, hidden.device), lambda: _before(layout, width, hidden.device))
    padded = functional.pad(hidden.to(weight.dtype), (0, 1))
    wide = torch.promote_types(weight.dtype, torch.float32)
    out = torch.zeros(hidden.shape, dtype=wide, device=hidden.device)
    for step in range(width):
        out = out + padded.index_select(2, before[step]) * weight[:, width - 1 - step, None].to(wide)
    if bias is not None:
        out = out + bias[:, None]
    out = out.to(weight.dtype)
    return (out if activation is None else ACT2FN[activation](out)).to(hidden.dtype)


def _before(layout: TreeLayout, width: int, device: torch.device) -> Tensor:
    """`(width, N)`: the token that many steps before on the path; `N` before its beginning."""
    parent = np.append(np.where(layout.parent == ROOT, layout.size, layout.parent), layout.size)
    steps = [np.arange(layout.size)]
    for _ in range(width - 1):
        steps.append(parent[steps[-1]])
    return torch.from_numpy(np.stack(steps)).to(device)


def tree_delta_rule(
    rule: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    layout: TreeLayout,
    **kwargs: Any,
) -> Tensor:
    """`(1, N, heads, V)`, for inputs `(1, N, heads, …)`; `rule` computes ordinary sequences `(B, length, …)`.

    Zeros for all five inputs leave a state as it is, so segments of one level are padded and computed together.
    """
    batches, order = layout.memo(("delta", query.device), lambda: _batches(layout, query.device))
    inputs = [functional.pad(x[0], (0, 0) * (x.ndim - 2) + (0, 1)) for x in (query, key, value, g, beta)]
    states: dict[int, Tensor] = {}
    outs = []
    for tokens, parents, segments, keep in batches:
        q, k, v, decay, rate = (x[tokens] for x in inputs)
        start = None if parents[0] == ROOT else torch.stack([states[parent] for parent in parents])
        out, end = rule(q, k, v, g=decay, beta=rate, initial_state=start, output_final_state=keep, **kwargs)
        outs.append(out.flatten(0, 1))
        if keep:
            assert end is not None
            states.update(zip(segments, end.unbind(0), strict=True))
    return torch.cat(outs).index_select(0, order)[None]


def _batches(layout: TreeLayout, device: torch.device) -> tuple[list[Batch], Tensor]:
    """Batches with parents first, and `(N,)`: where each token is in their outputs put one after the other."""
    inner = {segment.parent for segment in layout.segments}
    levels: list[int] = []
    groups: dict[tuple[int, bool, int], list[int]] = {}
    for number, (start, end, parent, _) in enumerate(layout.segments):
        levels.append(0 if parent == ROOT else levels[parent] + 1)
        groups.setdefault((levels[-1], number in inner, -(-(end - start) // CHUNK)), []).append(number)
    batches, order, offset = [], np.zeros(layout.size, dtype=np.int64), 0
    for (_, keep, _), numbers in sorted(groups.items()):
        members = [layout.segments[number] for number in numbers]
        length = max(segment.end - segment.start for segment in members)
        index = np.full((len(members), length), layout.size)
        for row, (start, end, _, _) in enumerate(members):
            index[row, : end - start] = np.arange(start, end)
            order[start:end] = offset + row * length + np.arange(end - start)
        offset += index.size
        parents = [segment.parent for segment in members]
        batches.append(Batch(torch.from_numpy(index).to(device), parents, numbers, keep))
    return batches, torch.from_numpy(order).to(device)
