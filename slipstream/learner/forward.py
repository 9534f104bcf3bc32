"""One packed row through the model: the log-probabilities that the loss needs."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithm.loss import TokenTerms
from slipstream.packing.attention import TreeLayout, tree_forward
from slipstream.packing.sample import EMPTY
from slipstream.packing.trie import Row


@dataclass(frozen=True)
class RowTensors:
    """A row on a device; see `slipstream.packing.trie.Row` for shapes."""

    input_ids: Tensor
    position_ids: Tensor
    layout: TreeLayout
    predict: Tensor
    target: Tensor
    logq: Tensor
    advantage: Tensor
    head_ids: Tensor
    head_logq: Tensor


def to_tensors(row: Row, device: torch.device) -> RowTensors:
    def ids(array: Any) -> Tensor:
        return torch.from_numpy(array).to(device=device, dtype=torch.long)

    def floats(array: Any) -> Tensor:
        return torch.from_numpy(array).to(device=device, dtype=torch.float32)

    return RowTensors(
        input_ids=ids(row.input_ids)[None],
        position_ids=ids(row.position_ids)[None],
        layout=TreeLayout(row.parent),
        predict=ids(row.predict),
        target=ids(row.target),
        logq=floats(row.logq),
        advantage=floats(row.advantage),
        head_ids=ids(row.head_ids),
        head_logq=floats(row.head_logq),
    )


def token_terms(model: torch.nn.Module, row: RowTensors, temperature: float) -> tuple[TokenTerms, Tensor]:
    """Forward the row; the terms of its `L` trained tokens, and `(L,)` entropy of `p` at each (detached).

    Logits are made for the `L` positions that predict a trained token only, and handled in float32 at least.
    """
    output = tree_forward(
        model,
        row.layout,
        input_ids=row.input_ids,
        position_ids=row.position_ids,
        logits_to_keep=row.predict,
        use_cache=False,
    )
    logits = output.logits[0]
    logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    normalizer = torch.logsumexp(logits, dim=-1)
    logp = logits.gather(1, row.target[:, None])[:, 0] - normalizer
    mask = row.head_ids != EMPTY
    head_logp = logits.gather(1, row.head_ids.clamp_min(0)) - normalizer[:, None]
    with torch.no_grad():
        logprobs = logits - normalizer[:, None]
        entropy = -(logprobs.exp() * logprobs).nan_to_num(0.0).sum(-1)
    dtype = logits.dtype
    terms = TokenTerms(logp, row.logq.to(dtype), row.advantage.to(dtype), head_logp, row.head_logq.to(dtype), mask)
    return terms, entropy
