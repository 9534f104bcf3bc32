"""Delivery of the policy to the server, and the policy's version."""

import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.serving.labels import make_label
from slipstream.serving.transport import ParameterInfo, SyncTimes, TransferError, WeightTransport

logger = logging.getLogger(__name__)

RETRY_DELAYS_S = (0.2, 0.5, 1.0, 2.0)


def full_tensor(tensor: Tensor) -> Tensor:
    """A sharded parameter whole (a collective over its ranks); any other as it is."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if callable(gather) else tensor


def is_sharded(model: nn.Module) -> bool:
    """Whether gathering a parameter is a collective over the ranks."""
    return any(callable(getattr(parameter, "full_tensor", None)) for parameter in model.parameters())


def policy_parameters(model: nn.Module) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Name, dtype and full shape of what `policy_tensors` yields, without gathering anything."""
    return [(name, parameter.dtype, tuple(parameter.shape)) for name, parameter, _ in _policy(model)]


def policy_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and full value of every parameter under its checkpoint name; tied ones once; LoRA adapters merged.

    The model's own weights are not touched: merging in place and back would let rounding pile up.
    Every rank of a sharded model must run through it in step.
    """
    for name, parameter, layer in _policy(model):
        value = full_tensor(parameter.detach())
        if layer is not None:
            for adapter in layer.active_adapters:
                if adapter in layer.lora_A:
                    value = value + full_tensor(layer.get_delta_weight(adapter).detach()).to(value.dtype)
        yield name, value


def _policy(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Any]]:
    """Name on the server, parameter, and the LoRA layer whose adapters are to be added (else None)."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]  # peft
    for name, parameter in base.named_parameters():
        if ".lora_" in name or ".original_module." in name:
            continue
        layer = None
        if name.endswith(".base_layer.weight"):
            layer = base.get_submodule(name.removesuffix(".base_layer.weight"))
        yield name.replace(".base_layer.", ".").replace(".modules_to_save.default.", "."), parameter, layer


class Tries:
    """Counts what went wrong with the transport, and waits before the next try.

    Args:
        most: further tries. Of steps that took their whole bound one is made again, as a bound may be half an hour.
    """

    def __init__(self, most: int = len(RETRY_DELAYS_S)) -> None:
        self._delays = RETRY_DELAYS_S[:most]
        self._made = self._slow = 0

    def again(self, error: TransferError) -> None:
        """Return when it is time for the next try; raises `error` where there is none."""
        self._slow += error.timed_out
        if not error.passing or self._made == len(self._delays) or self._slow > 1:
            raise error
        logger.warning("trying again in %g s: %s", self._delays[self._made], error)
        time.sleep(self._delays[self._made])
        self._made += 1


class PolicySync:
    """Counts weight updates, and delivers them to the server from rank 0.

    Args:
        transport: on rank 0; None on the others, which only take part in gathering sharded parameters.
        run_id, attempt: for the label on the server.
        dtype: that the weights travel in; None: their own.
        version: the policy version at the start (after a resume: the checkpoint's).
    """

    def __init__(
        self, transport: WeightTransport | None, run_id: str, attempt: int, dtype: torch.dtype | None, version: int
    ) -> None:
        self._transport = transport
        self._run_id = run_id
        self._attempt = attempt
        self._dtype = dtype
        self.version = version

    def connect(self) -> None:
        """Sign in with the server. Raises TransferError."""
        if self._transport is not None:
            self._connect(self._transport)

    def _connect(self, transport: WeightTransport, hold: bool = False) -> None:
        tries = Tries()
        while True:
            try:
                return transport.connect(hold)
            except TransferError as error:
                tries.again(error)

    def deliver(self, model: nn.Module) -> SyncTimes | None:
        """Send the weights as they are, under the current version. Raises TransferError; never hangs.

        A delivery that broke on the way is made again as a whole, a few times; the server stays paused meanwhile. Not
        where the model is sharded: the other ranks would have to gather it again.
        """
        if self._transport is None:
            for _ in policy_tensors(model):
                pass
            return None
        infos = [ParameterInfo(name, self._dtype or dtype, shape) for name, dtype, shape in policy_parameters(model)]
        label = make_label(self._run_id, self._attempt, self.version)
        tries, held = Tries(0 if is_sharded(model) else len(RETRY_DELAYS_S)), False
        try:
            while True:
                try:
                    return self._transport.send(infos, policy_tensors(model), label, hold=True)
                except TransferError as error:
                    held = error.passing
                    tries.again(error)
                self._connect(self._transport, hold=True)
        except TransferError:
            if held:
                self._transport.release()
            raise

    def advance(self, model: nn.Module) -> SyncTimes | None:
        """The policy has changed: count a version and deliver it."""
        self.version += 1
        return self.deliver(model)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def wire_dtype(server_dtype: str | None) -> torch.dtype | None:
    """The dtype that a server keeps its weights in, from its own words; None where it is not known."""
    name = (server_dtype or "").removeprefix("torch.")
    value: Any = getattr(torch, name, None) if name in ("float32", "bfloat16", "float16") else None
    return value
