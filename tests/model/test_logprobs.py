"""Chunked log-probabilities against the plain computation: values, gradients, memory; and inside models' own forward."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from slipstream.algorithm.logprobs import Candidates, LogitTransform, TokenLogprobs, chunked_logprobs
from slipstream.learner.policy_head import PROBE, fitted, measured_transform, output_layer, policy_logprobs

V, H, L, K = 37, 8, 23, 4
TEMPERATURE = 0.7
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
TRANSFORMS = [LogitTransform(), LogitTransform(0.25), LogitTransform(1.0, 3.0), LogitTransform(0.5, 2.0)]


def problem(dtype: torch.dtype, candidates: bool = False, seed: int = 0) -> dict[str, Any]:
    """Inputs of `chunked_logprobs`; some head entries are empty, some sets are the whole vocabulary."""
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(V, (L,), generator=g)
    head_ids = torch.stack([torch.randperm(V, generator=g)[:K] for _ in range(L)])
    head_ids[::3, -1] = -1
    sets = None
    if candidates:
        members = [torch.randperm(V, generator=g)[: int(torch.randint(1, 9, (1,), generator=g))] for _ in range(L)]
        members = [torch.unique(torch.cat([ids, target[i : i + 1]])) for i, ids in enumerate(members)]
        members[5] = members[11] = torch.zeros(0, dtype=torch.long)
        sizes = torch.tensor([0, *map(len, members)])
        sets = Candidates(sizes.cumsum(0), torch.cat(members))
    return {
        "hidden": torch.randn(L, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_(),
        "weight": torch.randn(V, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_(),
        "bias": torch.randn(V, generator=g, dtype=torch.float64).to(dtype).requires_grad_(),
        "target": target,
        "head_ids": head_ids,
        "candidates": sets,
    }


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, head_ids: Tensor,
    candidates: Candidates | None, transform: LogitTransform, temperature: float,
) -> TokenLogprobs:  # fmt: skip
    """The same with all logits at once."""
    logits = hidden @ weight.T * transform.scale if bias is None else (hidden @ weight.T + bias) * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    logits = logits / temperature
    valid = head_ids >= 0
    if candidates is not None:
        inside = torch.zeros(len(target), len(weight), dtype=torch.bool)
        for i in range(len(target)):
            ids = candidates.ids[candidates.offsets[i] : candidates.offsets[i + 1]]
            inside[i, ids if len(ids) else slice(None)] = True
        logits = logits.masked_fill(~inside, -torch.inf)
        valid = valid & inside.gather(1, head_ids.clamp_min(0))
    log_p = logits.log_softmax(-1)
    entropy = -torch.where(log_p.isfinite(), log_p.exp() * log_p, torch.zeros_like(log_p)).sum(-1)
    head = torch.where(valid, log_p.gather(1, head_ids.clamp_min(0)), torch.zeros_like(log_p[:, :1]))
    return TokenLogprobs(
        log_p.gather(1, target[:, None])[:, 0], head, valid, entropy.detach(), logits.logsumexp(-1).detach()
    )


def weighted(found: TokenLogprobs) -> Tensor:
    """A scalar of all outputs that have a gradient, each with a coefficient of its own."""
    g = torch.Generator().manual_seed(9)
    dtype = found.logp.dtype
    head = torch.where(found.head_valid, found.head_logp, torch.zeros_like(found.head_logp))
    return (found.logp * torch.randn(L, generator=g, dtype=torch.float64).to(dtype)).sum() + (
        head * torch.randn(L, K, generator=g, dtype=torch.float64).to(dtype)
    ).sum()


@pytest.mark.parametrize("candidates", [False, True], ids=["vocabulary", "candidates"])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("chunk", [1, 5, None])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_equals_the_plain_computation(
    dtype: torch.dtype, chunk: int | None, transform: LogitTransform, candidates: bool
) -> None:
    given = problem(dtype, candidates)
    others = {"transform": transform, "temperature": TEMPERATURE}
    found, expected = chunked_logprobs(**given, **others, chunk=chunk), plain(**given, **others)
    tolerance = TOLERANCES[dtype]
    assert found.head_valid.equal(expected.head_valid)
    for name in ("logp", "entropy", "logsumexp"):
        assert getattr(found, name).dtype == dtype
        assert torch.allclose(getattr(found, name), getattr(expected, name), rtol=tolerance, atol=tolerance), name
    valid = found.head_valid
    assert torch.allclose(found.head_logp[valid], expected.head_logp[valid], rtol=tolerance, atol=tolerance)
    leaves = [given["hidden"], given["weight"], given["bias"]]
    ours = torch.autograd.grad(weighted(found), leaves)
    theirs = torch.autograd.grad(weighted(expected), leaves)
    for name, a, b in zip(("hidden", "weight", "bias"), ours, theirs, strict=True):
        assert b.abs().max() > 0.1
        assert (a - b).abs().max() <= tolerance * (1 + b.abs().max()), name


def test_candidates_hold_the_probability_and_cut_the_head() -> None:
    given = problem(torch.float64, candidates=True)
    sets = given["candidates"]
    found = chunked_logprobs(**given)
    for i in range(L):
        ids = sets.ids[sets.offsets[i] : sets.offsets[i + 1]]
        if not len(ids):
            continue
        alone = chunked_logprobs(**{**given, "head_ids": ids.expand(L, -1)})
        assert alone.head_logp[i].exp().sum().item() == pytest.approx(1, abs=1e-12)
        assert found.head_valid[i].tolist() == [int(v) in ids.tolist() for v in given["head_ids"][i]]
        assert found.entropy[i].item() <= torch.tensor(float(len(ids))).log().item() + 1e-12
    assert not found.head_valid.all()


def test_without_bias_without_positions_and_with_frozen_weights() -> None:
    given = problem(torch.float64)
    given["bias"] = None
    none = {**given, "hidden": given["hidden"][:0], "target": given["target"][:0], "head_ids": given["head_ids"][:0]}
    found = chunked_logprobs(**none)
    assert found.logp.shape == (0,)
    gradient = torch.autograd.grad(found.logp.sum(), given["weight"])[0]
    assert gradient.shape == (V, H)
    assert not gradient.any()
    frozen = {**given, "weight": given["weight"].detach()}
    ours = torch.autograd.grad(weighted(chunked_logprobs(**frozen, chunk=4)), given["hidden"])[0]
    theirs = torch.autograd.grad(
        weighted(plain(**given, transform=LogitTransform(), temperature=1.0)), given["hidden"]
    )[0]
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-10)


def test_in_half_precision_the_sums_are_wide() -> None:
    """bfloat16 weights as under autocast: only the products are in bfloat16, as in a plain output layer."""
    exact, given = problem(torch.float64), problem(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = chunked_logprobs(**given, chunk=1)
    assert found.logp.dtype == torch.float32
    expected = plain(**exact, transform=LogitTransform(), temperature=1.0)
    assert torch.allclose(found.logp.double(), expected.logp, rtol=0, atol=0.1)
    ours = torch.autograd.grad(weighted(found), [given["hidden"], given["weight"]])
    theirs = torch.autograd.grad(weighted(expected), [exact["hidden"], exact["weight"]])
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).abs().max() <= 0.02 * b.abs().max()


class Largest(TorchDispatchMode):
    """The most elements that any tensor made inside has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def largest(compute: Any, length: int, size: int) -> int:
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, H, generator=g).requires_grad_() for n in (length, size))
    target, head = torch.randint(size, (length,), generator=g), torch.randint(size, (length, K), generator=g)
    with Largest() as seen:
        found = compute(hidden, weight, None, target, head)
        (found.logp.sum() + found.head_logp.sum()).backward()
    return seen.elements


