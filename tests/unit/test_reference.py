"""The float64 reference loss itself, against what can be worked out by hand. Gradients are those of the logits."""

import math

import pytest
import torch
from torch import nn

from tests.models import new_model
from tests.reference import (
    Sample,
    float64_model,
    group_advantages,
    group_is_dropped,
    policy_log_probs,
    ratios,
    reference_loss,
    sample_token_losses,
)

V = 6
BOUNDS = {"clip_min": 0.5, "clip_max": 2.0}


class Bigram(nn.Module):
    """Next-token logits that depend on the last token only, so that a gradient row belongs to one position."""

    def __init__(self, logits):
        super().__init__()
        self.table = nn.Parameter(logits.clone())

    def forward(self, input_ids):
        return type("Output", (), {"logits": self.table[input_ids]})


def random_logits(seed, scale=1.5):
    return torch.randn(V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def sample_of(log_q, prompt, completion, *, head_size=V, advantage=1.0, **changes):
    """A sample with the ratios and heads of a sampler whose log-probabilities after token i are row i of `log_q`."""
    before = [prompt[-1], *completion[:-1]]
    heads = [log_q[i].topk(head_size) for i in before]
    fields = {
        "prompt_ids": prompt,
        "completion_ids": completion,
        "trained": [True] * len(completion),
        "sampler_logprobs": [log_q[i, y].item() for i, y in zip(before, completion, strict=True)],
        "advantage": advantage,
        "head_ids": [head.indices.tolist() for head in heads],
        "head_logprobs": [head.values.tolist() for head in heads],
    }
    return Sample(**(fields | changes))


def one_token(log_q, token, **changes):
    """One completion token after token 0: its gradient is row 0 of the table."""
    return sample_of(log_q, [1, 0], [token], **changes)


def gradient(model, microbatches, **options):
    model.zero_grad()
    reference_loss(model, microbatches, **({"score_centering": True} | BOUNDS | options)).backward()
    return model.table.grad.clone()


def score(p, v):
    """Gradient of log p(v) by the logits."""
    return nn.functional.one_hot(torch.tensor(v), V).double() - p


def masked(ratio):
    return torch.where((ratio >= BOUNDS["clip_min"]) & (ratio <= BOUNDS["clip_max"]), ratio, 0.0)


@pytest.fixture(params=range(4))
def policies(request):
    """(model, p, log q): the policy after token 0 and the sampler, far enough apart that some ratios are masked."""
    logits = random_logits(request.param)
    log_q = (logits + random_logits(100 + request.param, 0.7)).log_softmax(-1)
    model, p = Bigram(logits), logits[0].softmax(-1)
    ratio = p / log_q[0].exp()
    assert (masked(ratio) == 0).any()
    assert (masked(ratio) > 0).any()
    return model, p, log_q


# --- score centering


def test_full_head_gives_the_full_expectation(policies):
    model, p, log_q = policies
    q = log_q[0].exp()
    for token in range(V):
        expectation = sum(q[v] * masked(p[v] / q[v]) * score(p, v) for v in range(V))
        expected = -1.7 * (masked(p[token] / q[token]) * score(p, token) - expectation)
        actual = gradient(model, [[one_token(log_q, token, advantage=1.7)]])
        torch.testing.assert_close(actual[0], expected, rtol=1e-10, atol=1e-12)
        assert actual[1:].abs().max() == 0


@pytest.mark.parametrize("head_size", [1, 3, V])
def test_no_ratio_outside_the_bounds_gives_no_centering(head_size):
    logits = random_logits(0)
    log_q = (logits + random_logits(1, 0.1)).log_softmax(-1)
    p, q = logits[0].softmax(-1), log_q[0].exp()
    assert (masked(p / q) > 0).all()
    for token in range(V):
        expected = -(p[token] / q[token]) * score(p, token)
        actual = gradient(Bigram(logits), [[one_token(log_q, token, head_size=head_size)]])
        torch.testing.assert_close(actual[0], expected, rtol=1e-10, atol=1e-12)


def test_constant_advantage_and_full_head_have_no_expected_gradient(policies):
    model, _, log_q = policies
    grads = [gradient(model, [[one_token(log_q, token)]])[0] for token in range(V)]
    assert max(grad.abs().max() for grad in grads) > 0.05
    expected = sum(log_q[0, token].exp() * grad for token, grad in enumerate(grads))
    torch.testing.assert_close(expected, torch.zeros(V).double(), rtol=0, atol=1e-12)


def test_without_centering_the_same_expected_gradient_is_not_zero(policies):
    model, _, log_q = policies
    expected = sum(
        log_q[0, token].exp() * gradient(model, [[one_token(log_q, token)]], score_centering=False, epsilon=0.99)[0]
        for token in range(V)
    )
    assert expected.abs().max() > 1e-3


@pytest.mark.parametrize(("head_mass", "alpha"), [(0.7, 1), (0.95, 0)])
@pytest.mark.parametrize("token", range(V))
def test_partial_head_equals_the_full_one_where_the_tail_is_a_rescaled_policy(head_mass, alpha, token):
    """Outside the two likeliest tokens q = rho p: with rho inside and outside the bounds."""
    p = torch.tensor([0.45, 0.05, 0.2, 0.15, 0.1, 0.05]).double()
    q = torch.empty(V).double()
    q[0], q[1] = 0.3, head_mass - 0.3
    rho = (1 - head_mass) / p[2:].sum()
    q[2:] = rho * p[2:]
    assert (BOUNDS["clip_min"] <= 1 / rho <= BOUNDS["clip_max"]) == bool(alpha)
    log_q = q.log().expand(V, V)
    model = Bigram(p.log().expand(V, V))
    sample = one_token(log_q, token, head_ids=[[0, 1]], head_logprobs=[q[:2].log().tolist()])
    partial, full = gradient(model, [[sample]]), gradient(model, [[one_token(log_q, token)]])
    torch.testing.assert_close(partial, full, rtol=1e-10, atol=1e-12)
    uncentered = -(masked(p[token] / q[token]) * score(p, token))
    assert (full[0] - uncentered).abs().max() > 0.01


def test_impossible_tokens_in_the_head_stay_finite(policies):
    model, _, log_q = policies
    sample = one_token(log_q, 2)
    clamped = [*sample.head_logprobs[0][:-1], -9999.0]
    grad = gradient(model, [[one_token(log_q, 2, head_logprobs=[clamped])]])
    assert grad.isfinite().all()


def test_a_sampled_token_outside_its_candidates_is_refused():
    sample = one_token(random_logits(1).log_softmax(-1), 2, candidate_ids=[[0, 1]])
    with pytest.raises(ValueError, match=r"completion token 0 \(2\)"):
        policy_log_probs(Bigram(random_logits(0)), sample)


# --- the clipped surrogate


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the trust region; the slope is by log p
        (1.4, 2.0, -2.6, 0.0),  # clipped above, at 1 + epsilon_high
        (1.4, -2.0, 2.8, 2.8),  # the minimum keeps the unclipped one
        (0.7, 2.0, -1.4, -1.4),
        (0.7, -2.0, 1.6, 0.0),  # clipped below, at 1 - epsilon
        (0.5, 2.0, -1.0, -1.0),  # just inside the bounds of the mask
        (2.0, -2.0, 4.0, 4.0),
        (0.49, 2.0, 0.0, 0.0),  # masked
        (2.01, -2.0, 0.0, 0.0),
    ],
)
def test_surrogate_by_hand(ratio, advantage, loss, slope):
    p = torch.tensor([0.25, 0.25, 0.125, 0.125, 0.125, 0.125]).double()
    model = Bigram(p.log().expand(V, V))
    log_ratio = math.log(ratio) - (1e-12 if ratio == 2.0 else 0) + (1e-12 if ratio == 0.5 else 0)
    sample = Sample([1, 0], [0], [True], [math.log(0.25) - log_ratio], advantage)
    options = BOUNDS | {"score_centering": False, "epsilon": 0.2, "epsilon_high": 0.3}
    assert reference_loss(model, [[sample]], **options).item() == pytest.approx(loss, abs=1e-9)
    torch.testing.assert_close(gradient(model, [[sample]], **options)[0], slope * score(p, 0), rtol=1e-9, atol=1e-9)


