"""Delivery of the policy to the server, and the policy's version."""

import logging
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slipstream.serving.labels import make_label
from slipstream.serving.transport import ParameterInfo, SyncTimes, TransferError, WeightTransport

logger = logging.getLogger(__name__)

DONE, AGAIN = 0, 1  # rank 0's word on a delivery
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


def _run_through(model: nn.Module) -> None:
    if is_sharded(model):
        for _ in policy_tensors(model):
            pass


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


class Orders(Protocol):
    """Rank 0's word to the other ranks of a training."""

    @property
    def leads(self) -> bool: ...
    def give(self, word: int) -> None: ...
    def take(self) -> int: ...


class Server(Protocol):
    """The server that counts, which may be replaced by another one; see `slipstream.learner.server_link`."""

    def moved(self) -> bool: ...
    def lost(self) -> bool: ...
    def attach(self) -> bool: ...
    def delivered(self) -> None: ...
    def transport(self) -> tuple[WeightTransport, torch.dtype | None]: ...


class PolicySync:
    """Counts weight updates, and delivers them to the server from rank 0.

    Args:
        transport: on rank 0; None on the others, which only take part in gathering sharded parameters.
        run_id, attempt: for the label on the server.
        dtype: that the weights travel in; None: their own.
        version: the policy version at the start (after a resume: the checkpoint's).
        server: where it may be replaced; None: `transport` is all that there is.

    Attributes:
        orders: rank 0's word to the other ranks; None where there is one rank.
    """

    def __init__(
        self,
        transport: WeightTransport | None,
        run_id: str,
        attempt: int,
        dtype: torch.dtype | None,
        version: int,
        *,
        server: Server | None = None,
    ) -> None:
        self._transport = transport
        self._run_id = run_id
        self._attempt = attempt
        self._dtype = dtype
        self._server = server
        self.orders: Orders | None = None
        self.version = version

    def connect(self) -> None:
        """Sign in with the server, or with the one that takes its place. Raises TransferError, ServerGone."""
        if self._transport is None:
            return
        try:
            self._connect(self._transport)
        except TransferError:
            if not self._lost():
                raise
            self._reattach()

    def _connect(self, transport: WeightTransport, hold: bool = False) -> None:
        tries = Tries()
        while True:
            try:
                return transport.connect(hold)
            except TransferError as error:
                tries.again(error)

    def _lost(self) -> bool:
        return self._server is not None and self._server.lost()

    def _reattach(self) -> bool:
        """Wait for the server that counts, and sign in there; False where the run leaves instead."""
        assert self._server is not None
        while True:
            if self._transport is not None:
                self._transport.close()
            if not self._server.attach():
                return False
            self._transport, self._dtype = self._server.transport()
            try:
                self._connect(self._transport, hold=True)
                return True
            except TransferError as error:
                if not self._lost():
                    raise
                logger.warning("the server is gone again: %s", error)

    def deliver(self, model: nn.Module) -> SyncTimes | None:
        """Send the weights as they are, under the current version; all ranks at once. Raises TransferError, ServerGone.

        A delivery that broke on the way is made again as a whole, a few times; the server stays paused meanwhile. Where
        the server has gone, the next one is waited for. Each time all ranks gather a sharded model again, by rank 0's word.
        """
        if self.orders is not None and not self.orders.leads:
            while self.orders.take() == AGAIN:
                _run_through(model)
            return None
        times = None
        if self._transport is not None:
            times = self._deliver(model)
        elif self.orders is None:
            _run_through(model)
        if self.orders is not None:
            self.orders.give(DONE)
        return times

    def _deliver(self, model: nn.Module) -> SyncTimes | None:
        if self._server is not None and self._server.moved() and not self._reattach():
            return None
        alone = is_sharded(model) and self.orders is None  # then nobody tells the other ranks to gather it again
        most = 0 if alone else len(RETRY_DELAYS_S)
        tries, held, connected = Tries(most), False, True
        while True:
            assert self._transport is not None
            try:
                if not connected:
                    self._connect(self._transport, hold=True)
                    connected = True
                times = self._send(model, self._transport)
            except TransferError as error:
                try:
                    if self._lost():
                        held, connected, tries = False, True, Tries(most)
                        if not self._reattach():
                            return None
                        continue
                    if not connected:
                        raise
                    held, connected = error.passing, False
                    tries.again(error)
                except TransferError:
                    if held:
                        self._transport.release()
                    raise
            else:
                if self._server is not None:
                    self._server.delivered()
                return times

    def _send(self, model: nn.Module, transport: WeightTransport) -> SyncTimes:
        infos = [ParameterInfo(name, self._dtype or dtype, shape) for name, dtype, shape in policy_parameters(model)]
        label = make_label(self._run_id, self._attempt, self.version)
        if self.orders is not None:
            self.orders.give(AGAIN)
        stream = policy_tensors(model)
        try:
            return transport.send(infos, stream, label, hold=True)
        except TransferError:
            if self.orders is not None and is_sharded(model):
                for _ in stream:  # the other ranks gather all of it
                    pass
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