def test_no_tensor_grows_with_positions_times_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.algorithm.logprobs.CHUNK_LOGITS_CPU", 8_000)

    def all_at_once(*given: Any) -> TokenLogprobs:
        return plain(*given, candidates=None, transform=LogitTransform(), temperature=1.0)

    for length, size in ((100, 200), (400, 200), (100, 800), (400, 800)):
        assert largest(all_at_once, length, size) >= length * size, "the measurement sees full logits"
        inputs = max(length, size) * H
        assert largest(chunked_logprobs, length, size) <= max(8_000, inputs)


# ---- inside a model

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
MODELS: dict[str, Any] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)),
    "qwen3, tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "gemma2, soft cap": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=1.5)),
    "cohere, scale": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.0625)),
    "granite, divided": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=6.0)),
}


def model_of(name: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().to(dtype)


def row(model: Any) -> dict[str, Any]:
    return {"input_ids": torch.tensor([[5, 9, 11, 3, 7, 7, 20]]), "use_cache": False}


PREDICT, TARGET = torch.tensor([2, 4, 5, 5]), torch.tensor([3, 7, 20, 21])
HEAD = torch.tensor([[3, 4], [9, -1], [0, 31], [1, 2]])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models_give_the_log_probabilities_of_their_logits(name: str, dtype: torch.dtype) -> None:
    model = model_of(name, dtype)
    inputs = row(model)
    found = policy_logprobs(model, inputs, PREDICT, TARGET, HEAD, TEMPERATURE)
    log_p = (model(**inputs).logits[0, PREDICT] / TEMPERATURE).log_softmax(-1)
    expected = log_p.gather(1, TARGET[:, None])[:, 0]
    assert torch.allclose(found.logp, expected, rtol=0, atol=TOLERANCES[dtype])
    assert log_p.std() > 0.05, "not uniform"
    ours, theirs = (torch.autograd.grad(value.sum(), list(model.parameters())) for value in (found.logp, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= TOLERANCES[dtype] * (1 + b.abs().max())
    assert "forward" not in vars(output_layer(model)), "the model is as it was"


@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_does_to_its_logits_is_measured(name: str) -> None:
    expected = {"gemma2, soft cap": LogitTransform(1.0, 1.5), "cohere, scale": LogitTransform(0.0625)}
    expected["granite, divided"] = LogitTransform(1 / 6.0)
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of(name, dtype)
        assert measured_transform(model, row(model)) == expected.get(name, LogitTransform())


def test_unknown_changes_of_the_logits_are_refused() -> None:
    config = Gemma2Config(**SIZES, final_logit_softcapping=None)
    probe = torch.tensor(PROBE, dtype=torch.float64)
    assert fitted(probe * 0.3, 1e-5, config).scale == pytest.approx(0.3)
    with pytest.raises(ValueError, match="neither a scale nor"):
        fitted(probe + 1, 1e-5, config)
    with pytest.raises(ValueError, match="neither a scale nor"):
        fitted(probe * 0.3, 2e-2, config)


def test_an_output_layer_that_is_not_plain_is_refused() -> None:
    from peft import LoraConfig, get_peft_model

    model = model_of("qwen3")
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with pytest.raises(ValueError, match=r"output layer of type ModulesToSaveWrapper.*modules_to_save"):
        output_layer(wrapped)
    adapted = get_peft_model(model_of("qwen3"), LoraConfig(target_modules=["q_proj"]))
    found = policy_logprobs(adapted, row(adapted), PREDICT, TARGET, HEAD, 1.0)
    found.logp.sum().backward()
    assert any(p.grad is not None and p.grad.any() for n, p in adapted.named_parameters() if "lora_B" in n)
