"""Which models can be trained on packed rows; the others are refused with the reason.

python -m slipstream.packing.attention.support FOLDER: prints the reason and ends with `REFUSED` where one is refused
"""

import inspect
import re
import sys
from typing import Any

import torch

from slipstream.packing.attention import varlen
from slipstream.packing.attention.delta import MODEL_TYPES
from slipstream.preflight_model import REFUSED

ALONG_THE_PATH = ("full_attention", "sliding_attention")  # kinds of layers that attention over the tree covers
RECURRENT = ("linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", "recurrent")


def check_model(config: Any, model_class: type | None = None, device: str | torch.device = "cpu") -> None:
    """Raise ValueError naming the model type, the reason and the way out.

    Args:
        config: the model's configuration.
        model_class: its class; None finds the class of causal language models.
        device: where it will train; only hub kernels restrict.
    """
    text = config.get_text_config(decoder=True)
    reason = _reason(config, text, model_class or _class_of(config), torch.device(device))
    if reason:
        raise ValueError(
            f"model type {config.model_type!r} cannot be trained on packed rows: {reason}; use a decoder-only model "
            "whose layers are full or sliding-window attention or Gated DeltaNet, for example Qwen3, Llama or Qwen3.5"
        )


def _reason(config: Any, text: Any, model_class: type | None, device: torch.device) -> str | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model, and cross attention does not follow the tree"
    if getattr(text, "add_cross_attention", False) or getattr(text, "cross_attention_layers", None):
        return "its cross attention does not follow the tree"
    if getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", False) is True:
        return "its attention is bidirectional"
    delta = config.model_type in MODEL_TYPES
    covered = {*ALONG_THE_PATH, "linear_attention"} if delta else set(ALONG_THE_PATH)
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - covered)
    if kinds:
        what = "carry a state from token to token" if set(kinds) & set(RECURRENT) else "choose their keys by position"
        return f"its {', '.join(kinds)} layers {what} in the row, not along the tree"
    source = _source(model_class)
    if re.search(r"\bs_aux\b|\bself\.sinks\b", source):
        return "it has attention sinks, which no backend of tree attention supports"
    if getattr(model_class, "_is_stateful", False) and not delta:
        return "it carries a state from token to token in the row, not along the tree"
    if model_class is not None and not model_class._can_set_attn_implementation():  # type: ignore[attr-defined]
        return "its attention does not go through transformers' AttentionInterface"
    if model_class is not None and not delta and not getattr(model_class, "_supports_attention_backend", False):
        return "transformers does not declare that its attention can be exchanged through the AttentionInterface"
    repository = varlen.kernel_repository() if device.type == "cuda" else None
    if getattr(text, "attn_logit_softcapping", None) and repository in varlen.WITHOUT_SOFTCAP:
        return f"it caps its attention logits, which {repository}, the kernel for this GPU, cannot do"
    return None


def _class_of(config: Any) -> type | None:
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return found[0] if isinstance(found, (list, tuple)) else found


def _source(model_class: type | None) -> str:
    """The text of the model's module."""
    module = inspect.getmodule(model_class) if model_class is not None else None
    try:
        return inspect.getsource(module) if module is not None else ""
    except (OSError, TypeError):
        return ""


def main(folder: str) -> int:
    from transformers import AutoConfig

    try:
        check_model(AutoConfig.from_pretrained(folder))
    except ValueError as error:
        print(error)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
