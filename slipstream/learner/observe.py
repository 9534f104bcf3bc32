"""What is measured on the trained tokens of one row. Pure: tensors in, observations (name, value, weight) out."""

import torch

from slipstream.algorithm.loss import LossSettings, TokenTerms, ratio_stats
from slipstream.packing.trie import Row
from slipstream.rollout.types import Observation


def row_observations(row: Row, terms: TokenTerms, entropy: torch.Tensor, settings: LossSettings) -> list[Observation]:
    """The `sampling/*`, `entropy` and `clip_ratio/*` metrics of a row with at least one trained token.

    Args:
        terms, entropy: of the row's `L` trained tokens, each `(L,)`.
    """
    stats, count = ratio_stats(terms, settings), row.num_terms
    region = stats.clipped_low | stats.clipped_high
    found: list[Observation] = [
        ("sampling/sampling_logp_difference/mean", stats.logp_difference.mean().item(), count),
        ("sampling/sampling_logp_difference/max", stats.logp_difference.max().item(), 1),
        ("sampling/importance_sampling_ratio/mean", stats.ratio.mean().item(), count),
        ("sampling/importance_sampling_ratio/min", stats.ratio.min().item(), 1),
        ("sampling/importance_sampling_ratio/max", stats.ratio.max().item(), 1),
        ("sampling/masked_mean", stats.masked.float().mean().item(), count),
        ("entropy", entropy.mean().item(), count),
        ("clip_ratio/region_mean", region.float().mean().item(), count),
    ]
    if settings.score_centering:
        found.append(("sampling/sampler_mass", stats.sampler_mass.mean().item(), count))
    owner = torch.from_numpy(row.sample).long()
    sizes = torch.bincount(owner, minlength=row.num_samples)
    owns = sizes > 0  # a sample without a trained token has no share
    for side, clipped in (("low", stats.clipped_low.cpu()), ("high", stats.clipped_high.cpu())):
        share = torch.bincount(owner, weights=clipped.double(), minlength=row.num_samples)[owns] / sizes[owns]
        extreme, value = ("min", share.min()) if side == "low" else ("max", share.max())
        found.append((f"clip_ratio/{side}_mean", clipped.float().mean().item(), count))
        found.append((f"clip_ratio/{side}_{extreme}", value.item(), 1))
    return found