def test_upper_epsilon_defaults_to_epsilon():
    sample = Sample([1, 0], [0], [True], [math.log(1 / V) - math.log(1.5)], 1.0)
    model = Bigram(torch.zeros(V, V).double())
    loss = reference_loss(model, [[sample]], score_centering=False, epsilon=0.1)
    assert loss.item() == pytest.approx(-1.1)


# --- normalisation, temperature, candidate sets


@pytest.mark.parametrize("score_centering", [True, False])
def test_mean_over_tokens_of_a_micro_batch_and_then_over_micro_batches(policies, score_centering):
    model, _, log_q = policies
    options = BOUNDS | {"score_centering": score_centering}
    long = sample_of(log_q, [1, 0], [2, 3, 5, 1], trained=[True, False, True, True], advantage=0.5)
    short = sample_of(log_q, [4], [0], advantage=-1.5)
    zero = sample_of(log_q, [4, 4], [1, 1], advantage=0.0)
    sums = {id(s): sum(sample_token_losses(model, s, **options)) for s in (long, short, zero)}
    first = (sums[id(long)] + sums[id(zero)]) / (3 + 2)
    second = (sums[id(short)] + sums[id(long)]) / (1 + 3)
    actual = reference_loss(model, [[long, zero], [short, long]], **options)
    assert actual.item() == pytest.approx(((first + second) / 2).item(), rel=1e-12)


