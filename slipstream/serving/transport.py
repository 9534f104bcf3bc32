"""The trainer's side of weight transfer: what happens, in which order, and what is undone when it fails.

    connect   sign in: end what a dead trainer left, form a fresh group on a fresh port, resume
    send      pause (keep) → start → broadcast beside the server's receiving call → finish (label) → resume

What may be called twice is repeated by `ServerControl`. The rest may not: there a lost answer breaks the delivery, which
is repeated as a whole, connect and send, by whoever has the tensors (`slipstream.learner.sync`). Between two tries the
server stays paused where `hold` asks for it, so that requests in flight get no token of mixed weights.

No explicit reset of the prefix cache: at the end of a `keep` pause the server drops its caches and recomputes the
requests in flight, and nothing is scheduled until the resume.
"""

import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from slipstream.process import new_incarnation
from slipstream.serving.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from slipstream.serving.control import ServerControl, ServerError
from slipstream.serving.delivery import TransferError, close_delivery, failure
from slipstream.serving.group import GroupError, ProcessGroup, Rendezvous
from slipstream.serving.labels import torn_label

RECOVERY_TIMEOUT_S = 15.0
WATCH_S = 1.0


@dataclass(frozen=True)
class ParameterInfo:
    """One tensor of a delivery: its checkpoint name, the dtype it travels in, its full shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SyncTimes:
    """Seconds of one delivery: until the server had paused, of the transfer itself, of everything."""

    pause_s: float
    transfer_s: float
    total_s: float


class WeightTransport(Protocol):
    """Delivers full weights to a server. Used by one thread of rank 0."""

    def connect(self, hold: bool = False) -> None:
        """Sign in with the server, in place of whoever was. Raises TransferError; may be called again after one.

        `hold`: leave a paused server paused, because a delivery follows at once.
        """

    def send(
        self,
        parameters: Sequence[ParameterInfo],
        tensors: Iterator[tuple[str, torch.Tensor]],
        label: str,
        hold: bool = False,
    ) -> SyncTimes:
        """Deliver `tensors` (in the order of `parameters`; on any device, made as they are needed) and label what the
        server generates from then on.

        Raises TransferError when any phase fails or takes longer than its bound. The server is then running again
        where that was possible; if its weights may be mixed, what it generates carries a label that no reader takes.
        `hold`: it stays paused where another try may succeed; call `connect(hold=True)` and `send`, or `release`.
        """

    def release(self) -> None:
        """Let a server run that was held for another try which does not come; what it generates, no reader takes."""

    def close(self) -> None:
        """Leave the group. The server goes on with the weights that it has."""


class Background:
    """One call in a daemon thread, so that no wait for it can keep the process from ending."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="weight-transfer-call", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function()
        except Exception as error:
            self._error = error

    def check(self) -> None:
        """Raise what the call raised so far."""
        if self._error is not None:
            raise self._error

    def wait(self, timeout_s: float, watch: Callable[[], None] = lambda: None) -> None:
        """Wait for the end of the call, and raise what it raised, or what `watch` raises meanwhile.

        Raises TimeoutError after `timeout_s` seconds.
        """
        end = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < end:
            self._thread.join(min(WATCH_S, max(end - time.monotonic(), 0)))
            watch()
        if self._thread.is_alive():
            raise TimeoutError(f"the server did not answer within {timeout_s:g} s")
        self.check()


