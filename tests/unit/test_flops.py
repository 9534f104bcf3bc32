"""Model FLOPs against PyTorch's own counter, and device peaks by name."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from slipstream.learner.plan import PlannedMicroBatch, StepPlan
from slipstream.learner.speed import SpeedMeter
from slipstream.metrics.flops import FlopCount, peak_flops
from slipstream.packing.trie import pack
from tests.samples import make_sample

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


def test_utilisation_by_hand():
    """Two devices of 1,000 FLOP/s; one row has two samples, the other is a filler."""
    row = pack([make_sample([5], [6, 7]), make_sample([5], [8])])
    config = Qwen3Config(**SIZES)
    count = FlopCount(config, True)
    flops = count.step(row.num_tokens, row.num_terms, int((row.position_ids + 1).sum()))
    plan = StepPlan([PlannedMicroBatch([row, pack([])], 3, 1.0)])
    filler = count.step(1, 0, 1)
    found = {
        name: (value, weight) for name, value, weight in SpeedMeter(config, True, 1000.0, 2).observe(plan, 2.0, 5.0)
    }
    assert found["perf/fwd_bwd_mfu"] == (pytest.approx((flops + filler) / 2000 / 2), 2.0)
    assert found["perf/wall_clock_mfu"] == (pytest.approx((flops + filler) / 2000 / 5), 5.0)
    assert found["perf/wall_clock_trained_tokens_per_s"] == (3 / 5, 5.0)
    assert found["perf/fwd_bwd_forwarded_tokens_per_s"] == ((row.num_tokens + 1) / 2, 2.0)
    assert not any("mfu" in name for name, _, _ in SpeedMeter(config, True, None, 2).observe(plan, 2.0, 5.0))
