"""A process group of its own between the trainer (rank 0) and the server's workers, over a store of its own.

Independent of the default group of torch.distributed on either side, gloo for CPU tensors and NCCL for CUDA tensors.
No call waits without a bound: a peer that never comes, dies or stalls is a `GroupError`. Importable without vLLM.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from slipstream.nodes import open_listener

POLL_S = 0.0005
CLOSE_S = 1.0
Check = Callable[[], None]


class GroupError(RuntimeError):
    """The group did not come together, or broke: a peer is missing, died, stalled or left."""


class GroupTimeout(GroupError):
    """A peer did not come, or stalled, for the whole bound."""


def _nothing() -> None:
    return None


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the route to `host`: where a peer over there can reach it."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: a datagram socket only looks up the route
        return str(probe.getsockname()[0])


class Rendezvous:
    """Where the members of a group meet: a key-value store that the trainer hosts.

    Args:
        store: the store, with a timeout set, or a part of it.
        address: own address that peers connect to.
        port: the store's port.
        timeout_s: bound of each later phase, in seconds.
    """

    def __init__(self, store: dist.Store, address: str, port: int, timeout_s: float) -> None:
        self.store = store
        self.address = address
        self.port = port
        self.timeout_s = timeout_s

    @classmethod
    def host(cls, address: str, timeout_s: float) -> "Rendezvous":
        """Open a store on a free port of `address` only. Raises GroupError where the address is not this machine's."""
        try:
            listener = open_listener(address)
        except OSError as error:
            raise GroupError(f"cannot listen on {address!r} for weight transfer: {error}") from error
        port = int(listener.getsockname()[1])
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return cls(store, address, port, timeout_s)

    @classmethod
    def join(cls, host: str, port: int, timeout_s: float) -> "Rendezvous":
        """Connect to the store at `host:port`. Raises GroupError where nothing answers within the bound."""
        try:
            own = address_towards(host, port)
            store = dist.TCPStore(
                host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
            )
        except (OSError, RuntimeError) as error:
            raise GroupError(f"cannot reach the trainer's store at {host}:{port}: {_first_line(error)}") from error
        return cls(store, own, port, timeout_s)


class ProcessGroup:
    """A communicator of `size` members; rank 0 is the trainer.

    Args:
        rendezvous: the common store; kept open as long as the group lives.
        rank: own rank, 0 on the trainer.
        size: members, the trainer included.
        device: where the tensors live; its type decides between gloo and NCCL.
        check: called while waiting; what it raises ends the wait (the group is then aborted).
    """

    def __init__(
        self, rendezvous: Rendezvous, rank: int, size: int, device: torch.device, check: Check = _nothing
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.timeout_s = rendezvous.timeout_s
        self._rendezvous: Rendezvous | None = rendezvous
        self._group: Any = None
        try:
            self._meet(rendezvous.store, check)
            self._group = self._make(rendezvous)
            # the first collective connects everybody (NCCL is lazy), so that a broken network shows here
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), check=check)
        except BaseException as error:
            self.close()
            if _from_torch(error):
                raise GroupError(f"the group did not form: {_first_line(error)}") from error
            raise

    def _meet(self, store: dist.Store, check: Check) -> None:
        """Wait until every member has signed in; only then can constructing the communicator not wait for long."""
        store.set(f"member/{self.rank}", "1")
        missing = [f"member/{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + self.timeout_s
        while missing:
            check()
            missing = [key for key in missing if not store.check([key])]
            if missing and time.monotonic() > deadline:
                raise GroupTimeout(f"{len(missing)} of {self.size} members did not join within {self.timeout_s:g} s")
            if missing:
                time.sleep(0.005)

    def _make(self, rendezvous: Rendezvous) -> Any:
        store = dist.PrefixStore("group", rendezvous.store)
        bound = timedelta(seconds=self.timeout_s)
        if self.device.type == "cpu":
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=rendezvous.address)]
            gloo._timeout = bound
            return dist.ProcessGroupGloo(store, self.rank, self.size, gloo)
        with torch.cuda.device(self.device), _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0"):
            # without that setting torch's watchdog ends the whole process on a timeout; `_wait` bounds it instead
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = bound
            return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def broadcast(self, tensor: torch.Tensor, source: int = 0, check: Check = _nothing) -> None:
        """Broadcast the contiguous `tensor` in place from rank `source`; returns when it has arrived.

        Raises GroupError when it does not within the bound, or whatever `check` raises meanwhile; the group is then
        aborted, which ends the wait of the others too.
        """
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        self._collective(lambda group: group.broadcast([tensor], options), check)

    def all_reduce(self, tensor: torch.Tensor, check: Check = _nothing) -> None:
        """Sum the contiguous `tensor` over all members, in place. Raises like `broadcast`."""
        self._collective(lambda group: group.allreduce([tensor], dist.AllreduceOptions()), check)

    def _collective(self, start: Callable[[Any], Any], check: Check) -> None:
        if self._group is None:
            raise GroupError("the group is closed")
        try:
            self._wait(start(self._group), check)
        except BaseException as error:
            self.close()
            if _from_torch(error):
                raise GroupError(f"a peer left the group: {_first_line(error)}") from error
            raise

    def _wait(self, work: Any, check: Check) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not work.is_completed():
            check()
            if time.monotonic() > deadline:
                raise GroupTimeout(f"no progress within {self.timeout_s:g} s: a peer stalled")
            time.sleep(POLL_S)
        work.wait()  # raises what went wrong
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def close(self) -> None:
        """Abort what is under way and release everything; idempotent, and returns within moments."""
        held = [self._group, self._rendezvous]
        self._group = self._rendezvous = None
        if held[0] is not None:
            # in a thread: gloo waits for an operation with a stalled peer until that has timed out
            thread = threading.Thread(target=_abort, args=(held,), daemon=True, name="weight-transfer-close")
            thread.start()
            thread.join(CLOSE_S)


def _abort(held: list[Any]) -> None:
    with contextlib.suppress(RuntimeError):
        held[0].abort()
    held.clear()


@contextlib.contextmanager
def _environment(**values: str) -> Any:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _from_torch(error: BaseException) -> bool:
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
