"""What the trainer is made of: checked, loaded, and warned about."""

import warnings
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream.packing.attention import use_tree_attention

_AS_FUNCTION = "serve a reward model on its own, and pass a function that asks it over HTTP"


def as_dict(value: Any) -> dict[str, Any]:
    """`value`, or nothing where it is no dictionary."""
    return value if isinstance(value, dict) else {}


def check_dataset(dataset: Any) -> None:
    """Raise ValueError where the training data is missing, empty or not conversational."""
    if dataset is None:
        raise ValueError("train_dataset is missing: pass rows with a conversational 'prompt' column")
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise ValueError("train_dataset is empty")
    columns = getattr(dataset, "column_names", None)
    if columns is not None and "prompt" not in columns:
        raise ValueError(f"train_dataset has no 'prompt' column, only {', '.join(columns)}")
    row = next(iter(dataset), None)
    if row is None:
        raise ValueError("train_dataset is empty: it is iterable, and gave no row")
    first = row.get("prompt") if isinstance(row, dict) else row
    if not (isinstance(first, list) and first and isinstance(first[0], dict) and {"role", "content"} <= set(first[0])):
        raise ValueError(
            f"train_dataset: 'prompt' must be a list of messages with role and content, not {first!r:.200}; for plain "
            'text use [{"role": "user", "content": text}]'
        )
    if images := {"image", "images"} & set(row):
        raise ValueError(f"train_dataset: images are not supported, and it has the column {min(images)!r}: remove it")
    if any(isinstance(message.get("content"), list) for message in first):
        raise ValueError(
            "train_dataset: a message of 'prompt' has a list as its content; images are not supported: write its text as one "
            "string"
        )


def check_evaluation(dataset: Any, args: Any) -> None:
    """Raise ValueError where evaluations are asked for, but there is nothing to evaluate on."""
    if dataset is not None:
        return
    if args.eval_strategy != "no":
        raise ValueError(
            f'eval_strategy = {args.eval_strategy.value!r}: there is no eval_dataset; pass one, or set eval_strategy="no"'
        )
    if args.eval_on_start:
        raise ValueError("eval_on_start = True: there is no eval_dataset; pass one, or set eval_on_start=False")


def check_rewards(functions: list[Any]) -> None:
    """Raise ValueError where there is no reward function, or something that is none."""
    if not functions:
        raise ValueError("reward_funcs is missing: pass one function or a list of them")
    for function in functions:
        if isinstance(function, torch.nn.Module):
            raise ValueError(f"reward_funcs: {type(function).__name__} is a model; {_AS_FUNCTION}")
        if not callable(function):
            raise ValueError(f"reward_funcs: {function!r} is not callable; {_AS_FUNCTION}")


def load_model(model: str | PreTrainedModel, args: Any) -> tuple[PreTrainedModel, str]:
    """The model with tree attention, and its name. Raises ValueError for one that packed rows would not be right for."""
    if not isinstance(model, str):
        use_tree_attention(model, args.device)
        return model, model.config._name_or_path
    kwargs = {"dtype": args.dtype, **as_dict(args.model_init_kwargs)}
    if kwargs.pop("attn_implementation", None) is not None:
        warnings.warn(
            "model_init_kwargs: attn_implementation is left out: packed rows need tree attention", stacklevel=3
        )
    loaded = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=args.trust_remote_code, **kwargs)
    use_tree_attention(loaded, args.device)
    return loaded, model


def warn_dropout(model: Any) -> None:
    """Warn about dropout by its name."""
    found = {
        name: value
        for name, value in model.config.to_dict().items()
        if "dropout" in name and isinstance(value, (int, float)) and value > 0
    }
    found.update({name: m.p for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout) and m.p > 0})
    if found:
        name, value = next(iter(found.items()))
        warnings.warn(
            f"the model has {name} = {value}: with dropout the ratio of trainer to sampler differs from 1 even for "
            "fresh samples; set it to 0 in the model's config",
            stacklevel=3,
        )


def eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """EOS: the generation config's list and the tokenizer's."""
    found = getattr(model.generation_config, "eos_token_id", None)
    ids = list(found) if isinstance(found, (list, tuple)) else [found]
    ids.append(tokenizer.eos_token_id)
    return sorted({int(i) for i in ids if i is not None})
