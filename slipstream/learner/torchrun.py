"""torchrun with a meeting point that listens on one interface only.

    python -m slipstream.learner.torchrun --rdzv-endpoint=HOST:PORT …   (everything else as torchrun takes it)

torch's own meeting points listen on every interface of the node, and their store asks nobody who he is.
"""

import signal
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import main as torchrun

from slipstream.serving.group import open_listener

BACKEND = "one-interface"
TIMEOUT = timedelta(minutes=10)


class OneInterface(RendezvousHandler):
    """One node meets itself: a store on a free port of `host`, which the ranks share."""

    def __init__(self, host: str, run_id: str) -> None:
        self._host = host
        self._run_id = run_id
        self._store: TCPStore | None = None
        self._port = 0

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Raises OSError where `host` is no address of this machine."""
        if self._store is None:
            listener = open_listener(self._host)
            self._port = int(listener.getsockname()[1])
            self._store = TCPStore(
                self._host,
                self._port,
                is_master=True,
                timeout=TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(self._host, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    if parameters.max_nodes != 1:
        raise ValueError(f"--nnodes={parameters.max_nodes}: the backend {BACKEND!r} is for one node")
    host, _ = parse_rendezvous_endpoint(parameters.endpoint, 0)
    return OneInterface(host, parameters.run_id)


def main(arguments: Sequence[str] | None = None) -> Any:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the leader's; inherited by the ranks and all that they start
    rendezvous_handler_registry.register(BACKEND, _create)
    return torchrun([f"--rdzv-backend={BACKEND}", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    main()
