"""One packed row through the model: the log-probabilities that the loss needs."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.algorithm.logprobs import Candidates, TokenLogprobs
from slipstream.algorithm.loss import TokenTerms
from slipstream.learner.policy_head import policy_logprobs
from slipstream.packing.attention import TreeLayout, tree_forward
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
    candidates: Candidates | None = None


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
        candidates=_candidates(row, device),
    )


def _candidates(row: Row, device: torch.device) -> Candidates | None:
    if row.candidate_offsets is None or row.candidate_ids is None:
        return None
    ids = torch.from_numpy(row.candidate_ids).to(device=device, dtype=torch.long)
    return Candidates(torch.from_numpy(row.candidate_offsets).long(), ids)


def token_terms(model: torch.nn.Module, row: RowTensors, temperature: float) -> tuple[TokenTerms, Tensor]:
    """Forward the row; the terms of its `L` trained tokens, and `(L,)` entropy of `p` at each (detached).

    Log-probabilities are in float32 at least. With candidate sets they, the entropy and the head are over those.
    """
    inputs = {"input_ids": row.input_ids, "position_ids": row.position_ids, "use_cache": False}
    run = functools.partial(tree_forward, model, row.layout)
    found = policy_logprobs(model, inputs, row.predict, row.target, row.head_ids, temperature, row.candidates, run)
    return terms_of(found, row), found.entropy


def terms_of(found: TokenLogprobs, row: RowTensors) -> TokenTerms:
    """What the objective needs, in the log-probabilities' dtype."""
    dtype = found.logp.dtype
    return TokenTerms(
        logp=found.logp,
        logq=row.logq.to(dtype),
        advantage=row.advantage.to(dtype),
        head_logp=found.head_logp,
        head_logq=row.head_logq.to(dtype),
        head_mask=found.head_valid,
    )
