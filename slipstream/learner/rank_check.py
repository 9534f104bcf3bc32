"""Do all ranks come, and does the network between them carry a sum? Asked before the model is loaded, with a bound of its own."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from slipstream.learner.torchrun import HOSTS
from slipstream.node_check import NodeFault
from slipstream.nodes import HOST_ENV, LOOPBACK
from slipstream.serving.group import GroupError, ProcessGroup, Rendezvous

BOUND_S = 300.0


def absent(size: int, per_node: int, present: Mapping[int, str], hosts: Sequence[str]) -> str:
    """The ranks that did not come, by host, beginning with `node HOST: `.

    Args:
        present: host of each rank that came.
        hosts: host of each node by its number; '' where it is not known.
    """
    missing = [rank for rank in range(size) if rank not in present]
    places = {rank: hosts[rank // per_node] or f"number {rank // per_node}" for rank in missing}
    worst = max(dict.fromkeys(places.values()), key=list(places.values()).count)
    named = ", ".join(f"rank {rank} on {places[rank]}" for rank in missing)
    return f"node {worst}: of {size} ranks these did not come to the first all-reduce: {named}"


def check_ranks(gpus: int, bound_s: float = BOUND_S) -> None:
    """A small all-reduce over all ranks of torchrun; nothing is done for a single one.

    Args:
        gpus: GPUs of a node; 0: over gloo, else over NCCL on this rank's GPU.
        bound_s: seconds that each of its phases may take.

    Raises NodeFault naming ranks that did not come, GroupError where the network fails.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return
    rank, per_node = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    bound = timedelta(seconds=bound_s)
    store = dist.TCPStore(address, port, is_master=False, timeout=bound, wait_for_workers=False)
    keys = [f"slipstream/rank/{number}" for number in range(size)]
    store.set(keys[rank], socket.gethostname())
    deadline = time.monotonic() + bound_s
    while not store.check(keys):
        if time.monotonic() > deadline:
            present = {r: store.get(key).decode() for r, key in enumerate(keys) if store.check([key])}
            raise NodeFault(absent(size, per_node, present, _hosts(store, size // per_node)))
        time.sleep(0.05)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    own = os.environ.get(HOST_ENV, LOOPBACK) if size > per_node else LOOPBACK
    rendezvous = Rendezvous(dist.PrefixStore("slipstream/check", store), own, port, bound_s)
    try:
        group = ProcessGroup(rendezvous, rank, size, device)
        try:
            total = torch.ones(1, device=device)
            group.all_reduce(total)
        finally:
            group.close()
    except GroupError as error:
        hosts = sorted({store.get(key).decode() for key in keys})
        raise GroupError(f"the first all-reduce between {', '.join(hosts)} failed: {error}") from error
    if total.item() != size:
        raise GroupError(
            f"the first all-reduce over {size} ranks gave {total.item():g}: GPUs or network compute wrongly"
        )


def _hosts(store: dist.TCPStore, nodes: int) -> list[str]:
    keys = [HOSTS.format(node=node) for node in range(nodes)]
    if nodes == 1:
        return [socket.gethostname()]
    return [store.get(key).decode() if store.check([key]) else "" for key in keys]
