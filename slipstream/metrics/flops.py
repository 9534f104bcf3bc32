"""Model FLOPs of a training step, and the peak of the device that does them. Pure."""

from typing import Any

# dense bf16 / fp16 FLOP/s with float32 accumulation, from the vendors' data sheets; the first name that matches counts
PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    ("B200", 2250e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10", 125e12),
    ("MI325X", 1307e12),
    ("MI300X", 1307e12),
)
NAME_ENDS = " -,"  # a model's name ends there: "NVIDIA L4" is no "NVIDIA L40S"
SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe")


def peak_flops(device: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device by its name, like "NVIDIA H100 80GB HBM3"; None where it is not known.

    `dtype` is that of the matrix products: "bfloat16" or "float16". float32 depends on whether TF32 is on: not known.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    padded = device.translate({ord(c): " " for c in NAME_ENDS}) + " "
    return next((peak for name, peak in PEAK_FLOPS if f" {name} " in f" {padded}"), None)


class FlopCount:
    """FLOPs of forward and backward, without what gradient checkpointing computes again.

    A product with a weight takes 2 FLOPs per token and element forward, 2 for the gradient of its input, and 2 for its
    own where it is trained.
    """

    def __init__(self, config: Any, trains_weights: bool) -> None:
        """`config`: of a supported architecture; `trains_weights`: False where only adapters are trained."""
        hidden, heads = config.hidden_size, config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        dense = 3 * hidden * config.intermediate_size
        weights = 0.0
        for layer in range(config.num_hidden_layers):
            weights += attention + (_experts(config) if _is_sparse(config, layer) else dense)
        self._per_token = (6 if trains_weights else 4) * weights
        self._per_term = (6 if trains_weights else 4) * hidden * config.vocab_size
        self._per_pair = 12 * config.num_hidden_layers * heads * head_dim  # two products, each with two gradients

    @classmethod
    def of(cls, config: Any, trains_weights: bool) -> "FlopCount | None":
        """The count for a model's config, or None where its architecture is not known here."""
        return cls(config, trains_weights) if getattr(config, "model_type", None) in SUPPORTED else None

    def step(self, tokens: int, terms: int, pairs: int) -> float:
        """FLOPs of a step.

        Args:
            tokens: forwarded.
            terms: positions whose logits are made.
            pairs: (query, key) pairs that attend.
        """
        return self._per_token * tokens + self._per_term * terms + self._per_pair * pairs


def _is_sparse(config: Any, layer: int) -> bool:
    if not getattr(config, "num_experts", None):
        return False
    return layer not in (config.mlp_only_layers or []) and (layer + 1) % config.decoder_sparse_step == 0


def _experts(config: Any) -> int:
    """Weights that one token meets in a layer of experts, with the router."""
    chosen = config.num_experts_per_tok * 3 * config.hidden_size * config.moe_intermediate_size
    return chosen + config.hidden_size * config.num_experts
