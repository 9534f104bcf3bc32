"""Tree attention: a packed row equals its samples forwarded alone, for every kind of attention that is not refused."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from slipstream.packing.attention import (
    TREE,
    TreeLayout,
    blockwise,
    check_model,
    flex,
    interface,
    plan,
    tree_forward,
    use_tree_attention,
    varlen,
)
from slipstream.packing.trie import attention_mask
from slipstream.preflight_model import PACKED

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
CONFIGS: dict[str, Any] = {
    "qwen3": Qwen3Config(**SIZES),
    "llama, grouped queries": LlamaConfig(**SIZES),
    "qwen3, sliding window": Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=3, **LAYERS),
    "mistral, sliding window": MistralConfig(**SIZES, sliding_window=4),
    "gemma2, soft cap": Gemma2Config(**SIZES, sliding_window=3, attn_logit_softcapping=2.0, **LAYERS),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=3, **LAYERS),
}


def quick(examples: int) -> Any:
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=slow)


@st.composite
def trees(draw: st.DrawFn, max_size: int = 24) -> np.ndarray:
    """The parents of a row laid out depth first, with several roots."""
    parent = [-1]
    for _ in range(draw(st.integers(0, max_size - 1))):
        path, node = [-1], len(parent) - 1
        while node != -1:
            path.append(node)
            node = parent[node]
        parent.append(len(parent) - 1 if draw(st.booleans()) else draw(st.sampled_from(path)))
    return np.array(parent, dtype=np.int32)


@pytest.fixture(params=[0, 5_000, 10**9], ids=["split", "mixed", "one square"])
def call_overhead(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny rows through every way of dividing the work, not only the one that is cheapest for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "CALL_OVERHEAD", request.param)
        yield


def plain_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **given: Any
) -> tuple[Tensor, None]:
    """Attention of one sample written down again, in the dtype of its inputs throughout."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    if given.get("softcap"):
        scores = torch.tanh(scores / given["softcap"]) * given["softcap"]
    at = torch.arange(query.shape[2])
    hidden = at[:, None] < at
    if given.get("sliding_window"):
        hidden |= at[:, None] - at >= given["sliding_window"]
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("plain_in_tests", plain_attention)


def wide_norms(model: nn.Module) -> nn.Module:
    """In float64, norms too, which transformers computes in float32 whatever the weights are."""

    def wide(norm: Any) -> Any:
        gemma = type(norm).__name__.startswith("Gemma")
        eps = norm.eps if gemma else norm.variance_epsilon
        return lambda x: (norm.weight + (1 if gemma else 0)) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = wide(module)  # type: ignore[method-assign]
    return model


