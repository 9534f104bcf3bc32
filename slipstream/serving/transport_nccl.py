"""The trainer's side of vLLM's own "nccl" weight transfer, for servers that were started without our plugin.

Needs vLLM importable beside the trainer, and a GPU. Not tested: no GPU was at hand when it was written (vLLM 0.32).
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from slipstream.nodes import open_listener
from slipstream.serving.control import ServerControl
from slipstream.serving.group import GroupTimeout
from slipstream.serving.transport import Background, HttpTransport, ParameterInfo, checked

BUFFER_BYTES = 256 * 2**20
BUFFERS = 2


class NcclTransport(HttpTransport):
    """Same behaviour as `SlipstreamTransport`, save that the server cannot tell an older attempt from a newer one.

    Raises RuntimeError where vLLM cannot be imported or `device` is no GPU.
    """

    def __init__(
        self,
        control: ServerControl,
        device: torch.device,
        run_id: str,
        attempt: int,
        timeout_s: float,
        bind_host: str = "127.0.0.1",
    ) -> None:
        super().__init__(control, run_id, attempt, timeout_s)
        if device.type != "cuda":
            raise RuntimeError(
                f"weight transfer backend 'nccl' needs a GPU, not device {device}: "
                'start the server with --weight-transfer-config \'{"backend": "slipstream"}\''
            )
        try:
            from vllm.distributed.weight_transfer import nccl_common, packed_tensor
        except ImportError as error:
            raise RuntimeError(
                "weight transfer backend 'nccl' needs vLLM in the trainer's environment too: install it there, or "
                "install slipstream beside the server and start it with "
                '--weight-transfer-config \'{"backend": "slipstream"}\''
            ) from error
        self._nccl: Any = nccl_common
        self._packed: Any = packed_tensor
        self.device = device
        self.bind_host = bind_host
        self._communicator: Any = None

    def _join(self, world_size: int, was_paused: bool) -> None:
        if was_paused:
            self._close_open_delivery()
        self.control.shutdown_weight_transfer()
        with open_listener(self.bind_host) as listener:
            port = int(listener.getsockname()[1])  # free a moment ago: vLLM opens the port by its number
        where = {"master_address": self.bind_host, "master_port": port, "world_size": world_size}
        info = where | {
            "rank_offset": 1,
            "packed": True,
            "packed_buffer_size_bytes": BUFFER_BYTES,
            "packed_num_buffers": BUFFERS,
        }
        call = Background(lambda: self.control.init_weight_transfer(info))
        self._bounded(lambda: setattr(self, "_communicator", self._nccl.trainer_init(where)), call)
        call.wait(self.timeout_s)

    def _update_info(self, parameters: Sequence[ParameterInfo]) -> dict[str, Any]:
        return {
            "names": [parameter.name for parameter in parameters],
            "dtype_names": [str(parameter.dtype).removeprefix("torch.") for parameter in parameters],
            "shapes": [list(parameter.shape) for parameter in parameters],
        }

    def _broadcast(
        self, parameters: Sequence[ParameterInfo], tensors: Iterator[tuple[str, torch.Tensor]], call: Background
    ) -> None:
        pairs = (
            (parameter.name, tensor.to(device=self.device, dtype=parameter.dtype).contiguous())
            for parameter, tensor in checked(parameters, tensors)
        )
        self._bounded(
            lambda: self._packed.packed_nccl_broadcast_producer(
                iterator=pairs,
                group=self._communicator,
                src=0,
                post_iter_func=lambda item: item[1],
                buffer_size_bytes=BUFFER_BYTES,
                num_buffers=BUFFERS,
            ),
            call,
        )

    def _bounded(self, function: Any, call: Background) -> None:
        """Run a call of vLLM that has no time-out of its own; leave it behind when the server's side failed."""
        finished = threading.Event()

        def run() -> None:
            try:
                with torch.cuda.device(self.device):
                    function()
            finally:
                finished.set()

        ours = Background(run)
        waited = 0.0
        while not finished.wait(0.05):
            call.check()
            waited += 0.05
            if waited > self.timeout_s:
                raise GroupTimeout(f"no progress within {self.timeout_s:g} s: a peer stalled")
        ours.wait(self.timeout_s)

    def _leave(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.destroy()
