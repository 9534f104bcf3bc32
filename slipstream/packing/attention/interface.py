"""The attention function that packed rows go through, registered with transformers under `TREE`.

The row's layout travels as the keyword `tree_layout` down to each layer, so that a recomputed layer sees it again.
"""

import functools
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from slipstream.packing.attention import delta, flex, varlen
from slipstream.packing.attention.blockwise import blockwise_attention
from slipstream.packing.attention.layout import TreeLayout
from slipstream.packing.attention.support import check_model

TREE = "slipstream_tree"


class Backend(Protocol):
    """`query` `(1, heads, N, D)`, `key` and `value` of the `kv_heads`; the output is like `query`."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: TreeLayout,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor: ...


class _Forward:
    """One forward of a packed row: which windows the masks and the attention of its layers were asked for."""

    def __init__(self) -> None:
        self.masked: set[int | None] = set()
        self.attended: set[int | None] = set()


_current: ContextVar[_Forward | None] = ContextVar("packed_forward", default=None)


@functools.cache
def choose_backend(device: str, dtype: torch.dtype) -> Backend:
    """By kind of device: exact dense blocks on a CPU; on a GPU its flash-attention kernel, else `flex_attention`."""
    if device == "cpu" or dtype == torch.float64:
        return blockwise_attention
    repository = varlen.kernel_repository() if device == "cuda" else None
    if repository is not None and dtype in (torch.bfloat16, torch.float16):
        try:
            return functools.partial(varlen.tree_attention, forward=varlen.flash_forward(repository))
        except Exception as error:
            warnings.warn(f"{repository} cannot be loaded, flex_attention takes its place: {error}", stacklevel=2)
    return flex.tree_attention


def use_tree_attention(model: PreTrainedModel, device: str | torch.device = "cpu") -> None:
    """Switch a model to tree attention. Raises ValueError (see `check_model`) where that cannot be right."""
    check_model(model.config, type(model), device)
    delta.install(model)
    model.set_attn_implementation(TREE)
    if model.config.get_text_config(decoder=True)._attn_implementation != TREE:
        raise ValueError(
            f"model type {model.config.model_type!r} did not take the attention implementation {TREE!r}: its attention "
            "does not go through transformers' AttentionInterface"
        )


def tree_forward(model: nn.Module, layout: TreeLayout, **inputs: Any) -> Any:
    """`model(**inputs)` for one packed row, `(1, N)`; the model may be wrapped (DDP, PEFT).

    Raises RuntimeError if the layout did not reach the model's attention.
    """
    forward = _Forward()
    token = _current.set(forward)
    try:
        output = model(**inputs, attention_mask=None, tree_layout=layout)
    finally:
        _current.reset(token)
    if not forward.attended:
        raise RuntimeError(f"the model does not use tree attention: call use_tree_attention (now: {_used(model)})")
    if (masked := forward.masked - {None}) and not forward.attended - {None}:
        raise RuntimeError(
            f"the model masks a sliding window of {masked} tokens without telling its "
            "attention function, so its packed rows would be wrong: set use_sliding_window=False if it does not need it"
        )
    return output


def _used(model: nn.Module) -> Any:
    return next((m.config._attn_implementation for m in model.modules() if isinstance(m, PreTrainedModel)), None)


def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    tree_layout: TreeLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: `(1, heads, N, D)` in, `(1, N, heads, V)` out."""
    name = type(module).__name__
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    forward = _current.get()
    if tree_layout is None:
        if forward is not None and causal:
            raise RuntimeError(f"{name} does not receive the row's layout: its model drops keyword arguments")
        return _without_tree(
            module, query, key, value, attention_mask, dropout, scaling, softcap, is_causal, s_aux, position_bias
        )
    if not causal or not query.shape[2] == key.shape[2] == tree_layout.size or query.shape[0] != 1:
        raise ValueError(
            f"{name}: tree attention is causal self-attention over one packed row of {tree_layout.size} tokens, not "
            f"queries {tuple(query.shape)} against keys {tuple(key.shape)}, causal: {causal}"
        )
    for what, given in (
        ("attention sinks", s_aux),
        ("a position bias", position_bias),
        ("a mask of its own", attention_mask),
    ):
        if given is not None:
            raise ValueError(f"{name} has {what}, which tree attention does not support: train another model")
    if forward is not None:
        forward.attended.add(sliding_window)
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    backend: Backend = choose_backend(query.device.type, query.dtype)
    if dropout > 0:
        if softcap is not None or query.device.type != "cpu":
            raise ValueError(
                f"{name} has attention dropout {dropout}: set attention_dropout to 0 in the model's config"
            )
        backend = functools.partial(_with_dropout, dropout=dropout)
    out = backend(query, key, value, tree_layout, scale, sliding_window, softcap)
    return out.transpose(1, 2).contiguous(), None


def _with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    dropout: float,
) -> Tensor:
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    mask = layout.memo(("dense", window, query.device), lambda: layout.attends(query.device, window))
    return scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, scale=scale)


def _without_tree(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    is_causal: bool | None,
    s_aux: Tensor | None,
    position_bias: Tensor | None,
) -> tuple[Tensor, None]:
    """An ordinary forward, as under sdpa, of a model that is switched to tree attention."""
    if softcap is not None or s_aux is not None:
        raise ValueError(
            f"{type(module).__name__} outside packed rows: call model.set_attn_implementation('eager') first"
        )
    return sdpa_attention_forward(
        module, query, key, value, mask, dropout, scaling, is_causal=is_causal, position_bias=position_bias
    )


def tree_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' mask function: no mask for a packed row, sdpa's for any other forward."""
    forward = _current.get()
    if forward is None:
        return sdpa_mask(*args, **kwargs)
    forward.masked.add(kwargs.get("local_size"))
    return None


def _register(name: str, attention: Callable[..., Any]) -> None:
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, tree_mask)


_register(TREE, tree_attention_forward)