def two_models(config: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """The same weights, one for samples alone, one for packed rows."""
    torch.manual_seed(0)
    alone = AutoModelForCausalLM.from_config(copy.deepcopy(config)).to(dtype)
    with torch.no_grad():
        for name, parameter in alone.named_parameters():
            if "norm" in name:
                parameter += 0.2 * torch.randn_like(parameter)
    packed = copy.deepcopy(alone)
    if dtype == torch.float64:
        alone, packed = wide_norms(alone), wide_norms(packed)
    alone.set_attn_implementation("plain_in_tests" if dtype == torch.float64 else alone.config._attn_implementation)
    use_tree_attention(packed)
    assert packed.config._attn_implementation == TREE
    return alone, packed


MODELS = {(name, d): two_models(c, d) for name, c in CONFIGS.items() for d in (torch.float32, torch.float64)}


def leaves(parent: np.ndarray) -> list[list[int]]:
    """The paths that are not part of a longer one."""
    paths = []
    for node in sorted(set(range(len(parent))) - set(parent.tolist())):
        path = [node]
        while parent[path[-1]] != -1:
            path.append(int(parent[path[-1]]))
        paths.append(path[::-1])
    return paths


def check_equals_alone(alone: Any, packed: Any, parent: np.ndarray, tolerance: float) -> None:
    """Logits, and the gradient of a weighted sum of them, of a row and of its paths."""
    layout = TreeLayout(parent)
    generator = torch.Generator().manual_seed(len(parent))
    ids = torch.randint(1, 40, (len(parent),), generator=generator)
    dtype = next(alone.parameters()).dtype
    weights = torch.randn(len(parent), 40, generator=generator, dtype=dtype)
    model = getattr(packed, "module", packed)
    positions = torch.from_numpy(layout.depth)[None]
    row = tree_forward(packed, layout, input_ids=ids[None], position_ids=positions, use_cache=False).logits[0]
    model.zero_grad()
    (row * weights).sum().backward()
    alone.zero_grad()
    expected = torch.zeros_like(row)
    seen: set[int] = set()
    for path in leaves(parent):
        logits = alone(input_ids=ids[path][None], use_cache=False).logits[0]
        new = [i for i, node in enumerate(path) if node not in seen]
        seen |= set(path)
        (logits[new] * weights[path][new]).sum().backward()
        expected[path] = logits.detach()
    scale = 1 + expected.abs().max().item()
    assert (row - expected).abs().max().item() <= tolerance * scale
    gradients = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    scale = 1 + max(gradient.abs().max().item() for gradient in gradients.values())
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (found[name] - gradient).abs().max().item() <= tolerance * scale, name


@pytest.mark.parametrize("name", CONFIGS)
@quick(6)
@given(parent=trees())
def test_a_row_equals_its_samples_alone(name: str, parent: np.ndarray) -> None:
    check_equals_alone(*MODELS[name, torch.float64], parent, 1e-10)
    check_equals_alone(*MODELS[name, torch.float32], parent, 1e-5)


@pytest.mark.usefixtures("call_overhead")
@pytest.mark.parametrize("name", CONFIGS)
def test_however_the_work_is_divided(name: str) -> None:
    for parent in SHAPES.values():
        check_equals_alone(*MODELS[name, torch.float64], parent, 1e-10)


SHAPES = {
    "one token": np.array([-1]),
    "one sample": np.arange(-1, 9),
    "two completions": np.array([-1, 0, 1, 2, 3, 1, 5, 6]),
    "nothing shared": np.array([-1, 0, 1, -1, 3, -1]),
    "branch in a branch": np.array([-1, 0, 1, 2, 1, 4, 5, 4, 7, 0, 9, -1, 11]),
}


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_checkpointing_sees_the_same_layout(name: str, reentrant: bool) -> None:
    alone, packed = MODELS[name, torch.float64]
    packed = copy.deepcopy(packed).train()
    wide_norms(packed)
    packed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    packed.enable_input_require_grads()
    check_equals_alone(alone, packed, SHAPES["branch in a branch"], 1e-10)


def test_below_an_adapter() -> None:
    alone, packed = (copy.deepcopy(m) for m in MODELS["qwen3", torch.float64])
    adapted = []
    for model in (alone, packed):
        torch.manual_seed(1)
        lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        adapted.append(get_peft_model(wide_norms(model), lora, autocast_adapter_dtype=False))
    assert any("lora" in name for name, p in adapted[0].named_parameters() if p.requires_grad)
    check_equals_alone(*adapted, SHAPES["branch in a branch"], 1e-10)


# ---- the function alone


def qkv(size: int, dtype: torch.dtype, heads: int = 4, kv_heads: int = 2, value_dim: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    shapes = [(1, heads, size, 16), (1, kv_heads, size, 16), (1, kv_heads, size, value_dim)]
    return [torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def dense(
    query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scale: float, window: Any, softcap: Any
) -> Tensor:
    mask = torch.from_numpy(attention_mask(layout.parent))
    if window is not None:
        depth = torch.from_numpy(layout.depth)
        mask &= depth[:, None] - depth < window
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


def check_backend(backend: Any, layout: TreeLayout, window: Any, softcap: Any, tolerance: float, **how: Any) -> None:
    inputs = qkv(layout.size, **{"dtype": torch.float64, **how})
    wide = [x.detach().double().requires_grad_() for x in inputs]
    found, expected = (f(*x, layout, 0.3, window, softcap) for f, x in ((backend, inputs), (dense, wide)))
    assert found.dtype == inputs[0].dtype
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert (found - expected).abs().max().item() <= tolerance
    gradients = torch.autograd.grad(found, inputs, grad.to(found.dtype))
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, wide, grad), strict=True):
        assert (ours - theirs).abs().max().item() <= tolerance * (1 + theirs.abs().max().item())


def long_row(seed: int = 0) -> np.ndarray:
    """Hundreds of tokens: long segments, many leaves, deep nesting."""
    rng = np.random.default_rng(seed)
    parent: list[int] = []
    for _ in range(3):
        root = len(parent)
        parent += [-1, *range(root, root + int(rng.integers(10, 90)))]
        for _ in range(12):
            node = int(rng.integers(root, len(parent)))
            path = [len(parent) - 1]
            while parent[path[-1]] != -1:
                path.append(parent[path[-1]])
            node = path[int(rng.integers(0, len(path)))]
            start = len(parent)
            parent += [node, *range(start, start + int(rng.integers(0, 20)))]
    return np.array(parent)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 20, 70, 5000])
