"""Exact tree attention from dense blocks, for CPUs: partial softmaxes joined by their log-sum-exp.

The backward of a block needs only the row's final output and log-sum-exp, so blocks never wait for each other.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.packing.attention.layout import TreeLayout
from slipstream.packing.attention.plan import Block, Plan, make_plan

CALL_OVERHEAD = 1_000_000  # a call costs as much time as this many multiply-adds of one query-key pair
KEPT_MASK = 512 * 512  # larger masks (sliding windows) are made anew in each layer
SOFTCAP_QUERIES = 256  # queries at a time where scores are materialised

_aten = torch.ops.aten
_flash = getattr(_aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_flash_backward = getattr(_aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """`query` `(1, heads, N, D)`, `key` `(1, kv_heads, N, D)`, `value` `(1, kv_heads, N, V)`; `(1, heads, N, V)`."""
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    width = max(head_dim, value_dim)  # zeros change neither scores nor the first columns of the output
    query, key, value = (functional.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    if window is not None and window > int(layout.depth.max()):
        window = None
    overhead = CALL_OVERHEAD // (query.shape[1] * width)
    plan = layout.memo(("plan", window, overhead), lambda: make_plan(layout, window, overhead))
    heads, kv_heads = query.shape[1], key.shape[1]
    grouped = query[0].unflatten(0, (kv_heads, heads // kv_heads)).transpose(0, 1)
    out = _Blockwise.apply(grouped, key[0], value[0], layout, plan, scale, window, softcap)
    return out.transpose(0, 1).flatten(0, 1)[None, ..., :value_dim]


class _Blockwise(torch.autograd.Function):
    """`query` `(groups, kv_heads, N, D)`, `key`, `value` `(kv_heads, N, D)` -> like `query`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: TreeLayout,
        plan: Plan,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        kernel = _Kernel(layout, query.dtype, query.device, scale, window, softcap)
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.empty_like(query, dtype=wide, memory_format=torch.contiguous_format)
        lse = torch.empty(query.shape[:-1], dtype=wide, device=query.device)
        for block in plan.diagonal:
            part, part_lse = kernel.forward(block, query, key, value)
            out[:, :, block.q0 : block.q1] = part
            lse[:, :, block.q0 : block.q1] = part_lse
        for block in plan.above:
            part, part_lse = kernel.forward(block, query, key, value)
            where = slice(block.q0, block.q1)
            joined = torch.logaddexp(lse[:, :, where], part_lse)
            out[:, :, where].mul_((lse[:, :, where] - joined).exp_()[..., None])
            out[:, :, where].addcmul_(part.to(wide), (part_lse - joined).exp_()[..., None])
            lse[:, :, where] = joined
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.kernel, ctx.plan = kernel, plan
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        wide = lse.dtype
        to_query = torch.empty_like(query, dtype=wide, memory_format=torch.contiguous_format)
        to_key, to_value = (
            torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (key, value)
        )
        for blocks in (ctx.plan.diagonal, ctx.plan.above):
            for block in blocks:
                where, keys = slice(block.q0, block.q1), slice(block.k0, block.k1)
                dq, dk, dv = ctx.kernel.backward(block, grad, query, key, value, out, lse)
                if blocks is ctx.plan.diagonal:
                    to_query[:, :, where] = dq
                else:
                    to_query[:, :, where] += dq
                to_key[:, keys] += dk
                to_value[:, keys] += dv
        return to_query.to(query.dtype), to_key.to(key.dtype), to_value.to(value.dtype), *[None] * 5


