"""Model FLOPs against PyTorch's own counter, and device peaks by name."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from slipstream.metrics.flops import FlopCount, peak_flops

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(("kind", "extra"), [(LlamaConfig, {}), (Qwen2Config, {}), (Qwen3Config, {"head_dim": 8})])
@pytest.mark.parametrize("trained", [True, False])
def test_as_many_as_are_done(kind, extra, trained):
    config = kind(**SIZES, **extra)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tokens = 10
    if trained:
        inputs = {"input_ids": torch.arange(tokens)[None]}
    else:  # gradients flow through weights that have none themselves, as below an adapter
        model.requires_grad_(False)
        inputs = {"inputs_embeds": torch.randn(1, tokens, config.hidden_size, requires_grad=True)}
    with FlopCounterMode(display=False) as counter:
        model(**inputs, use_cache=False).logits.sum().backward()
    count = FlopCount.of(config, trained)
    assert count is not None
    pairs = tokens * tokens  # the eager product makes all of them
    assert count.step(tokens, tokens, pairs) == counter.get_total_flops()


def test_an_unknown_architecture_has_no_count():
    class Config:
        model_type = "mamba"

    assert FlopCount.of(Config(), True) is None


def test_experts_count_as_far_as_they_are_used():
    from transformers import Qwen3MoeConfig

    sizes = {**SIZES, "moe_intermediate_size": 8, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    half = {**sizes, "num_experts_per_tok": 1}
    two, one = (FlopCount(Qwen3MoeConfig(**s), True).step(1, 0, 0) for s in (sizes, half))
    assert two - one == 6 * 3 * (3 * 16 * 8)


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H200", "float16", 989e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA L40", "bfloat16", None),
        ("AMD Instinct MI300X", "bfloat16", 1307e12),
        ("NVIDIA H100 80GB HBM3", "float32", None),
        ("cpu", "bfloat16", None),
    ],
)
def test_peaks(device, dtype, expected):
    assert peak_flops(device, dtype) == expected
