"""The two objectives of asynchronous GRPO, per trained token.

`p` is the policy being trained, `q` the sampler. Score centering: "Score Centering Stabilizes Off-policy Reinforcement
Learning", arXiv 2609.20807. Masks are selections, never products: `inf * 0` would be NaN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TAIL_FLOOR = 1e-6


@dataclass(frozen=True)
class LossSettings:
    """What the objective depends on. Bounds are of the ratio `w = p / q`."""

    score_centering: bool
    clip_min: float
    clip_max: float
    epsilon: float
    epsilon_high: float


@dataclass(frozen=True)
class TokenTerms:
    """Everything about the `L` trained tokens of a row; log-probabilities are float32 or wider.

    Attributes:
        logp: `(L,)` log p of the sampled token, with gradient.
        logq: `(L,)` log q of the sampled token.
        advantage: `(L,)`.
        head_logp: `(L, K)` log p of the sampler's likeliest tokens, with gradient. `K` may be 0.
        head_logq: `(L, K)` log q of them.
        head_mask: `(L, K)` bool, where the head has an entry.
    """

    logp: Tensor
    logq: Tensor
    advantage: Tensor
    head_logp: Tensor
    head_logq: Tensor
    head_mask: Tensor


def within(ratio: Tensor, settings: LossSettings) -> Tensor:
    """Where the ratio lies inside the mask's bounds (inclusive)."""
    return (ratio >= settings.clip_min) & (ratio <= settings.clip_max)


def masked_ratio(terms: TokenTerms, settings: LossSettings) -> Tensor:
    """`M(w)`: the ratio inside the bounds, else 0; `(L,)`, with gradient."""
    ratio, kept = _safe_ratio(terms, settings)
    return torch.where(kept, ratio, torch.zeros_like(ratio))


def _safe_ratio(terms: TokenTerms, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """The ratio, 1 where it lies outside the bounds, and where it lies inside.

    An overflow is selected away before `exp`: its gradient there would be `0 * inf`.
    """
    difference = terms.logp - terms.logq
    kept = within(difference.detach().exp(), settings)
    return torch.where(kept, difference, torch.zeros_like(difference)).exp(), kept


def centering(terms: TokenTerms, settings: LossSettings) -> Tensor:
    """The sampler's expectation of the masked, weighted score, `(L,)`; only its gradient has a meaning.

    The rest of `q` outside the head is modelled as a rescaled tail of `p`, which folds back on to the head because the
    expected score under `p` is zero.
    """
    log_p = terms.head_logp
    with torch.no_grad():
        zero = torch.zeros_like(log_p)
        p = torch.where(terms.head_mask, log_p.exp(), zero)
        q = torch.where(terms.head_mask, terms.head_logq.exp(), zero)
        ratio = torch.where(terms.head_mask, torch.exp(log_p - terms.head_logq), zero)
        kept = torch.where(within(ratio, settings), p, zero)
        rho = (1 - q.sum(-1)) / (1 - p.sum(-1)).clamp_min(TAIL_FLOOR)
        tail_ratio = torch.where(rho > 0, 1 / rho, torch.full_like(rho, float("inf")))
        tail_kept = within(tail_ratio, settings)
        weight = kept - torch.where(tail_kept[:, None], p, zero)
    return _weighted(weight, log_p).sum(-1)


def _weighted(weight: Tensor, log_p: Tensor) -> Tensor:
    """`weight * log_p`, 0 where the weight is 0, whatever `log_p` is there."""
    return torch.where(weight != 0, weight * log_p, torch.zeros_like(log_p))


def token_loss(terms: TokenTerms, settings: LossSettings) -> Tensor:
    """The loss of each trained token, `(L,)`, with gradient."""
    if settings.score_centering:
        score = _weighted(masked_ratio(terms, settings).detach(), terms.logp)
        return -terms.advantage * (score - centering(terms, settings))
    ratio, kept = _safe_ratio(terms, settings)
    clipped = ratio.clamp(1 - settings.epsilon, 1 + settings.epsilon_high)
    surrogate = torch.minimum(ratio * terms.advantage, clipped * terms.advantage)
    return -torch.where(kept, surrogate, torch.zeros_like(surrogate))


@dataclass(frozen=True)
class RatioStats:
    """Per trained token, before masking: each `(L,)`, detached."""

    ratio: Tensor
    logp_difference: Tensor
    masked: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    sampler_mass: Tensor


@torch.no_grad()
def ratio_stats(terms: TokenTerms, settings: LossSettings) -> RatioStats:
    """What the `sampling/*` and `clip_ratio/*` metrics are made of.

    A token counts as clipped where the surrogate is cut: below `1 - epsilon` with a negative advantage, above
    `1 + epsilon_high` with a positive one. Under score centering nothing is clipped, and the counts are of the tokens
    outside the trust region.
    """
    difference = terms.logp - terms.logq
    ratio = difference.exp()
    low, high = ratio < 1 - settings.epsilon, ratio > 1 + settings.epsilon_high
    if not settings.score_centering:
        low, high = low & (terms.advantage < 0), high & (terms.advantage > 0)
    mass = torch.where(terms.head_mask, terms.head_logq.exp(), torch.zeros_like(terms.head_logq)).sum(-1)
    return RatioStats(ratio, difference.abs(), ~within(ratio, settings), low, high, mass)
