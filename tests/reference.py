"""The loss in float64, one sample and one token at a time: what the real one is measured against. Slow, and meant to be.

Nothing here comes from the package, so that a mistake in it is not repeated here.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Sample:
    """One sample; every list but `prompt_ids` has one entry per completion token.

    `head_ids` and `head_logprobs` are the sampler's likeliest tokens at that position (chosen without regard to the
    token that was sampled) and their log-probabilities; only score centering reads them. `candidate_ids`, where given,
    is the set that the sampler drew from: the policy is renormalised over it.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    trained: Sequence[bool]
    sampler_logprobs: Sequence[float]
    advantage: float
    head_ids: Sequence[Sequence[int]] = ()
    head_logprobs: Sequence[Sequence[float]] = ()
    candidate_ids: Sequence[Sequence[int]] | None = None


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (population std + 1e-8) over the scored rewards of one group; 0 where the reward is NaN."""
    scored = [reward for reward in rewards if not math.isnan(reward)]
    if not scored:
        return [0.0 for _ in rewards]
    mean = sum(scored) / len(scored)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in scored) / len(scored))
    return [0.0 if math.isnan(reward) else (reward - mean) / (std + 1e-8) for reward in rewards]


def group_is_dropped(rewards: Sequence[float]) -> bool:
    """Whether fewer than two rewards are scored (not NaN), or the scored ones are all equal."""
    scored = [reward for reward in rewards if not math.isnan(reward)]
    return len(scored) < 2 or all(reward == scored[0] for reward in scored)


def float64_model(model: nn.Module) -> nn.Module:
    """A copy in float64, also where transformers computes in float32 whatever the weights are: in its RMS norms.

    Rotary angles stay float32 values: they are constants that the float32 model has as well.
    """
    model = copy.deepcopy(model).double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _rms_norm(module)  # type: ignore[method-assign]
    return model


def _rms_norm(module: nn.Module):
    def forward(hidden: Tensor) -> Tensor:
        return module.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))

    return forward


def policy_log_probs(model: nn.Module, sample: Sample, temperature: float = 1.0) -> Tensor:
    """log p of every vocabulary token at every completion position: (tokens, vocabulary), float64, differentiable.

    The sample is forwarded alone. Outside a candidate set it is -inf. Raises ValueError if the model is
    not in float64 or a completion token is not among its candidates.
    """
    ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
    logits = model(input_ids=ids).logits[0]
    if logits.dtype != torch.float64:
        raise ValueError(f"the model's logits are {logits.dtype}: pass float64_model(model)")
    rows = []
    for t, token in enumerate(sample.completion_ids):
        row = logits[len(sample.prompt_ids) + t - 1] / temperature
        if sample.candidate_ids is not None:
            if token not in sample.candidate_ids[t]:
                raise ValueError(
                    f"completion token {t} ({token}) is not among its candidates {sample.candidate_ids[t]}"
                )
            outside = torch.ones_like(row, dtype=torch.bool)
            outside[list(sample.candidate_ids[t])] = False
            row = row.masked_fill(outside, -math.inf)
        rows.append(torch.log_softmax(row, dim=-1))
    return torch.stack(rows)


def ratios(model: nn.Module, sample: Sample, temperature: float = 1.0) -> list[float]:
    """w = p(y) / q(y) of every completion token, before any mask."""
    log_p = policy_log_probs(model, sample, temperature).detach()
    return [
        math.exp(log_p[t, y].item() - log_q)
        for t, (y, log_q) in enumerate(zip(sample.completion_ids, sample.sampler_logprobs, strict=True))
    ]


def surrogate_token_loss(
    log_p_token: Tensor,
    log_q_token: float,
    advantage: float,
    *,
    clip_min: float,
    clip_max: float,
    epsilon: float,
    epsilon_high: float,
) -> Tensor:
    """Masked clipped surrogate of one token."""
    ratio = torch.exp(log_p_token - log_q_token)
    if not clip_min <= ratio.item() <= clip_max:
        return 0.0 * log_p_token
    clipped = torch.clamp(ratio, 1 - epsilon, 1 + epsilon_high)
    return -torch.minimum(ratio * advantage, clipped * advantage)


def centered_token_loss(
    log_p: Tensor,
    token: int,
    log_q_token: float,
    head: dict[int, float],
    advantage: float,
    *,
    clip_min: float,
    clip_max: float,
) -> Tensor:
    """Score-centered loss of one token. `log_p` is (vocabulary,); `head` maps the sampler's likeliest tokens to log q."""
    p = log_p.detach().exp()

    weight = math.exp(log_p[token].item() - log_q_token)
    loss = (weight if clip_min <= weight <= clip_max else 0.0) * log_p[token]

    rest_q = 1.0 - sum(math.exp(log_q) for log_q in head.values())
    rest_p = 1.0 - sum(p[v].item() for v in head)
    rho = rest_q / max(rest_p, 1e-6)
    alpha = 1.0 if rho > 0 and clip_min <= 1.0 / rho <= clip_max else 0.0
    for v, log_q in head.items():
        difference = log_p[v].item() - log_q
        ratio = math.exp(difference) if difference < 700 else math.inf
        inside = clip_min <= ratio <= clip_max
        coefficient = (p[v].item() if inside else 0.0) - alpha * p[v].item()
        loss = loss - coefficient * log_p[v]
    return -advantage * loss


