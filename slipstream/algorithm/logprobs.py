"""Log-probabilities of a few tokens per position, without the logits of a whole row ever existing at once.

Logits are made a chunk of positions at a time, forward and again backward; a chunk is as many positions as keep
`positions * vocabulary` below a constant, so the extra memory grows with neither the row nor the vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# logits held at once: 2^26 in float32 are 256 MiB, a few of which are alive at a time
CHUNK_LOGITS_CUDA = 1 << 26
CHUNK_LOGITS_CPU = 1 << 22


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to the output of its head: `y = scale * x`, or `y = softcap * tanh(scale * x / softcap)`."""

    scale: float = 1.0
    softcap: float | None = None

    def apply_(self, logits: Tensor) -> Tensor:
        """In place."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def derivative_(self, grad: Tensor, transformed: Tensor) -> Tensor:
        """`grad` by `y` turned, in place, into the gradient by `x`; `transformed` is `y`."""
        if self.softcap is not None:
            grad.mul_(1 - (transformed / self.softcap).square_())
        if self.scale != 1.0:
            grad.mul_(self.scale)
        return grad


IDENTITY = LogitTransform()


@dataclass(frozen=True)
class Candidates:
    """The set of tokens that each of `L` tokens was drawn from; an empty one stands for the whole vocabulary.

    Attributes:
        offsets: `(L + 1,)` int64 on the CPU: token `i`'s set is `ids[offsets[i]:offsets[i + 1]]`.
        ids: int64, on the device of the logits.
    """

    offsets: Tensor
    ids: Tensor

    def mask(self, begin: int, end: int, size: int) -> Tensor:
        """`(end - begin, size)` bool: the candidates of the tokens `[begin, end)`."""
        first, last = int(self.offsets[begin]), int(self.offsets[end])
        lengths = self.offsets[begin : end + 1].diff().to(self.ids.device)
        owner = torch.repeat_interleave(
            torch.arange(end - begin, device=self.ids.device), lengths, output_size=last - first
        )
        mask = (lengths == 0)[:, None].expand(-1, size).clone()
        mask[owner, self.ids[first:last]] = True
        return mask


@dataclass(frozen=True)
class TokenLogprobs:
    """Of `L` positions, in float32 (float64 where the logits are).

    Attributes:
        logp: `(L,)` log-probability of the target, with gradient.
        head_logp: `(L, K)` log-probabilities of the head's tokens, with gradient where `head_valid`.
        head_valid: `(L, K)` bool: the entry is there, and among the candidates.
        entropy: `(L,)` of the distribution, in nats; without gradient.
        logsumexp: `(L,)` the logarithm of the normaliser; without gradient.
    """

    logp: Tensor
    head_logp: Tensor
    head_valid: Tensor
    entropy: Tensor
    logsumexp: Tensor


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    head_ids: Tensor,
    *,
    temperature: float = 1.0,
    transform: LogitTransform = IDENTITY,
    candidates: Candidates | None = None,
    chunk: int | None = None,
) -> TokenLogprobs:
    """Log-probabilities under the softmax of `transform(hidden @ weight.T + bias) / temperature`.

    Args:
        hidden: `(L, H)`; gradients flow to it, to `weight` `(V, H)` and to `bias` `(V,)`.
        target: `(L,)` int64, a candidate where there are candidates.
        head_ids: `(L, K)` int64, negative where there is no entry.
        candidates: the distribution is renormalised over these, and the head cut to them; None: the whole vocabulary.
        chunk: positions at a time; None: as many as keep the logits of a chunk below a constant.

    Under autocast the matrix products run in its dtype.
    """
    if chunk is None:
        budget = CHUNK_LOGITS_CPU if hidden.device.type == "cpu" else CHUNK_LOGITS_CUDA
        chunk = max(1, budget // len(weight))
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    settings = _Settings(temperature, transform, candidates, chunk, dtype)
    return TokenLogprobs(*_ChunkedLogprobs.apply(hidden, weight, bias, target, head_ids, settings))


@dataclass(frozen=True)
class _Settings:
    temperature: float
    transform: LogitTransform
    candidates: Candidates | None
    chunk: int
    compute_dtype: torch.dtype

    def scores(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Transformed logits of a chunk, before the temperature, in float32 or wider."""
        logits = torch.nn.functional.linear(hidden, weight, bias)
        return self.transform.apply_(logits if logits.dtype in (torch.float32, torch.float64) else logits.float())


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        head_ids: Tensor,
        settings: _Settings,
    ) -> tuple[Tensor, ...]:
        count, device = len(hidden), hidden.device
        wide = torch.float64 if settings.compute_dtype == torch.float64 else torch.float32
        logp, entropy, normalizer = (torch.empty(count, dtype=wide, device=device) for _ in range(3))
        head_logp = torch.empty(head_ids.shape, dtype=wide, device=device)
        valid = head_ids >= 0
        floor = torch.finfo(wide).min
        with torch.autocast(device.type, enabled=False):
            narrow, narrow_bias = _cast(weight, settings), _cast(bias, settings)
            for begin in range(0, count, settings.chunk):
                part = slice(begin, min(begin + settings.chunk, count))
                scores = settings.scores(_cast(hidden[part], settings), narrow, narrow_bias)
                scores.div_(settings.temperature).clamp_(min=floor)
                head = head_ids[part].clamp_min(0)
                found, found_head = scores.gather(1, target[part, None])[:, 0], scores.gather(1, head)
                if settings.candidates is not None:
                    inside = settings.candidates.mask(part.start, part.stop, scores.shape[1])
                    valid[part] &= inside.gather(1, head)
                    scores.masked_fill_(~inside, floor)
                total = torch.logsumexp(scores, dim=-1)
                normalizer[part] = total
                logp[part] = found - total
                head_logp[part] = found_head - total[:, None]
                mean = (scores - total[:, None]).exp_().mul_(scores).sum(-1)
                entropy[part] = total - mean
        ctx.settings = settings
        ctx.has_bias = bias is not None
        ctx.save_for_backward(hidden, weight, target, head_ids, valid, normalizer, *([] if bias is None else [bias]))
        ctx.mark_non_differentiable(valid, entropy, normalizer)
        return logp, head_logp, valid, entropy, normalizer

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_head: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        settings: _Settings = ctx.settings
        hidden, weight, target, head_ids, valid, normalizer, *rest = ctx.saved_tensors
        bias = rest[0] if ctx.has_bias else None
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # many chunks are added up: not in half precision
        wide = weight.dtype if weight.dtype == torch.float64 else torch.float32
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if wants_weight else None
        grad_bias = torch.zeros(len(weight), dtype=wide, device=weight.device) if wants_bias else None
        grad_head = torch.where(valid, grad_head, torch.zeros_like(grad_head))
        with torch.autocast(hidden.device.type, enabled=False):
            narrow, narrow_bias = _cast(weight, settings), _cast(bias, settings)
            for begin in range(0, len(hidden), settings.chunk):
                part = slice(begin, min(begin + settings.chunk, len(hidden)))
                given = _cast(hidden[part], settings)
                scores = settings.scores(given, narrow, narrow_bias)
                grad = (scores / settings.temperature).sub_(normalizer[part, None]).exp_()
                if settings.candidates is not None:
                    inside = settings.candidates.mask(part.start, part.stop, scores.shape[1])
                    grad.masked_fill_(~inside, 0.0)
                grad.mul_(-(grad_logp[part] + grad_head[part].sum(-1))[:, None])
                grad.scatter_add_(1, target[part, None], grad_logp[part, None])
                grad.scatter_add_(1, head_ids[part].clamp_min(0), grad_head[part])
                grad = settings.transform.derivative_(grad.div_(settings.temperature), scores)
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
                grad = grad.to(settings.compute_dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = grad @ narrow
                if grad_weight is not None:
                    if grad.dtype == wide:
                        grad_weight.addmm_(grad.t(), given)
                    else:
                        grad_weight += grad.t() @ given
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _cast(tensor: Any, settings: _Settings) -> Any:
    return None if tensor is None else tensor.to(settings.compute_dtype)
