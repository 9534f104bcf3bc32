"""The objectives, exactly: their gradients by the logits against sums written out here."""

import math

import pytest
import torch

from slipstream.algorithm.loss import (
    LossSettings,
    TokenTerms,
    centering,
    masked_ratio,
    ratio_stats,
    token_loss,
    within,
)

V = 7
CENTERED = LossSettings(score_centering=True, clip_min=0.5, clip_max=2.0, epsilon=0.2, epsilon_high=0.3)
CLIPPED = LossSettings(score_centering=False, clip_min=0.5, clip_max=2.0, epsilon=0.2, epsilon_high=0.3)


def policies(seed, gap=0.7):
    """Logits of the policy (with gradient) and log-probabilities of the sampler, at `V` positions."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(V, V, generator=generator, dtype=torch.float64) * 1.5
    log_q = (logits + gap * torch.randn(V, V, generator=generator, dtype=torch.float64)).log_softmax(-1)
    return logits.requires_grad_(), log_q


def terms_of(logits, log_q, sampled, advantage, head_size):
    """One term per position; its head is the sampler's `head_size` likeliest tokens."""
    log_p = logits.log_softmax(-1)
    head = log_q.topk(head_size, -1).indices
    rows = torch.arange(len(sampled))
    return TokenTerms(
        logp=log_p[rows, sampled],
        logq=log_q[rows, sampled],
        advantage=torch.as_tensor(advantage, dtype=torch.float64).expand(len(sampled)),
        head_logp=log_p.gather(-1, head),
        head_logq=log_q.gather(-1, head),
        head_mask=torch.ones_like(head, dtype=torch.bool),
    )


def terms(ratios, advantages, *, logq=-1.0):
    """Terms without a head, from ratios; `logp` is a leaf."""
    ratio = torch.tensor(ratios, dtype=torch.float64)
    log_p = (ratio.log() + logq).requires_grad_()
    empty = torch.zeros(len(ratios), 0, dtype=torch.float64)
    return TokenTerms(
        logp=log_p,
        logq=torch.full_like(ratio, logq),
        advantage=torch.tensor(advantages, dtype=torch.float64),
        head_logp=empty,
        head_logq=empty,
        head_mask=empty.bool(),
    )


def score(p, token):
    """Gradient of log p(token) by the logits."""
    return torch.nn.functional.one_hot(torch.tensor(token), V).double() - p


def keep(ratio):
    return ratio if 0.5 <= ratio <= 2.0 else 0.0


def full_expectation_gradient(logits, log_q, sampled, advantage):
    """-A (M(w) score(y) - sum over the whole vocabulary of q(v) M(p/q) score(v)), position by position."""
    p, q = logits.detach().softmax(-1), log_q.exp()
    expected = torch.zeros_like(p)
    for i, y in enumerate(sampled.tolist()):
        found = keep((p[i, y] / q[i, y]).item()) * score(p[i], y)
        for v in range(V):
            found = found - q[i, v] * keep((p[i, v] / q[i, v]).item()) * score(p[i], v)
        expected[i] = -advantage * found
    return expected


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("advantage", [1.0, -0.7])
def test_a_head_of_the_whole_vocabulary_is_the_full_expectation(seed, advantage):
    logits, log_q = policies(seed)
    sampled = torch.arange(V)
    token_loss(terms_of(logits, log_q, sampled, advantage, V), CENTERED).sum().backward()
    assert torch.allclose(logits.grad, full_expectation_gradient(logits, log_q, sampled, advantage), atol=1e-12)


def test_the_examples_of_the_full_expectation_do_mask_some_ratios():
    for seed in range(5):
        logits, log_q = policies(seed)
        assert not within((logits.log_softmax(-1) - log_q).exp(), CENTERED).all()


@pytest.mark.parametrize("head_size", [1, 3, V])
def test_with_every_ratio_inside_the_bounds_centering_moves_nothing(head_size):
    logits, log_q = policies(0, gap=0.1)
    assert within((logits.log_softmax(-1) - log_q).exp(), CENTERED).all()
    centering(terms_of(logits, log_q, torch.zeros(V, dtype=torch.long), 1.0, head_size), CENTERED).sum().backward()
    assert logits.grad.abs().max() < 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_a_constant_advantage_pulls_nowhere_on_average(seed):
    logits, log_q = policies(seed)
    average = torch.zeros(V, V, dtype=torch.float64)
    for token in range(V):
        logits.grad = None
        token_loss(terms_of(logits, log_q, torch.full((V,), token), 1.3, V), CENTERED).sum().backward()
        average += log_q[:, token].exp()[:, None] * logits.grad
    assert average.abs().max() < 1e-12
    # and without centering it does pull
    pull = torch.zeros_like(average)
    for token in range(V):
        logits.grad = None
        found = terms_of(logits, log_q, torch.full((V,), token), 1.3, V)
        (-found.advantage * masked_ratio(found, CENTERED).detach() * found.logp).sum().backward()
        pull += log_q[:, token].exp()[:, None] * logits.grad
    assert pull.abs().max() > 1e-2


