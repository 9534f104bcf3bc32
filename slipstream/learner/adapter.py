"""LoRA: train an adapter on a frozen model."""

from typing import Any


def check_adapter(peft_config: Any) -> None:
    """Raise ValueError on a PEFT configuration that cannot be delivered to the server, naming the way out."""
    kind = str(getattr(peft_config.peft_type, "value", peft_config.peft_type))
    if kind != "LORA":
        raise ValueError(f"peft_config of type {kind} is not supported: only LoraConfig can be merged for the server")
    targets = peft_config.target_modules or []
    if "lm_head" in ([targets] if isinstance(targets, str) else targets):
        raise ValueError("peft_config.target_modules has 'lm_head': an adapter on it is not supported, take it out")
    if getattr(peft_config, "use_dora", False):
        raise ValueError("peft_config.use_dora=True is not supported: set it to False")
    if peft_config.bias != "none":
        raise ValueError(f"peft_config.bias={peft_config.bias!r} is not supported: set it to 'none'")
    if peft_config.lora_dropout > 0:
        raise ValueError(
            f"peft_config.lora_dropout={peft_config.lora_dropout}: with dropout the ratio of trainer to sampler differs "
            "from 1 even for fresh samples; set it to 0"
        )


def add_adapter(model: Any, peft_config: Any, args: Any) -> Any:
    """The model wrapped with a new adapter; only the adapter is trained."""
    from peft import get_peft_model

    wrapped = get_peft_model(model, peft_config)
    if args.gradient_checkpointing:
        wrapped.enable_input_require_grads()  # the embedding is frozen, and checkpointing needs a gradient to start from
    return wrapped