def test_dense_blocks_on_a_long_row(window: Any, softcap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything that limits a block's size made small, and masks made anew."""
    for name, value in (("CALL_OVERHEAD", 3000), ("KEPT_MASK", 500), ("SOFTCAP_QUERIES", 16)):
        monkeypatch.setattr(blockwise, name, value)
    for name, value in (("MAX_SQUARE", 40), ("QUERY_CHUNK", 16)):
        monkeypatch.setattr(plan, name, value)
    check_backend(blockwise.blockwise_attention, TreeLayout(long_row()), window, softcap, 1e-11)


@pytest.mark.parametrize(
    "how",
    [
        {"heads": 2, "kv_heads": 2},
        {"heads": 6, "kv_heads": 1},
        {"value_dim": 8},
        {"value_dim": 24},
        {"dtype": torch.float32},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_shapes_and_dtypes(how: dict[str, Any]) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}.get(how.get("dtype"), 1e-12)
    for window, softcap in ((None, None), (4, None), (None, 1.5)):
        layout = TreeLayout(SHAPES["branch in a branch"])
        check_backend(blockwise.blockwise_attention, layout, window, softcap, tolerance, **how)


@quick(60)
@given(parent=trees(60), window=st.none() | st.integers(1, 12), overhead=st.sampled_from([0.0, 30.0, 1000.0]))
def test_a_plan_covers_each_pair_that_attends_once(parent: np.ndarray, window: int | None, overhead: float) -> None:
    layout = TreeLayout(parent)
    allowed = layout.attends(CPU, window).numpy()
    counts = np.zeros_like(allowed, dtype=int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "MAX_SQUARE", 16)
        patch.setattr(plan, "QUERY_CHUNK", 4)
        made = plan.make_plan(layout, window, overhead)
    diagonal = np.zeros(layout.size, dtype=int)
    for block in made.diagonal:
        diagonal[block.q0 : block.q1] += 1
    assert (diagonal == 1).all()
    for q0, q1, k0, k1, kind in made.diagonal + made.above:
        pairs = np.ones((q1 - q0, k1 - k0), dtype=bool)
        if kind == "causal":
            assert (q0, q1) == (k0, k1)
            pairs = np.tri(q1 - q0, dtype=bool)
        elif kind == "masked":
            pairs = allowed[q0:q1, k0:k1]
        counts[q0:q1, k0:k1] += pairs
    assert (counts == allowed).all()


def test_masks_stay_linear_in_the_row() -> None:
    one = long_row()
    many = np.concatenate([one + len(one) * i * (one != -1) for i in range(20)])
    for layout in (TreeLayout(one), TreeLayout(many)):
        made = plan.make_plan(layout, None, 1e9)
        masked = sum((b.q1 - b.q0) * (b.k1 - b.k0) for b in made.diagonal + made.above if b.kind == "masked")
        assert masked <= plan.MAX_SQUARE * layout.size


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (2, 1.5)])
def test_flex_attention(window: int | None, softcap: float | None) -> None:
    for parent in (SHAPES["branch in a branch"], long_row()[:200]):
        layout = TreeLayout(parent)
        query, key, value = (x.detach() for x in qkv(layout.size, torch.float64))
        found = flex.tree_attention(query, key, value, layout, 0.3, window, softcap)
        assert (found - dense(query, key, value, layout, 0.3, window, softcap)).abs().max().item() <= 1e-10


