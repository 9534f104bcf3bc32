"""torchrun with a meeting point that listens on one interface only.

    python -m slipstream.learner.torchrun --rdzv-endpoint=HOST:0 …   (everything else as torchrun takes it)

torch's own meeting points listen on every interface of the node, and their store asks nobody who he is.

Over several nodes (`--nnodes=N`, `--rdzv-conf=node=K,timeout=SECONDS`) the agent of node 0 opens the store on a port of
its own HOST and publishes it in the file that SLIPSTREAM_MEETING names; the others wait for that file and connect.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
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

from slipstream.learner.nodes import MEETING_ENV, publish_meeting
from slipstream.nodes import open_listener
from slipstream.run_folder import read_json

BACKEND = "one-interface"
TIMEOUT_S = 600
HOSTS = "slipstream/host/{node}"  # keys of the store: the host name of each node's agent


class OneInterface(RendezvousHandler):
    """The agents of all nodes meet at a store on a free port of node 0's `host`, which the ranks share.

    Args:
        host: own address.
        run_id: prefix of the agents' keys.
        node, nodes: own number, and how many nodes there are; no election, and nobody may come later.
        meeting: file in which node 0 says where its store is; not used for one node.
        timeout_s: bound of the meeting, in seconds.
    """

    def __init__(
        self, host: str, run_id: str, node: int = 0, nodes: int = 1, meeting: str = "", timeout_s: float = TIMEOUT_S
    ) -> None:
        self._host = host
        self._run_id = run_id
        self._node = node
        self._nodes = nodes
        self._meeting = meeting
        self._timeout_s = timeout_s
        self._store: TCPStore | None = None
        self._address = (host, 0)

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Raises OSError where `host` is no address of this machine, RuntimeError where the others do not come in time."""
        if self._store is None:
            deadline = time.monotonic() + self._timeout_s
            self._store = self._open() if self._node == 0 else self._join(deadline)
            if self._nodes > 1:
                self._wait_for_all(self._store, deadline)
        info = RendezvousStoreInfo(*self._address)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), self._node, self._nodes, info)

    def _open(self) -> TCPStore:
        listener = open_listener(self._host)
        self._address = (self._host, int(listener.getsockname()[1]))
        store = TCPStore(
            *self._address,
            is_master=True,
            timeout=timedelta(seconds=self._timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        if self._nodes > 1:
            publish_meeting(self._meeting, *self._address)
        return store

    def _join(self, deadline: float) -> TCPStore:
        while (meeting := read_json(Path(self._meeting))) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"node 0 did not say where it is within {self._timeout_s:g} s: no {self._meeting}")
            time.sleep(0.2)
        self._address = (str(meeting["host"]), int(meeting["port"]))
        bound = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        return TCPStore(*self._address, is_master=False, timeout=bound, wait_for_workers=False)

    def _wait_for_all(self, store: TCPStore, deadline: float) -> None:
        store.set(HOSTS.format(node=self._node), os.uname().nodename)
        missing = list(range(self._nodes))
        while missing := [node for node in missing if not store.check([HOSTS.format(node=node)])]:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"of {self._nodes} nodes these did not come within {self._timeout_s:g} s: "
                    f"{', '.join(map(str, missing))}"
                )
            time.sleep(0.05)

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
    nodes = parameters.max_nodes
    if parameters.min_nodes != nodes:
        raise ValueError(
            f"--nnodes={parameters.min_nodes}:{nodes}: the backend {BACKEND!r} has a fixed number of nodes"
        )
    meeting = os.environ.get(MEETING_ENV, "")
    if nodes > 1 and not meeting:
        raise ValueError(f"{MEETING_ENV} is not set: over {nodes} nodes it names the file in which they meet")
    host, _ = parse_rendezvous_endpoint(parameters.endpoint, 0)
    node = parameters.get_as_int("node", 0) or 0
    bound = parameters.get_as_int("timeout", TIMEOUT_S) or TIMEOUT_S
    return OneInterface(host, parameters.run_id, node, nodes, meeting, bound)


def main(arguments: Sequence[str] | None = None) -> Any:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # the leader's; inherited by the ranks and all that they start
    rendezvous_handler_registry.register(BACKEND, _create)
    return torchrun([f"--rdzv-backend={BACKEND}", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    main()
