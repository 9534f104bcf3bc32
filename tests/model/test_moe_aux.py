"""The router loss of mixtures of experts: value and gradient against transformers' own, and when it applies."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.config import AsyncGRPOConfig
from slipstream.learner.forward import to_tensors, token_terms
from slipstream.learner.router_loss import router_loss
from slipstream.packing.sample import Sample
from slipstream.packing.trie import pack
from tests.learner_replay import VOCABULARY, made_up_sample, samples_of, tiny_model
from tests.moe import MODELS, model_of, run_moe

CPU = torch.device("cpu")


def chain(length: int = 9) -> Sample:
    """One sample: its row is the plain sequence, which transformers can forward too."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, VOCABULARY, length).tolist()
    return made_up_sample(rng, ids, [False] * 3 + [True] * (length - 3), 4, advantage=1.0)


def theirs(model: Any, *sequences: list[int]) -> torch.Tensor:
    """transformers' own loss over the tokens of one sequence, or the mean over several of equal length."""
    output = model(input_ids=torch.tensor(sequences), output_router_logits=True, use_cache=False)
    return output.aux_loss


def gradients(loss: torch.Tensor, model: Any) -> dict[str, torch.Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return {n: g for (n, _), g in zip(model.named_parameters(), found, strict=True) if g is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_value_and_gradient_equal_transformers(name: str, checkpointing: bool) -> None:
    model, sample = model_of(name), chain()
    router = router_loss(model, None)
    assert router is not None
    assert router.coefficient == 0.125
    row = pack([sample])
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for _ in range(2):  # nothing is left over from the forward before
        with router.recorded():
            token_terms(model, to_tensors(row, CPU), 1.0)
        found = router.value(row.num_tokens)
        expected = theirs(model, sample.input_ids.tolist())
        assert found.item() == pytest.approx(expected.item(), rel=1e-6)
        ours, wanted = gradients(found, model), gradients(expected, model)
        assert any("gate" in key for key in wanted)
        assert ours.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.allclose(ours[key], value, rtol=1e-5, atol=1e-7 * (1 + value.abs().max().item())), key


def test_a_shared_prefix_counts_once() -> None:
    """Over the unique forwarded tokens: as transformers weighs tokens, with those of the second copy left out."""
    model = model_of("qwen3_moe")
    router = router_loss(model, None)
    assert router is not None
    values = []
    for copies in (1, 3):
        row = pack([chain()] * copies)
        with router.recorded():
            token_terms(model, to_tensors(row, CPU), 1.0)
        values.append(router.value(row.num_tokens).item())
    # a copy shares all but its last token; only those leaves come on top
    assert pack([chain()] * 3).num_tokens == 9 + 2
    longer = [chain().input_ids.tolist()] * 3
    assert values[0] == pytest.approx(theirs(model, longer[0]).item(), rel=1e-6)
    mask = torch.ones(3, 9, dtype=torch.long)
    with torch.no_grad():
        logits = model.model(input_ids=torch.tensor(longer), output_router_logits=True).router_logits
    kept = mask.bool()
    kept[1:, :-1] = False
    flat = tuple(layer.reshape(-1, layer.shape[-1])[kept.flatten()] for layer in logits)
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    assert values[1] == pytest.approx(load_balancing_loss_func(flat, 4, 2).item(), rel=1e-6)
    assert values[1] != pytest.approx(values[0], rel=1e-3)


def test_padding_behind_the_tokens_does_not_count() -> None:
    model, sample = model_of("mixtral"), chain()
    router = router_loss(model, None)
    assert router is not None
    padded = [*sample.input_ids.tolist(), 0, 0, 0]
    with router.recorded():
        model(input_ids=torch.tensor([padded]), use_cache=False)
    assert router.value(len(sample)).item() == pytest.approx(theirs(model, padded[:-3]).item(), rel=1e-6)


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_a_dense_model_has_none_and_a_coefficient_for_it_is_refused(coefficient: float) -> None:
    assert router_loss(tiny_model(), None) is None
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=.*Qwen3ForCausalLM is no mixture of experts"):
        router_loss(tiny_model(), coefficient)


def test_the_coefficient() -> None:
    model = model_of("qwen3_moe")
    assert router_loss(model, 0.0) is None
    assert router_loss(model, 0.5).coefficient == 0.5
    model.config.router_aux_loss_coef = 0.0
    assert router_loss(model, None) is None
    with pytest.raises(ValueError, match=r"router_aux_loss_coef = -1.*at least 0.*0: off"):
        AsyncGRPOConfig(router_aux_loss_coef=-1.0, use_cpu=True, bf16=False)


def test_reentrant_checkpointing_is_refused() -> None:
    model = model_of("qwen3_moe").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    router = router_loss(model, None)
    assert router is not None
    with router.recorded():
        token_terms(model, to_tensors(pack([chain()]), CPU), 1.0)
    with pytest.raises(RuntimeError, match="use_reentrant"):
        router.value(9)


def test_the_trainer_adds_it_to_the_loss_and_logs_it_unscaled(tmp_path: Path) -> None:
    """The first step, with and without it: the gradients differ by the coefficient times its mean over rows."""
    off, on = run_moe(tmp_path / "off", 0.0), run_moe(tmp_path / "on", None)
    assert not any("aux_loss" in line for line in off.state.log_history)
    plan = samples_of(on._plans[0])
    assert [[s.rollout_id for s in batch] for batch in plan] == [
        [s.rollout_id for s in batch] for batch in off.steps[0].micro_batches
    ]
    model = model_of("qwen3_moe")
    router = router_loss(model, None)
    assert router is not None
    values = []
    for batch in plan:
        row = pack(batch)
        with router.recorded():
            token_terms(model, to_tensors(row, CPU), 1.0)
        values.append(router.value(row.num_tokens))
    mean = torch.stack(values).mean()
    assert on.state.log_history[0]["aux_loss"] == pytest.approx(mean.item(), rel=1e-5)
    assert on.steps[0].loss - off.steps[0].loss == pytest.approx(0.125 * mean.item(), abs=1e-5)
    expected = gradients(0.125 * mean, model)
    for name, value in on.steps[0].gradient.items():
        difference = value - off.steps[0].gradient[name]
        wanted = expected.get(name, torch.zeros_like(value))
        assert torch.allclose(difference, wanted, rtol=1e-5, atol=1e-7), name