def test_masked_tokens_count_in_the_divisor():
    model = Bigram(torch.zeros(V, V).double())
    inside = Sample([1, 0], [0], [True], [math.log(1 / V)], 1.0)
    outside = Sample([1, 0], [0], [True], [math.log(1 / V) - math.log(9.0)], 1.0)
    loss = reference_loss(model, [[inside, outside]], score_centering=False)
    assert loss.item() == pytest.approx(-0.5)


@pytest.mark.parametrize("score_centering", [True, False])
def test_temperature_divides_the_logits(score_centering):
    logits, log_q = random_logits(0), random_logits(1).log_softmax(-1)
    sample, options = sample_of(log_q, [1, 0], [2, 3]), BOUNDS | {"score_centering": score_centering}
    hot = reference_loss(Bigram(logits), [[sample]], temperature=0.7, **options)
    scaled = reference_loss(Bigram(logits / 0.7), [[sample]], **options)
    assert hot.item() == pytest.approx(scaled.item(), rel=1e-12)


def test_policy_is_renormalised_over_the_candidates():
    logits = random_logits(0)
    candidates = [0, 2, 3]
    p = logits[0, candidates].softmax(-1)
    log_q = torch.full((V, V), -math.inf).double()
    log_q[:, candidates] = p.log()
    sample = one_token(log_q, 2, head_size=3, candidate_ids=[candidates])
    assert ratios(Bigram(logits), sample) == pytest.approx([1.0])
    grad = gradient(Bigram(logits), [[sample]])[0]
    expected = torch.zeros(V).double()
    expected[candidates] = -(torch.tensor([0, 1, 0]).double() - p)
    torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)


def test_head_tokens_outside_the_candidates_are_left_out():
    logits, log_q = random_logits(0), random_logits(1).log_softmax(-1)
    wide = one_token(log_q, 2, candidate_ids=[[0, 2, 3]])
    inside = {v: value for v, value in zip(wide.head_ids[0], wide.head_logprobs[0], strict=True) if v in (0, 2, 3)}
    narrow = one_token(log_q, 2, candidate_ids=[[0, 2, 3]], head_ids=[[*inside]], head_logprobs=[[*inside.values()]])
    losses = [reference_loss(Bigram(logits), [[s]], score_centering=True, **BOUNDS).item() for s in (wide, narrow)]
    assert losses[0] == pytest.approx(losses[1])
    torch.testing.assert_close(gradient(Bigram(logits), [[wide]]), gradient(Bigram(logits), [[narrow]]))


# --- advantages


def test_group_advantages_use_the_population_deviation_of_the_scored():
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == pytest.approx([1, -1, -1, 1])
    assert group_advantages([3.0, math.nan, 0.0, 0.0]) == pytest.approx([2**0.5, 0, -(2**-0.5), -(2**-0.5)])
    assert group_advantages([math.nan, math.nan]) == [0, 0]


@pytest.mark.parametrize(
    ("rewards", "dropped"),
    [([1.0, 1.0], True), ([1.0, math.nan], True), ([1.0, math.nan, 1.0], True), ([1.0, 0.5, math.nan], False)],
)
def test_groups_that_teach_nothing_are_dropped(rewards, dropped):
    assert group_is_dropped(rewards) is dropped


# --- a transformer


def test_float64_model_is_the_same_function_in_float64():
    model = new_model(tied=True, seed=0)
    exact = float64_model(model)
    sample = Sample([1, 7, 40], [9, 12], [True, True], [0.0, 0.0], 1.0)
    log_p = policy_log_probs(exact, sample)
    expected = model(input_ids=torch.tensor([[1, 7, 40, 9, 12]])).logits[0, 2:4].log_softmax(-1)
    torch.testing.assert_close(log_p, expected.double(), rtol=1e-5, atol=1e-5)
    assert exact.lm_head.weight is exact.model.embed_tokens.weight
    assert model.dtype == torch.float32
    with pytest.raises(ValueError, match="float64_model"):
        policy_log_probs(model, sample)


def test_gradient_of_a_transformer_matches_finite_differences():
    exact = float64_model(new_model(tied=True, seed=0))
    sample = Sample([1, 7, 40], [9, 12], [True, True], [0.0, 0.0], -0.8)
    own = policy_log_probs(exact, sample).detach()
    offsets = [own[0, 9].item() - 0.1, own[1, 12].item() + 0.3]
    sample = Sample([1, 7, 40], [9, 12], [True, True], offsets, -0.8)
    weight = exact.model.layers[0].mlp.down_proj.weight
    reference_loss(exact, [[sample]], score_centering=False).backward()
    index, step = (3, 5), 1e-5
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[index] += sign * step
            values.append(reference_loss(exact, [[sample]], score_centering=False).item())
            weight[index] -= sign * step
    assert weight.grad[index].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6)