class _Kernel:
    """One block: forward gives output and log-sum-exp, backward the gradients of its queries, keys and values."""

    def __init__(
        self,
        layout: TreeLayout,
        dtype: torch.dtype,
        device: torch.device,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        self.layout, self.dtype, self.device = layout, dtype, device
        self.scale, self.window, self.softcap = scale, window, softcap
        self.fused = softcap is None and device.type == "cpu" and _flash is not None and _flash_backward is not None

    def forward(self, block: Block, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self._cut(block, query, key, value)
        if self.fused:
            return _flash(  # type: ignore[misc]
                q, k, v, 0.0, block.kind == "causal", attn_mask=self._bias(block), scale=self.scale
            )
        outs, lses = [], []
        for rows in self._chunks(block):
            scores = self._scores(block, rows, q, k)[0]
            lse = scores.logsumexp(-1)
            outs.append((scores - lse[..., None]).exp_() @ v.to(lse.dtype))
            lses.append(lse)
        return torch.cat(outs, 2), torch.cat(lses, 2)

    def backward(
        self, block: Block, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._cut(block, query, key, value)
        where = slice(block.q0, block.q1)
        grad, out, lse = grad[:, :, where], out[:, :, where], lse[:, :, where]
        if self.fused:
            dq, dk, dv = _flash_backward(  # type: ignore[misc]
                grad, q, k, v, out, lse, 0.0, block.kind == "causal", attn_mask=self._bias(block), scale=self.scale
            )
            return dq, dk.sum(0, dtype=lse.dtype), dv.sum(0, dtype=lse.dtype)
        k, v, grad = k.to(lse.dtype), v.to(lse.dtype), grad.to(lse.dtype)
        dqs, dk, dv = [], torch.zeros_like(k[0]), torch.zeros_like(v[0])
        for rows in self._chunks(block):
            scores, slope = self._scores(block, rows, q, k)
            weights = (scores - lse[:, :, rows, None]).exp_()
            dv += (weights.transpose(-1, -2) @ grad[:, :, rows]).sum(0)
            mean = (grad[:, :, rows] * out[:, :, rows]).sum(-1, keepdim=True)
            ds = weights * (grad[:, :, rows] @ v.transpose(-1, -2) - mean) * self.scale
            if slope is not None:
                ds *= slope
            dqs.append(ds @ k)
            dk += (ds.transpose(-1, -2) @ q[:, :, rows].to(ds.dtype)).sum(0)
        return torch.cat(dqs, 2), dk, dv

    @staticmethod
    def _cut(block: Block, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        groups = query.shape[0]
        k, v = (x[:, block.k0 : block.k1].expand(groups, -1, -1, -1) for x in (key, value))
        return query[:, :, block.q0 : block.q1], k, v

    def _bias(self, block: Block) -> Tensor | None:
        """What to add to the scores. Finite, so that a query without any key in the block stays a number."""
        if block.kind != "masked":
            return None
        queries, keys = slice(block.q0, block.q1), slice(block.k0, block.k1)

        def make() -> Tensor:
            hidden = ~self.layout.attends(self.device, self.window, queries, keys)
            bias = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
            return bias.masked_fill_(hidden, torch.finfo(self.dtype).min / 2)

        if (block.q1 - block.q0) * (block.k1 - block.k0) > KEPT_MASK:
            return make()
        return self.layout.memo(("bias", block, self.window, self.dtype, self.device), make)

    def _chunks(self, block: Block) -> list[slice]:
        size = block.q1 - block.q0
        return [slice(i, min(i + SOFTCAP_QUERIES, size)) for i in range(0, size, SOFTCAP_QUERIES)]

    def _scores(self, block: Block, rows: slice, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores of some of the block's queries, masked; and the derivative of the soft cap."""
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = q[:, :, rows].to(wide) @ k.to(wide).transpose(-1, -2) * self.scale
        slope = None
        if self.softcap is not None:
            squashed = torch.tanh(scores / self.softcap)
            scores, slope = squashed * self.softcap, 1 - squashed.square()
        if block.kind != "full":
            queries = slice(block.q0 + rows.start, block.q0 + rows.stop)
            seen = self.layout.attends(self.device, self.window, queries, slice(block.k0, block.k1))
            scores = scores.masked_fill(~seen, torch.finfo(wide).min / 2)
        return scores, slope
