"""The server's side of weight transfer: a vLLM engine that receives broadcasts of a `ProcessGroup`.

Imported inside vLLM's workers only (backend "slipstream", registered by `slipstream.serving.plugin`).
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from slipstream.serving import cpu_seed
from slipstream.serving.buckets import plan_buckets
from slipstream.serving.group import ProcessGroup, Rendezvous

logger = logging.getLogger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where the trainer waits, and who it is.

    `rank_offset` is the first rank of a worker, `world_size` counts all members with the trainer, `timeout_s` bounds
    each phase in seconds.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    run_id: str
    attempt: int
    incarnation: str
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What one delivery holds, in order; buckets of at most `bucket_bytes`."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    bucket_bytes: int
    incarnation: str

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError("names, dtype_names and shapes must have the same length")


class SlipstreamEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives full checkpoint-format weights from the trainer of the newest attempt."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: ProcessGroup | None = None
        self._incarnation = ""
        self._newest: dict[str, int] = {}
        if self.device.type == "cpu":
            cpu_seed.mend()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's group. Raises ValueError for an older attempt, GroupError where no trainer is."""
        newest = self._newest.get(init_info.run_id)
        if newest is not None and init_info.attempt < newest:
            raise ValueError(
                f"attempt {init_info.attempt} of run {init_info.run_id} is refused: attempt {newest} is the newest seen"
            )
        self.shutdown()
        self._newest[init_info.run_id] = init_info.attempt
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        rendezvous = Rendezvous.join(init_info.master_address, init_info.master_port, init_info.timeout_s)
        self._group = ProcessGroup(rendezvous, rank, init_info.world_size, self._tensor_device())
        self._incarnation = init_info.incarnation
        logger.info("joined weight transfer of %s attempt %d as rank %d", init_info.run_id, init_info.attempt, rank)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load everything. On any error the layers that did not arrive whole keep their old weights."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
            if self._tensor_device().type != "cpu":
                torch.accelerator.synchronize()
        except BaseException:
            self._abandon()
            raise

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self._group is None:
            raise RuntimeError("no trainer is connected: call /init_weight_transfer_engine first")
        if update_info.incarnation != self._incarnation:
            raise ValueError("another trainer has connected since: this one's weights are refused")
        # one call, so that loaders which look at the whole stream see all of it
        self.model.load_weights(self._stream(self._group, update_info))

    def _stream(self, group: ProcessGroup, info: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        dtypes = [getattr(torch, name) for name in info.dtype_names]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(info.shapes, dtypes, strict=True)]
        for bucket in plan_buckets(sizes, info.bucket_bytes):
            # a fresh buffer each: the layerwise loader keeps views of it until their layer is complete
            buffer = torch.empty(bucket.size, dtype=torch.uint8, device=self._tensor_device())
            group.broadcast(buffer)
            for index, offset in enumerate(bucket.offsets, start=bucket.start):
                raw = buffer[offset : offset + sizes[index]]
                yield info.names[index], raw.view(dtypes[index]).view(info.shapes[index])

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_cpu_layers()

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
            self._incarnation = ""

    def _tensor_device(self) -> torch.device:
        return torch.device(self.device)

    def _abandon(self) -> None:
        """Leave the model usable after a broken delivery: what came in part is thrown away.

        Without it the next delivery would count the leftovers and take a layer for complete too early.
        """
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        self.shutdown()
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        self.finish_weight_update()

    def _repack_cpu_layers(self) -> None:
        """Renew the packed copies that vLLM's CPU kernels read.

        A layerwise reload processes a tied parameter through one of its layers only, so a tied output layer would go
        on with the old weights.
        """
        if self._tensor_device().type != "cpu":
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for layer in self.model.modules():
            weight = getattr(layer, "weight", None)
            if hasattr(layer, "cpu_linear") and weight is not None and weight.numel():
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