@quick(30)
@given(parent=trees(60), window=st.none() | st.integers(1, 20))
def test_blocks_of_flex_attention(parent: np.ndarray, window: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "BLOCK", 4)
        layout = TreeLayout(parent)
        needed, full = flex.needed_blocks(layout, window)
        mask = flex.block_mask(layout, window, CPU)
    allowed = layout.attends(CPU, window).numpy()
    size = -(-layout.size // 4) * 4
    padded = np.zeros((size, size), dtype=bool)
    padded[: layout.size, : layout.size] = allowed
    squares = padded.reshape(size // 4, 4, size // 4, 4).swapaxes(1, 2)
    assert not (squares.any((2, 3)) & ~needed).any()
    assert not (full & ~squares.all((2, 3))).any()
    assert (mask.to_dense()[0, 0].numpy().astype(bool) == needed | full).all()


def varlen_in_torch(query: Tensor, key: Tensor, value: Tensor, **call: Any) -> Tensor:
    """The contract of flash-attention's variable-length call: the last query of a sequence sees its last key."""
    assert call["is_causal"]
    outs = []
    q_ends, k_ends = call["cu_seq_lens_q"].tolist(), call["cu_seq_lens_k"].tolist()
    for i in range(len(q_ends) - 1):
        q = query[:, q_ends[i] : q_ends[i + 1]].transpose(1, 2)
        k, v = (x[:, k_ends[i] : k_ends[i + 1]].transpose(1, 2) for x in (key, value))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        ahead = torch.arange(k.shape[2]) - (torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2])
        hidden = ahead > 0
        if call["sliding_window"] is not None:
            hidden |= ahead <= -call["sliding_window"]
        assert q.shape[2] <= call["max_length_q"]
        assert k.shape[2] <= call["max_length_k"]
        scores = q @ k.transpose(-1, -2) * call["softmax_scale"]
        outs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2))
    return torch.cat(outs, 1)


@quick(10)
@given(parent=trees(40), window=st.none() | st.integers(1, 8))
def test_paths_for_flash_attention(parent: np.ndarray, window: int | None) -> None:
    def backend(*args: Any) -> Tensor:
        return varlen.tree_attention(*args, forward=varlen_in_torch)

    for value_dim in (16, 8):
        check_backend(backend, TreeLayout(parent), window, None, 1e-11, value_dim=value_dim)


def test_the_page_s_example() -> None:
    at = varlen.paths(TreeLayout(np.array([-1, 0, 1, 2, 3, 1, 5, 6])), CPU)
    assert at.keys.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 6, 7]
    assert (at.cumulative_queries.tolist(), at.cumulative_keys.tolist()) == ([0, 5, 8], [0, 5, 10])
    assert (at.longest_queries, at.longest_keys) == (5, 5)


# ---- the interface


@quick(60)
@given(trees(40))
def test_layout(parent: np.ndarray) -> None:
    layout = TreeLayout(parent)
    assert (layout.attends(CPU).numpy() == attention_mask(parent)).all()
    assert (layout.depth == attention_mask(parent).sum(1) - 1).all()
    assert [s.start for s in layout.segments[1:]] == [s.end for s in layout.segments[:-1]]


@pytest.mark.parametrize("parent", [[], [0], [-1, 2, 1], [-1, 0, 0, 1], [-1, -1, 0], [-1, -2]], ids=str)
def test_rows_that_are_no_tree_laid_out_depth_first(parent: list[int]) -> None:
    with pytest.raises(ValueError):
        TreeLayout(np.array(parent, dtype=np.int32))


def test_an_ordinary_forward_of_a_switched_model_is_as_before() -> None:
    for name in ("qwen3", "mistral, sliding window"):
        alone, packed = MODELS[name, torch.float32]
        ids = torch.randint(1, 40, (2, 9))
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        before, after = (m(input_ids=ids, attention_mask=mask).logits[:, 3:] for m in (alone, packed))
        assert torch.allclose(before, after, atol=1e-6)


def test_a_model_that_was_not_switched_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="call use_tree_attention"):
        tree_forward(
            MODELS["qwen3", torch.float32][0], TreeLayout(np.array([-1, 0])), input_ids=torch.ones(1, 2).long()
        )


def test_a_model_that_drops_the_layout_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(MODELS["qwen3", torch.float32][1])
    inner = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda tree_layout=None, **kwargs: inner(**kwargs))
    with pytest.raises(RuntimeError, match="drops keyword arguments"):
        tree_forward(model, TreeLayout(np.array([-1, 0])), input_ids=torch.ones(1, 2).long())


def test_a_window_that_only_the_mask_knows_is_noticed() -> None:
    model = copy.deepcopy(MODELS["mistral, sliding window", torch.float32][1])
    for layer in model.model.layers:
        layer.self_attn.config = copy.deepcopy(model.config)
        layer.self_attn.config.sliding_window = None
        layer.self_attn.config._attn_implementation_internal = TREE
    with pytest.raises(RuntimeError, match="sliding window"):
        tree_forward(model, TreeLayout(np.array([-1, 0])), input_ids=torch.ones(1, 2).long())