def sample_token_losses(
    model: nn.Module,
    sample: Sample,
    *,
    score_centering: bool,
    clip_min: float = 0.5,
    clip_max: float = 5.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    temperature: float = 1.0,
) -> list[Tensor]:
    """The loss of each trained token of one sample, in order."""
    log_p = policy_log_probs(model, sample, temperature)
    losses = []
    for t, (token, trained) in enumerate(zip(sample.completion_ids, sample.trained, strict=True)):
        if not trained:
            continue
        log_q_token = sample.sampler_logprobs[t]
        if score_centering:
            head = dict(zip(sample.head_ids[t], sample.head_logprobs[t], strict=True))
            if sample.candidate_ids is not None:
                head = {v: log_q for v, log_q in head.items() if v in sample.candidate_ids[t]}
            loss = centered_token_loss(
                log_p[t], token, log_q_token, head, sample.advantage, clip_min=clip_min, clip_max=clip_max
            )
        else:
            loss = surrogate_token_loss(
                log_p[t, token],
                log_q_token,
                sample.advantage,
                clip_min=clip_min,
                clip_max=clip_max,
                epsilon=epsilon,
                epsilon_high=epsilon if epsilon_high is None else epsilon_high,
            )
        losses.append(loss)
    return losses


def reference_loss(
    model: nn.Module,
    microbatches: Sequence[Sequence[Sample]],
    *,
    score_centering: bool,
    clip_min: float = 0.5,
    clip_max: float = 5.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Loss of one optimizer step: a float64 scalar to call `.backward()` on.

    Each micro-batch, given as all its samples over all ranks, is the sum over its trained tokens divided by their
    number; the step is the mean over the micro-batches given. `model` takes `input_ids` and returns float64 `logits`
    (see `float64_model`). `epsilon_high=None`: the same as `epsilon`. A micro-batch without a trained token counts as 0.
    """
    total = torch.zeros((), dtype=torch.float64)
    for microbatch in microbatches:
        losses: list[Tensor] = []
        for sample in microbatch:
            losses += sample_token_losses(
                model,
                sample,
                score_centering=score_centering,
                clip_min=clip_min,
                clip_max=clip_max,
                epsilon=epsilon,
                epsilon_high=epsilon_high,
                temperature=temperature,
            )
        if losses:
            total = total + torch.stack(losses).sum() / len(losses)
    return total / len(microbatches)