class HttpTransport(ABC):
    """The order of things, common to all backends; how bytes move is the subclass's part.

    Attributes:
        watch: called while the server receives; what it raises ends the delivery.
    """

    watch: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, control: ServerControl, run_id: str, attempt: int, timeout_s: float) -> None:
        self.control = control
        self.run_id = run_id
        self.attempt = attempt
        self.timeout_s = timeout_s
        self._connected = False
        self._connected_before = False

    @abstractmethod
    def _join(self, world_size: int, was_paused: bool) -> None:
        """Form the group of `world_size` members with the server's workers, in place of an older one."""

    @abstractmethod
    def _update_info(self, parameters: Sequence[ParameterInfo]) -> dict[str, Any]:
        """What the server's receiving call must know."""

    @abstractmethod
    def _broadcast(
        self, parameters: Sequence[ParameterInfo], tensors: Iterator[tuple[str, torch.Tensor]], call: Background
    ) -> None:
        """Send everything; give up as soon as `call` has failed."""

    @abstractmethod
    def _leave(self) -> None:
        """Leave the group at once, whatever is under way; idempotent."""

    def connect(self, hold: bool = False) -> None:
        self.close()
        phase = "attach"
        try:
            was_paused = self.control.is_paused()
            world_size = self.control.world_size() + 1
            phase = "rendezvous"
            self._join(world_size, was_paused)
            if not self._connected_before:
                phase = "abort requests"
                self.control.abort_requests()  # what a dead trainer's rollouts left
            if was_paused and not hold:
                phase = "resume"
                self.control.resume()
        except Exception as error:
            self._leave()
            raise failure(phase, error) from error
        self._connected = self._connected_before = True

    def _close_open_delivery(self) -> None:
        """Close the delivery that a dead trainer left open on a paused server, if there is one."""
        if close_delivery(self.control):
            self.control.set_weight_version(torn_label(self.run_id, self.attempt))

    def send(
        self,
        parameters: Sequence[ParameterInfo],
        tensors: Iterator[tuple[str, torch.Tensor]],
        label: str,
        hold: bool = False,
    ) -> SyncTimes:
        if not self._connected:
            raise TransferError("start", "not connected: call connect() first, and again after a failed delivery")
        begin = time.monotonic()
        phase = "pause"
        try:
            self.control.pause("keep")
            paused = time.monotonic()
            phase = "start"
            self.control.start_weight_update()
            phase = "transfer"
            info = self._update_info(parameters)
            call = Background(lambda: self.control.update_weights(info))
            self._transfer(parameters, tensors, call)
            phase = "finish"
            self._finish(label)
            transferred = time.monotonic()
            phase = "resume"
            self.control.resume()
        except BaseException as error:
            self._connected = False
            self._leave()
            broken = failure(phase, error)
            self._recover(phase, resume=not (hold and broken.passing))
            if isinstance(error, Exception):
                raise broken from error
            raise
        return SyncTimes(paused - begin, transferred - paused, time.monotonic() - begin)

    def _transfer(
        self, parameters: Sequence[ParameterInfo], tensors: Iterator[tuple[str, torch.Tensor]], call: Background
    ) -> None:
        try:
            self._broadcast(parameters, tensors, call)
        except Exception as error:
            self._leave()  # ends the server's wait, so that its own words can be had
            if not isinstance(error, GroupError):
                raise
            try:
                call.wait(min(self.timeout_s, RECOVERY_TIMEOUT_S))
            except Exception as answer:
                raise type(error)(f"{error}; the server: {answer}") from error
            raise
        call.wait(self.timeout_s, self.watch)

    def _finish(self, label: str) -> None:
        try:
            self.control.finish_weight_update(label)
        except ServerError as error:
            # the label is set last, so where the server has it only the answer was lost
            if error.permanent or self.control.weight_version() != label:
                raise

    def _recover(self, phase: str, resume: bool = True) -> None:
        """Bring the server back to work after a failure in `phase`, if it answers."""
        with self.control.with_timeout(min(self.timeout_s, RECOVERY_TIMEOUT_S)) as control:
            try:
                if phase in ("start", "transfer", "finish"):
                    with contextlib.suppress(ServerError):  # refused where the server has closed the delivery itself
                        close_delivery(control)
                    control.set_weight_version(torn_label(self.run_id, self.attempt))
                if resume:
                    control.resume()
            except ServerError:
                return  # the next connect() deals with it; resuming under the old label would mislabel samples

    def release(self) -> None:
        self._recover("transfer")

    def close(self) -> None:
        self._connected = False
        self._leave()


