"""Tiny models for tests: two-layer Qwen3 with a byte tokenizer, made in a second, servable by vLLM."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIALS = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and four special tokens: 260 in all."""
    vocabulary = SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def new_model(tied: bool, seed: int) -> Qwen3ForCausalLM:
    """A float32 model with random weights that differ by `seed`; large enough initial weights to tell two apart."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        eos_token_id=SPECIALS.index("<|im_end|>"),
        pad_token_id=SPECIALS.index("<|pad|>"),
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).float().eval()


def save_tiny_model(path: Path, tied: bool, seed: int = 0) -> Path:
    """Write model and tokenizer to `path` as `from_pretrained` and vLLM read them."""
    new_model(tied, seed).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path