def test_a_partial_head_folds_its_tail_by_hand():
    """p = (.5, .3, .2), q = (.2, .5, .3), head {1}: rho = .5 / .7, 1 / rho = 1.4 is inside, ratio .3 / .5 = .6 too."""
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    logits = p.log().requires_grad_()
    log_p = logits.log_softmax(-1)

    def weight(settings, q1):
        found = TokenTerms(
            logp=log_p[:1],
            logq=log_p[:1].detach(),
            advantage=torch.ones(1, dtype=torch.float64),
            head_logp=log_p[None, 1:2],
            head_logq=torch.tensor([[math.log(q1)]], dtype=torch.float64),
            head_mask=torch.ones(1, 1, dtype=torch.bool),
        )
        return (centering(found, settings) / log_p[1]).item()

    wide = LossSettings(True, 0.5, 2.0, 0.2, 0.2)
    assert weight(wide, 0.5) == pytest.approx(0.3 - 0.3)  # both kept
    above = LossSettings(True, 0.7, 2.0, 0.2, 0.2)
    assert weight(above, 0.5) == pytest.approx(0 - 0.3)  # the head's ratio 0.6 is masked, the tail's is kept
    below = LossSettings(True, 0.5, 1.2, 0.2, 0.2)
    assert weight(below, 0.5) == pytest.approx(0.3 - 0)  # the tail's ratio 1.4 is masked, the head's is kept
    assert weight(wide, 1.0) == pytest.approx(0 - 0)  # nothing outside the head (rho = 0), head's ratio 0.3 masked


def test_bounds_are_inclusive():
    exact = torch.tensor([0.5, 2.0, 0.5 - 1e-9, 2.0 + 1e-9], dtype=torch.float64)
    assert within(exact, CENTERED).tolist() == [True, True, False, False]


@pytest.mark.parametrize("settings", [CENTERED, CLIPPED])
def test_a_token_outside_the_bounds_has_no_gradient_and_one_inside_has(settings):
    found = terms([0.4, 2.1, 1.0], [1.0, 1.0, 1.0])
    token_loss(found, settings).sum().backward()
    assert found.logp.grad[:2].tolist() == [0, 0]
    assert found.logp.grad[2].item() == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.25, 2.0, -2.5, -2.5),  # below 1 + 0.3: not cut
        (1.5, 2.0, -2.6, 0.0),  # cut at 1.3
        (1.5, -2.0, 3.0, 3.0),  # a bad token that became likelier is pushed back
        (0.7, -2.0, 1.6, 0.0),  # cut at 0.8
        (0.7, 2.0, -1.4, -1.4),
        (0.45, 2.0, 0.0, 0.0),  # masked
        (2.5, -2.0, 0.0, 0.0),  # masked
    ],
)
def test_the_clipped_objective_by_hand(ratio, advantage, loss, gradient):
    found = terms([ratio], [advantage])
    value = token_loss(found, CLIPPED)
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert found.logp.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize("settings", [CENTERED, CLIPPED])
def test_overflows_stay_out_of_value_and_gradient(settings):
    """A ratio of exp(200), one of exp(-9998), a head entry that the sampler put at its floor, one impossible for p."""
    logp = torch.tensor([-1.0, -9999.0, -1.0], requires_grad=True)
    head_logp = torch.tensor([[-1.0, -2.0], [-1.0, -torch.inf], [-1.0, 5.0]], requires_grad=True)
    found = TokenTerms(
        logp=logp,
        logq=torch.tensor([-201.0, -1.0, -1.0]),
        advantage=torch.tensor([0.0, 1.0, 1.0]),
        head_logp=head_logp,
        head_logq=torch.tensor([[-1.0, -9999.0], [-1.0, -1.0], [-1.0, 0.0]]),
        head_mask=torch.tensor([[True, True], [True, True], [True, False]]),
    )
    losses = token_loss(found, settings)
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert torch.isfinite(logp.grad).all()
    assert logp.grad[:2].tolist() == [0, 0]
    assert logp.grad[2].item() == pytest.approx(-1.0)
    if settings.score_centering:
        assert torch.isfinite(head_logp.grad).all()
        assert head_logp.grad[2, 1] == 0


def test_an_entry_outside_the_head_mask_changes_nothing():
    logits, log_q = policies(3)
    sampled = torch.arange(V)
    token_loss(terms_of(logits, log_q, sampled, 1.0, 3), CENTERED).sum().backward()
    expected, logits.grad = logits.grad, None
    wide = terms_of(logits, log_q, sampled, 1.0, 5)
    mask = wide.head_mask.clone()
    mask[:, 3:] = False
    masked = TokenTerms(wide.logp, wide.logq, wide.advantage, wide.head_logp, wide.head_logq, mask)
    token_loss(masked, CENTERED).sum().backward()
    assert torch.allclose(logits.grad, expected, atol=1e-14)


def test_statistics_are_of_the_ratios_before_masking():
    stats = ratio_stats(terms([0.4, 0.7, 1.0, 1.5, 3.0], [1.0, -1.0, 1.0, 1.0, -1.0]), CLIPPED)
    assert stats.ratio.tolist() == pytest.approx([0.4, 0.7, 1.0, 1.5, 3.0])
    assert stats.logp_difference.tolist() == pytest.approx([abs(math.log(r)) for r in (0.4, 0.7, 1.0, 1.5, 3.0)])
    assert stats.masked.tolist() == [True, False, False, False, True]
    assert stats.clipped_low.tolist() == [False, True, False, False, False]  # only with a negative advantage
    assert stats.clipped_high.tolist() == [False, False, False, True, False]  # only with a positive one
    region = ratio_stats(terms([0.4, 0.7, 1.0, 1.5, 3.0], [1.0, -1.0, 1.0, 1.0, -1.0]), CENTERED)
    assert region.clipped_low.tolist() == [True, True, False, False, False]
    assert region.clipped_high.tolist() == [False, False, False, True, True]


def test_the_sampler_mass_is_what_the_head_covers():
    logits, log_q = policies(1)
    stats = ratio_stats(terms_of(logits, log_q, torch.zeros(V, dtype=torch.long), 1.0, 3), CENTERED)
    assert torch.allclose(stats.sampler_mass, log_q.exp().topk(3, -1).values.sum(-1))
