"""Gated DeltaNet hybrids: a packed row equals its samples forwarded alone, forward and backward."""

import copy
import importlib.util
import inspect
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from slipstream.packing.attention import TreeLayout, delta, tree_forward, use_tree_attention
from tests.model.test_tree_attention import check_equals_alone, long_row

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "pad_token_id": 0,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MODULES: dict[str, Any] = {
    "qwen3_next": (modeling_qwen3_next, "Qwen3NextForCausalLM"),
    "qwen3_5_text": (modeling_qwen3_5, "Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": (modeling_qwen3_5_moe, "Qwen3_5MoeForCausalLM"),
}
ROWS = {
    "one token": np.array([-1]),
    "one sample": np.arange(-1, 9),
    "branches sooner than the convolution is wide": np.array([-1, 0, 1, 1, 0, 4, 4, -1, 7]),
    "branch in a branch": np.array([-1, 0, 1, 2, 1, 4, 5, 4, 7, 0, 9, -1, 11]),
    "more than a chunk": long_row()[:300],
}


def in_float64(module: Any) -> Any:
    """A copy of a module of transformers that computes in float64 what it computes in float32."""
    name = module.__name__ + "_in_float64"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, module.__file__)
        assert spec is not None
        made = importlib.util.module_from_spec(spec)
        sys.modules[name] = made
        text = re.sub(r"torch\.float(32)?\b", "torch.float64", inspect.getsource(module)).replace(
            ".float()", ".double()"
        )
        exec(compile(text, module.__file__, "exec"), made.__dict__)
    return sys.modules[name]


def two_models(model_type: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """The same weights, one for samples alone, one for packed rows."""
    module, name = MODULES[model_type]
    config = AutoConfig.for_model(model_type, **copy.deepcopy(SIZES))
    torch.manual_seed(0)
    model_class = getattr(in_float64(module) if dtype == torch.float64 else module, name)
    config._experts_implementation = "eager"  # the grouped product has no float64
    alone = model_class(config).to(dtype)
    packed = copy.deepcopy(alone)
    use_tree_attention(packed)
    return alone, packed


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("model_type", MODULES)
def test_a_row_equals_its_samples_alone(model_type: str, row: str) -> None:
    check_equals_alone(*two_models(model_type, torch.float64), ROWS[row], 1e-10)


@pytest.mark.parametrize("model_type", MODULES)
def test_in_float32(model_type: str) -> None:
    check_equals_alone(*two_models(model_type, torch.float32), ROWS["branch in a branch"], 1e-4)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_gradient_checkpointing_sees_the_same_layout(reentrant: bool) -> None:
    alone, packed = two_models("qwen3_next", torch.float64)
    packed.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    packed.enable_input_require_grads()
    check_equals_alone(alone, packed, ROWS["branch in a branch"], 1e-10)


def recurrence(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **how: Any) -> Any:
    """The gated delta rule token by token, in the dtype of its inputs."""
    state = how.get("initial_state")
    if state is None:
        state = torch.zeros(len(query), query.shape[2], query.shape[3], value.shape[3], dtype=query.dtype)
    outs = []
    for t in range(query.shape[1]):
        q, k, v = query[:, t], key[:, t], value[:, t]
        state = state * g[:, t].exp()[..., None, None]
        written = (v - torch.einsum("bhkv,bhk->bhv", state, k)) * beta[:, t, :, None]
        state = state + k[..., None] * written[..., None, :]
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q))
    return torch.stack(outs, 1), state if how["output_final_state"] else None


@pytest.mark.parametrize("row", ROWS)
def test_each_segment_starts_from_its_parent_s_state(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "CHUNK", 4)
    layout = TreeLayout(ROWS[row])
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3), (2, 3), (2, 5), (2,), (2,)]
    q, k, v, g, beta = (torch.randn(1, layout.size, *s, dtype=torch.float64, generator=generator) for s in shapes)
    inputs = [q, k / k.norm(dim=-1, keepdim=True), v, -g.abs(), beta.sigmoid()]
    found = delta.tree_delta_rule(recurrence, *inputs, layout=layout)
    attends = layout.attends(torch.device("cpu"))
    for node in range(layout.size):
        path = attends[node].nonzero()[:, 0]
        expected, _ = recurrence(*(x[:, path] for x in inputs), output_final_state=False)
        assert torch.allclose(found[0, node], expected[0, -1], rtol=0, atol=1e-12)


def test_an_ordinary_forward_is_as_before() -> None:
    alone, packed = two_models("qwen3_next", torch.float32)
    ids = torch.randint(1, 40, (2, 9))
    assert torch.allclose(alone(input_ids=ids).logits, packed(input_ids=ids).logits, atol=1e-6)


def test_a_packed_row_with_a_cache_is_refused() -> None:
    packed = two_models("qwen3_next", torch.float32)[1]
    with pytest.raises(ValueError, match="use_cache=False"):
        tree_forward(packed, TreeLayout(np.arange(-1, 3)), input_ids=torch.ones(1, 4).long(), use_cache=True)


def test_layers_that_are_computed_in_another_way_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("qwen3_next", **copy.deepcopy(SIZES))
    monkeypatch.delattr(modeling_qwen3_next, "causal_conv1d_fn")
    with pytest.raises(ValueError, match="does not call causal_conv1d_fn"):
        use_tree_attention(AutoModelForCausalLM.from_config(config))