class SlipstreamTransport(HttpTransport):
    """Our own engine on both sides: gloo for a CPU device, NCCL for a CUDA device.

    Args:
        control: of a server with the weight transfer backend "slipstream".
        device: where buckets are filled and sent from; the server's workers must be on the same kind of device.
        run_id, attempt: who sends; the server refuses an older attempt of the run than it has seen.
        timeout_s: bound of each phase, in seconds.
        bind_host: this machine's address that the server's workers can reach; only there a port is opened.
        bucket_bytes: most bytes sent at once; extra memory on each side.
    """

    def __init__(
        self,
        control: ServerControl,
        device: torch.device,
        run_id: str,
        attempt: int,
        timeout_s: float,
        bind_host: str = "127.0.0.1",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        super().__init__(control, run_id, attempt, timeout_s)
        self.device = device
        self.bind_host = bind_host
        self.bucket_bytes = bucket_bytes
        self._group: ProcessGroup | None = None
        self._incarnation = ""

    def _join(self, world_size: int, was_paused: bool) -> None:
        rendezvous = Rendezvous.host(self.bind_host, self.timeout_s)
        self._incarnation = new_incarnation()
        info = {
            "master_address": self.bind_host,
            "master_port": rendezvous.port,
            "rank_offset": 1,
            "world_size": world_size,
            "run_id": self.run_id,
            "attempt": self.attempt,
            "incarnation": self._incarnation,
            "timeout_s": self.timeout_s,
        }
        call = Background(lambda: self.control.init_weight_transfer(info))
        self._group = ProcessGroup(rendezvous, 0, world_size, self.device, check=call.check)
        call.wait(self.timeout_s)
        if was_paused:  # only now: the server has accepted this attempt as the newest
            self._close_open_delivery()

    def _update_info(self, parameters: Sequence[ParameterInfo]) -> dict[str, Any]:
        return {
            "names": [parameter.name for parameter in parameters],
            "dtype_names": [str(parameter.dtype).removeprefix("torch.") for parameter in parameters],
            "shapes": [list(parameter.shape) for parameter in parameters],
            "bucket_bytes": self.bucket_bytes,
            "incarnation": self._incarnation,
        }

    def _broadcast(
        self, parameters: Sequence[ParameterInfo], tensors: Iterator[tuple[str, torch.Tensor]], call: Background
    ) -> None:
        group = self._group
        if group is None:
            raise GroupError("the weight transfer group is closed")
        sizes = [math.prod(parameter.shape) * parameter.dtype.itemsize for parameter in parameters]
        buckets = plan_buckets(sizes, self.bucket_bytes)
        buffer = torch.empty(max((b.size for b in buckets), default=0), dtype=torch.uint8, device=self.device)
        stream = checked(parameters, tensors)

        def check() -> None:
            call.check()
            self.watch()

        for bucket in buckets:
            for index, offset in enumerate(bucket.offsets, start=bucket.start):
                parameter, tensor = next(stream)
                place = buffer[offset : offset + sizes[index]].view(parameter.dtype).view(parameter.shape)
                place.copy_(tensor)  # to the device and dtype of the transfer
            group.broadcast(buffer[: bucket.size], check=check)
        next(stream, None)  # raises where more tensors come than were announced

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def checked(
    parameters: Sequence[ParameterInfo], tensors: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[ParameterInfo, torch.Tensor]]:
    """Pairs of what was announced and what came. Raises ValueError at the first that differ in name or shape."""
    announced = iter(parameters)
    for name, tensor in tensors:
        parameter = next(announced, None)
        if parameter is None:
            raise ValueError(f"more tensors than the {len(parameters)} announced: {name}")
        if (name, tuple(tensor.shape)) != (parameter.name, tuple(parameter.shape)):
            raise ValueError(
                f"got {name} {tuple(tensor.shape)} where {parameter.name} {tuple(parameter.shape)} was announced"
            )
        yield parameter, tensor.detach()
    missing = next(announced, None)
    if missing is not None:
        raise ValueError(f"fewer tensors than the {len(parameters)} announced: {missing.name} did not come")


def make_transport(
    control: ServerControl,
    backend: Literal["slipstream", "nccl"],
    device: torch.device,
    run_id: str,
    attempt: int,
    timeout_s: float,
    bind_host: str = "127.0.0.1",
    watch: Callable[[], None] = lambda: None,
) -> WeightTransport:
    """The transport for a server's weight transfer backend, as its probe reports it. Raises ValueError on others."""
    made: HttpTransport
    if backend == "slipstream":
        made = SlipstreamTransport(control, device, run_id, attempt, timeout_s, bind_host)
    elif backend == "nccl":
        from slipstream.serving.transport_nccl import NcclTransport

        made = NcclTransport(control, device, run_id, attempt, timeout_s, bind_host)
    else:
        raise ValueError(
            f"weight transfer backend {backend!r} is not supported: start the server with "
            '--weight-transfer-config {"backend": "slipstream"} (this package installed there) or {"backend": "nccl"}'
        )
    made.watch = watch
    return made