def test_what_no_backend_does_is_refused_at_the_call() -> None:
    layout = TreeLayout(np.array([-1, 0, 1]))
    query, key, value = qkv(3, torch.float32)
    call = interface.tree_attention_forward
    with pytest.raises(ValueError, match="attention sinks"):
        call(nn.Identity(), query, key, value, None, tree_layout=layout, s_aux=torch.zeros(4))
    with pytest.raises(ValueError, match="position bias"):
        call(nn.Identity(), query, key, value, None, tree_layout=layout, position_bias=torch.zeros(4))
    with pytest.raises(ValueError, match="mask of its own"):
        call(nn.Identity(), query, key, value, torch.zeros(1, 1, 3, 3), tree_layout=layout)
    with pytest.raises(ValueError, match="causal self-attention"):
        call(nn.Identity(), query, key, value, None, tree_layout=layout, is_causal=False)
    with pytest.raises(ValueError, match="causal self-attention"):
        call(nn.Identity(), query, key[:, :, :2], value[:, :, :2], None, tree_layout=layout)
    with pytest.raises(ValueError, match="dropout"):
        call(nn.Identity(), query, key, value, None, dropout=0.1, softcap=1.0, tree_layout=layout)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gpt_oss", "attention sinks"),
        ("t5", "encoder-decoder"),
        ("bart", "encoder-decoder"),
        ("mllama", "cross attention"),
        ("mamba", "carr(y|ies) a state"),
        ("mamba2", "carr(y|ies) a state"),
        ("jamba", "carr(y|ies) a state"),
        ("rwkv", "carr(y|ies) a state"),
        ("lfm3", "carr(y|ies) a state"),
        ("falcon_h1", "carr(y|ies) a state"),
        ("olmo_hybrid", "carr(y|ies) a state"),
        ("kimi_linear", "carr(y|ies) a state"),
        ("blt", "AttentionInterface"),
        ("llama4_text", "by position"),
        ("bloom", "AttentionInterface"),
        ("falcon", "AttentionInterface"),
    ],
)
def test_models_that_would_be_wrong_are_refused(model_type: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"'{model_type}' cannot be trained on packed rows.*{reason}"):
        check_model(AutoConfig.for_model(model_type))


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "llama",
        "mistral",
        "gemma2",
        "gemma3_text",
        "phi3",
        "olmo2",
        "smollm3",
        "deepseek_v3",
        "glm4",
        "granite",
        "mixtral",
        "qwen3_next",
        "qwen3_5_text",
        "qwen3_5_moe_text",
    ],
)
def test_ordinary_decoders_are_not(model_type: str) -> None:
    check_model(AutoConfig.for_model(model_type))


@pytest.mark.parametrize("model_type", sorted(PACKED))
def test_models_that_preflight_takes_without_a_look_are_not_either(model_type: str) -> None:
    check_model(AutoConfig.for_model(model_type))


@pytest.mark.parametrize("repository", [varlen.FLASH_4, varlen.AITER])
def test_soft_caps_are_refused_where_the_kernel_has_none(repository: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "kernel_repository", lambda: repository)
    with pytest.raises(ValueError, match=f"'gemma2'.*{repository}"):
        check_model(CONFIGS["gemma2, soft cap"], device="cuda")
    check_model(CONFIGS["gemma2, soft cap"], device="cpu")
    check_model(CONFIGS["gemma3"], device="cuda")
    monkeypatch.setattr(varlen, "kernel_repository", lambda: varlen.FLASH_3)
    check_model(CONFIGS["gemma2, soft cap"], device="cuda")


def test_backends_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = interface.choose_backend.__wrapped__
    assert choose("cpu", torch.float32) is blockwise.blockwise_attention
    assert choose("cuda", torch.bfloat16) is flex.tree_attention  # no GPU here: no kernel for it
    monkeypatch.setattr(varlen, "kernel_repository", lambda: varlen.FLASH_3)
    assert choose("cuda", torch.float32) is flex.tree_attention

    def unreachable(name: str) -> Any:
        raise OSError(f"{name} is not here")

    monkeypatch.setattr(varlen, "flash_forward", unreachable)
    with pytest.warns(UserWarning, match="kernels-community/flash-attn3 cannot be loaded"):
        assert choose("cuda", torch.bfloat16) is flex.tree_attention
    monkeypatch.setattr(varlen, "flash_forward", lambda name: varlen_in_torch)
    assert choose("cuda", torch.bfloat16).func is varlen.tree_attention
