"""The model's own forward, with its output layer giving the few log-probabilities of a loss instead of logits.

The output layer is called where the model calls it, inside the forward of whatever wraps the model (DDP, FSDP2, PEFT,
autocast), so that their hooks see its parameters used. Only its `forward` is exchanged, for the length of one call.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from slipstream.algorithm.logprobs import Candidates, LogitTransform, TokenLogprobs, chunked_logprobs

# values sent through what the model does to its logits: powers of two, so that a scale can be read off exactly
PROBE = (-256.0, -16.0, -1.0, 0.0, 1.0, 16.0, 256.0)

_transforms: "WeakKeyDictionary[nn.Module, LogitTransform]" = WeakKeyDictionary()


def unwrapped(model: Any) -> Any:
    """The transformers model (or PEFT model) inside DDP and `torch.compile`."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = model.module
        if inner is None:
            return model
        model = inner


def output_layer(model: Any) -> nn.Linear:
    """The linear layer that makes the logits. Raises ValueError where the model has none that can be taken apart."""
    inner = unwrapped(model)
    layer = inner.get_output_embeddings()
    if type(layer) is nn.Linear or (isinstance(layer, nn.Linear) and type(layer).__name__.startswith("FSDP")):
        return layer
    found = "no output layer" if layer is None else f"an output layer of type {type(layer).__name__}"
    raise ValueError(
        f"{type(inner).__name__} has {found}; log-probabilities need a plain torch.nn.Linear: use a model that is not "
        "quantised there, and leave it out of the adapter's target_modules and modules_to_save"
    )


@contextlib.contextmanager
def exchanged_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """`module.forward` is `forward` inside; its hooks still run."""
    kept = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if kept is None:
            del module.__dict__["forward"]
        else:
            module.forward = kept


def policy_logprobs(
    model: Any,
    inputs: dict[str, Any],
    predict: Tensor,
    target: Tensor,
    head_ids: Tensor,
    temperature: float,
    candidates: Candidates | None = None,
    run: Callable[..., Any] | None = None,
) -> TokenLogprobs:
    """Forward one row and give the log-probabilities at its positions `predict` `(L,)`; see `chunked_logprobs`.

    Args:
        model: as wrapped for training. `inputs` are its keyword arguments, of batch size 1.
        run: calls the model with the inputs; None: the model itself.

    Raises:
        ValueError: a model whose logits are not a scaled, or soft-capped, linear map of its last hidden states.
    """
    layer = output_layer(model)
    call = model if run is None else run
    if layer not in _transforms:
        _transforms[layer] = measured_transform(model, inputs, call)
    found: list[TokenLogprobs] = []

    def forward(hidden: Tensor) -> Tensor:
        chosen = hidden[0].index_select(0, predict)
        found.append(
            chunked_logprobs(
                chosen,
                layer.weight,
                layer.bias,
                target,
                head_ids,
                temperature=temperature,
                transform=_transforms[layer],
                candidates=candidates,
            )
        )
        return hidden[:, :1, :1].float() * 0

    with exchanged_forward(layer, forward):
        output = call(**inputs)
    (result,) = found
    # wrappers hook the gradient of the model's output: it takes part in the loss, as a zero
    zero = (output.logits * 0).sum().to(result.logp.dtype)
    return TokenLogprobs(result.logp + zero, result.head_logp, result.head_valid, result.entropy, result.logsumexp)


@torch.no_grad()
def measured_transform(model: Any, inputs: dict[str, Any], run: Callable[..., Any] | None = None) -> LogitTransform:
    """What the model does to the output of its output layer, measured with numbers in place of logits.

    One forward without gradient. Raises ValueError where it is neither a scale nor a soft cap.
    """
    layer, name = output_layer(model), type(unwrapped(model)).__name__
    calls: list[torch.dtype] = []

    def forward(hidden: Tensor) -> Tensor:
        calls.append(hidden.dtype)
        return torch.tensor(PROBE, dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32).to(
            hidden.device
        )[None, None]

    devices = [layer.weight.device] if layer.weight.device.type == "cuda" else []
    # a run that was resumed measures once more than one that was not: what is random must not notice
    with torch.random.fork_rng(devices), exchanged_forward(layer, forward):
        output = (model if run is None else run)(**inputs)
    if len(calls) != 1:
        raise ValueError(f"{name} called its output layer {len(calls)} times in one forward: it cannot be trained here")
    seen = output.logits.flatten()
    if seen.shape != (len(PROBE),):
        raise ValueError(f"{name} changes the shape of its logits after the output layer: it cannot be trained here")
    return fitted(
        seen.double().cpu(), 1e-5 if seen.dtype in (torch.float32, torch.float64) else 2e-2, text_config(model)
    )


def text_config(model: Any) -> Any:
    """The configuration of the language model, also within a multimodal one."""
    config = unwrapped(model).config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def fitted(seen: Tensor, tolerance: float, config: Any) -> LogitTransform:
    """The transform that maps `PROBE` to `seen` `(7,)`. Raises ValueError."""
    probe = torch.tensor(PROBE, dtype=torch.float64)
    softcap = getattr(config, "final_logit_softcapping", None) or None
    named = [1.0]
    for key, value in config.to_dict().items():
        about_logits = ("logit" in key and "scal" in key) or key.endswith("multiplier")
        if about_logits and isinstance(value, (int, float)) and value > 0:
            named += [float(value), 1 / float(value)]
    for cap in dict.fromkeys((softcap, None)):
        at_one = float(seen[PROBE.index(1.0)])
        read = at_one if cap is None else cap * float(torch.atanh(torch.tensor(at_one / cap, dtype=torch.float64)))
        # a value of the config is exact; one read off is as exact as the dtype that it came through
        for scale in [*named, *([read] if tolerance < 1e-3 else [])]:
            expected = scale * probe if cap is None else cap * torch.tanh(scale * probe / cap)
            if torch.allclose(seen, expected, rtol=tolerance, atol=0.0):
                return LogitTransform(scale, cap)
    raise ValueError(
        f"{config.model_type} changes its logits after the output layer in a way that is neither a scale nor "
        f"final_logit_softcapping ({dict(zip(PROBE, seen.tolist(), strict=True))}): it cannot be trained here"
    )
