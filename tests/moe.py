"""Tiny mixtures of experts, and the trainer on them."""

from pathlib import Path
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from slipstream.packing.attention import use_tree_attention
from tests.learner_replay import VOCABULARY, ReplayTrainer, made_up_group, replay_config

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
    "router_aux_loss_coef": 0.125,
}
MODELS: dict[str, Any] = {
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=8)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    model.set_experts_implementation("eager")  # the grouped kernels take no float64
    use_tree_attention(model, torch.device("cpu"))
    return model


def run_moe(output_dir: Path, coefficient: float | None, **changes: Any) -> ReplayTrainer:
    """Train an epoch of four groups with two micro-batches a step; the trainer."""
    groups = [made_up_group(number, 3, 5, 4) for number in range(4)]
    settings = {"gradient_accumulation_steps": 2, **changes}
    config = replay_config(output_dir, router_aux_loss_coef=coefficient, **settings)
    trainer = ReplayTrainer(model_of("qwen3_moe"), config, groups, 48)
    trainer.train()
    return trainer
