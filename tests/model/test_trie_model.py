"""A packed row against its samples forwarded alone: the same log-probabilities, and the same gradient in all."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from slipstream.algorithm.loss import LossSettings, TokenTerms, token_loss
from slipstream.learner.forward import to_tensors, token_terms
from slipstream.packing.attention import use_tree_attention
from slipstream.packing.sample import Sample
from slipstream.packing.trie import ROOT, Row, attention_mask, pack
from tests.learner_replay import VOCABULARY, for_reference, made_up_sample, tiny_model
from tests.reference import policy_log_probs, reference_loss

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
CPU = torch.device("cpu")
TEMPERATURE = 0.8
CENTERED = LossSettings(True, 0.5, 2.0, 0.2, 0.3)
CLIPPED = LossSettings(False, 0.5, 2.0, 0.2, 0.3)
MODELS: dict[torch.dtype, Any] = {dtype: tiny_model(dtype=dtype) for dtype in (torch.float32, torch.float64)}
for model in MODELS.values():
    use_tree_attention(model)


def quick(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=SLOW)


@st.composite
def forests(draw: st.DrawFn) -> list[Sample]:
    """Samples over few tokens, so that many share a prefix; among them duplicates and prefixes of each other."""
    tokens = st.integers(3, 5)
    sequences = draw(st.lists(st.lists(tokens, min_size=2, max_size=9), min_size=1, max_size=5))
    for _ in range(draw(st.integers(0, 3))):
        base = draw(st.sampled_from(sequences))
        kept = draw(st.integers(1, len(base)))
        sequences.append([*base[:kept], *draw(st.lists(tokens, min_size=2 if kept < 2 else 0, max_size=3))])
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    samples = []
    for index, sequence in enumerate(draw(st.permutations(sequences))):
        trained = [False, *draw(st.lists(st.booleans(), min_size=len(sequence) - 1, max_size=len(sequence) - 1))]
        if not any(trained):
            trained[-1] = True
        head = draw(st.sampled_from([0, 3, VOCABULARY]))
        advantage = float(rng.normal())
        samples.append(made_up_sample(rng, sequence, trained, head, advantage=advantage, rollout_id=str(index)))
    return samples


def sample_of(sequence: list[int], seed: int, trained: list[bool] | None = None) -> Sample:
    rng = np.random.default_rng(seed)
    return made_up_sample(rng, sequence, trained or [False] + [True] * (len(sequence) - 1), 4, advantage=rng.normal())


A, B, C = [7, 8, 9, 10, 11], [7, 8, 9, 12], [20, 21]
FORESTS = {
    "single sample": [sample_of(A, 0)],
    "shortest sample": [sample_of(C, 0)],
    "duplicates": [sample_of(A, 0), sample_of(A, 1), sample_of(A, 2)],
    "prefixes of each other": [sample_of(A[:3], 0), sample_of(A, 1), sample_of(A[:4], 2), sample_of(A[:2], 3)],
    "branch at the last token": [sample_of([*A, 1], 0), sample_of([*A, 2], 1)],
    "branch at the first generated token": [
        sample_of([*B, 1, 2], 0, [False] * 4 + [True] * 2),
        sample_of([*B, 3], 1, [False] * 4 + [True]),
    ],
    "nothing shared": [sample_of(A, 0), sample_of(C, 1), sample_of([30, *B], 2)],
    "one token repeated": [sample_of([5] * 3, 0), sample_of([5] * 7, 1)],
}


def row_terms(samples: list[Sample], dtype: torch.dtype) -> tuple[Row, TokenTerms, Tensor]:
    row = pack(samples)
    return row, *token_terms(MODELS[dtype], to_tensors(row, CPU), TEMPERATURE)


def alone(sample: Sample, dtype: torch.dtype) -> Tensor:
    """log p of the whole vocabulary at the trained tokens of a sample: (terms, vocabulary)."""
    ids = torch.from_numpy(sample.input_ids).long()[None]
    logits = MODELS[dtype](input_ids=ids).logits[0, np.flatnonzero(sample.trained) - 1]
    return torch.log_softmax(logits / TEMPERATURE, dim=-1)


def check_log_probabilities(samples: list[Sample]) -> None:
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        with torch.no_grad():
            row, terms, entropy = row_terms(samples, dtype)
            expected = torch.cat([alone(sample, dtype) for sample in samples])
        assert len(expected) == row.num_terms
        chosen = torch.from_numpy(row.target).long()[:, None]
        assert torch.allclose(terms.logp, expected.gather(1, chosen)[:, 0], rtol=0, atol=tolerance)
        heads = expected.gather(1, torch.from_numpy(row.head_ids).long().clamp_min(0))
        assert torch.allclose(terms.head_logp[terms.head_mask], heads[terms.head_mask], rtol=0, atol=tolerance)
        assert torch.allclose(entropy, -(expected.exp() * expected).sum(-1), rtol=0, atol=10 * tolerance)


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_gradient(samples: list[Sample], objective: LossSettings) -> None:
    model = MODELS[torch.float64]
    _, terms, _ = row_terms(samples, torch.float64)
    total = token_loss(terms, objective).sum()
    packed = gradients(total, model)
    options = {
        "score_centering": objective.score_centering,
        "clip_min": objective.clip_min,
        "clip_max": objective.clip_max,
        "epsilon": objective.epsilon,
        "epsilon_high": objective.epsilon_high,
        "temperature": TEMPERATURE,
    }
    losses = [reference_loss(model, [[for_reference(s)]], **options) * s.num_trained for s in samples]
    expected = gradients(torch.stack(losses).sum(), model)
    assert math.isclose(total.item(), sum(loss.item() for loss in losses), rel_tol=1e-10, abs_tol=1e-10)
    scale = max(value.abs().max().item() for value in expected.values())
    for name, value in expected.items():
        assert (packed[name] - value).abs().max().item() <= 1e-10 * (1 + scale), name


def check_layout(samples: list[Sample]) -> None:
    row = pack(samples)
    attends = attention_mask(row.parent)
    paths = set()
    for node in range(row.num_tokens):
        path = [node]
        while row.parent[path[-1]] != ROOT:
            path.append(int(row.parent[path[-1]]))
        assert row.position_ids[node] == len(path) - 1, "a position id is the depth"
        assert sorted(path) == np.flatnonzero(attends[node]).tolist(), "a node attends to its path and nothing else"
        paths.add(tuple(row.input_ids[path[::-1]]))
    assert {tuple(sample.input_ids) for sample in samples} <= paths
    assert row.num_tokens <= sum(map(len, samples)) == row.raw_tokens
    assert (row.num_samples, row.num_terms) == (len(samples), sum(sample.num_trained for sample in samples))
    # a node is (prefix, next token); the last token of a sample is a leaf of its own
    inner = {tuple(s.input_ids[: end + 1]) for s in samples for end in range(1, len(s))}
    assert row.num_tokens == len(inner) + len(samples)
    expected = np.concatenate([s.input_ids[s.trained] for s in samples])
    assert row.target.tolist() == expected.tolist()
    assert row.sample.tolist() == [i for i, s in enumerate(samples) for _ in range(s.num_trained)]


@quick(100)
@given(forests())
def test_layout_of_random_forests(samples: list[Sample]) -> None:
    check_layout(samples)


@quick(25)
@given(forests())
def test_log_probabilities_equal_those_of_samples_alone(samples: list[Sample]) -> None:
    check_log_probabilities(samples)


@pytest.mark.parametrize("objective", [CENTERED, CLIPPED], ids=["centered", "clipped"])
@quick(15)
@given(samples=forests())
def test_gradient_equals_the_sum_over_samples_alone(objective: LossSettings, samples: list[Sample]) -> None:
    check_gradient(samples, objective)


@pytest.mark.parametrize("samples", FORESTS.values(), ids=FORESTS.keys())
def test_shapes_that_matter(samples: list[Sample]) -> None:
    check_layout(samples)
    check_log_probabilities(samples)
    check_gradient(samples, CENTERED)
    check_gradient(samples, CLIPPED)


def test_shared_prefixes_are_forwarded_once() -> None:
    assert pack(FORESTS["duplicates"]).num_tokens == 4 + 3
    assert pack(FORESTS["branch at the last token"]).num_tokens == 4 + 2 * 2
    assert pack(FORESTS["nothing shared"]).num_tokens == 5 + 2 + 5


def test_policy_of_the_reference_is_that_of_a_sample_alone() -> None:
    sample = sample_of(A, 0)
    with torch.no_grad():
        expected = policy_log_probs(MODELS[torch.float64], for_reference(sample), TEMPERATURE)
        assert torch.allclose(alone(sample, torch.float64), expected, rtol=0, atol=1e-12)


def test_a_filler_row_has_no_gradient_but_reaches_every_parameter() -> None:
    model = MODELS[torch.float64]
    _, terms, _ = row_terms([], torch.float64)
    found = gradients(token_loss(terms, CENTERED).sum(), model)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert not any(value.any() for value in found.values())
