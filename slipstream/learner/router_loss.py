"""The load-balancing loss of a mixture of experts, over the tokens of one packed row."""

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.learner.policy_head import text_config, unwrapped


class RouterLoss:
    """Adds `coefficient * loss` to the training loss of a mixture of experts.

    The loss is the one that the model's own code has; only which tokens it is over is ours: the model would take a
    packed row's attention mask for a padding mask.
    """

    def __init__(self, model: Any, coefficient: float) -> None:
        self.coefficient = coefficient
        self._routers = routers_of(model)
        self._function = _loss_function(model)
        config = text_config(model)
        self._num_experts = _first(config, "num_experts", "num_local_experts")
        self._top_k = _first(config, "num_experts_per_tok", "moe_top_k")
        self._logits: list[Tensor] = []

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the router's logits of the one forward, with gradient, that runs inside."""
        self._logits = []
        handles = [
            module.register_forward_hook(lambda _module, _args, output, index=index: self._record(output, index))
            for module, index in self._routers
        ]
        try:
            yield
        finally:
            # taken off before the backward, in which checkpointed layers run again
            for handle in handles:
                handle.remove()

    def _record(self, output: Any, index: int) -> None:
        if torch.is_grad_enabled():
            self._logits.append(output[index] if isinstance(output, tuple) else output)

    def value(self, num_tokens: int) -> Tensor:
        """The unscaled loss over the first `num_tokens` tokens of the recorded forward; a scalar, with gradient."""
        logits, self._logits = self._logits, []
        if not any(layer.requires_grad for layer in logits):
            raise RuntimeError(
                "the router's logits have no gradient: with gradient checkpointing set "
                'gradient_checkpointing_kwargs={"use_reentrant": False}, or set router_aux_loss_coef=0'
            )
        flat = tuple(layer.reshape(-1, layer.shape[-1])[:num_tokens] for layer in logits)
        return self._function(flat, self._num_experts, self._top_k)


def router_loss(model: Any, coefficient: float | None) -> RouterLoss | None:
    """The router loss to train with, or None for none.

    Args:
        coefficient: its weight; None takes that of the model's config, 0 switches it off.

    Raises:
        ValueError: a coefficient for a model that has no router loss.
    """
    is_moe = bool(routers_of(model)) and _loss_function(model) is not None
    if coefficient is None:
        coefficient = getattr(text_config(model), "router_aux_loss_coef", None) if is_moe else None
    elif not is_moe:
        raise ValueError(
            f"router_aux_loss_coef={coefficient}: {type(unwrapped(model)).__name__} is no mixture of experts with a "
            "load-balancing loss; leave the field out"
        )
    return RouterLoss(model, float(coefficient)) if coefficient else None


def routers_of(model: Any) -> list[tuple[nn.Module, int]]:
    """The router modules, in order, and where in its output each has its logits."""
    found: dict[nn.Module, int] = {}
    inner: nn.Module = unwrapped(model)
    for owner in inner.modules():
        recorded: Any = getattr(owner, "_can_record_outputs", None) or {}
        recorders: Any = recorded.get("router_logits")
        for recorder in recorders if isinstance(recorders, (list, tuple)) else [recorders]:
            if recorder is None:
                continue
            target, index = (recorder, 1) if isinstance(recorder, type) else (recorder.target_class, recorder.index)
            for module in owner.modules():
                if target is not None and isinstance(module, target):
                    found[module] = index
    return [(module, found[module]) for module in inner.modules() if module in found]


def _loss_function(model: Any) -> Any:
    """`load_balancing_loss_func` of the module that the model's class comes from, or None."""
    inner = unwrapped(model)
    base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    function = getattr(sys.modules[type(base).__module__], "load_balancing_loss_func", None)
    if function is None or list(inspect.signature(function).parameters)[:3] != ["gate_logits", "num_experts", "top_k"]:
        return None
    return function


def _first(config: Any, *names: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    raise ValueError(f"router_aux_loss_coef: the model's config has none of {', '.join(names)}; set it to 0")
