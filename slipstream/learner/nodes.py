"""The learner's nodes: what each leader does before torchrun, beside it and after it."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from slipstream.learner.failure import Failure, first_failure
from slipstream.learner.timeouts import meeting_timeout
from slipstream.nodes import NodeError, Peers, Place, network_environment, node_role
from slipstream.process import Heartbeat, how_ended
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, write_json

ROLE = "learner"
MEETING_ENV = "SLIPSTREAM_MEETING"
LOOK_S = 1.0
# what a rank says whose peer is gone: then the cause is with the peer
_PEER_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|DistBackendError|DistNetworkError|DistStoreError|\bgloo\b|"
    r"\bnccl\b|torchrun ended",
    re.IGNORECASE,
)


def beat_name(node: int) -> str:
    """Heartbeat of the leader of a node; the ranks have their own."""
    return f"learner-n{node}"


class Nodes:
    """The other nodes of the learner, as its leader on one of them sees them. For one node nothing is written or watched."""

    def __init__(self, run: RunFolder, config: RunConfig, place: Place, attempt: int) -> None:
        self.place = place
        self._run = run
        self._attempt = attempt
        self._bound_s = config.learner.startup_timeout
        others = [node for node in range(place.nodes) if node != place.node]
        self._peers = Peers(
            run, place, lambda node: node_role(ROLE, node), others, {node: beat_name(node) for node in others}
        )
        self._heartbeat: Heartbeat | None = None
        self._next_look = 0.0

    def start(self) -> None:
        """Say that this node is there."""
        if self.place.nodes > 1:
            name = beat_name(self.place.node)
            self._heartbeat = Heartbeat(self._run, name, self._attempt, self.place.incarnation).start()

    def assemble(self, stopped: Callable[[], object]) -> tuple[int, str] | None:
        """Wait until every node is there; why this one must end before that, or None.

        Raises NodeError naming those that did not come within `learner.startup_timeout`.
        """
        end = time.monotonic() + self._bound_s
        while (missing := self._peers.missing()) and not stopped():
            if (ended := self._peers.ended()) is not None:
                return ended
            if time.monotonic() > end:
                numbers = ", ".join(map(str, missing))
                raise NodeError(
                    f"of {self.place.nodes} learner nodes these did not come within learner.startup_timeout = "
                    f"{self._bound_s:g} s: {numbers}; see logs/learner-{self._attempt}-n*.log"
                )
            time.sleep(0.2)
        return self._peers.ended()

    def verdict(self) -> tuple[int, str] | None:
        """Why this node must end now, for the sake of another: exit code and reason; or None. Cheap: looks once a second."""
        now = time.monotonic()
        if self.place.nodes == 1 or now < self._next_look:
            return None
        self._next_look = now + LOOK_S
        return self._peers.verdict(now)

    def why_failed(self, returncode: int, log: Path, stopped: Callable[[], object]) -> tuple[int, Failure]:
        """Exit code and reason after torchrun failed here: this node's own, or that of the node that broke it."""
        own = first_failure(self._run, self._attempt, log) or Failure(f"torchrun ended {how_ended(returncode)}")
        if self.place.nodes > 1 and _PEER_LOST.search(own.reason):
            cause = self._peers.cause(stopped)
            if cause is not None:
                code, reason = cause
                return code, Failure(f"{reason} (here: {own.reason})" if code else reason)
        return returncode, own

    def stop(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop(phase="ended")


def torchrun_arguments(config: RunConfig, run: RunFolder, place: Place) -> list[str]:
    """How the agents of all nodes find each other. One node meets itself on loopback."""
    host = "127.0.0.1" if place.nodes == 1 else place.host
    return [
        f"--nnodes={place.nodes}",
        f"--rdzv-endpoint={f'[{host}]' if ':' in host else host}:0",
        f"--rdzv-id={run.run_id}",
        f"--rdzv-conf=node={place.node},timeout={meeting_timeout(config)}",
    ]


def environment(run: RunFolder, place: Place) -> dict[str, str]:
    """What the agent and the ranks of a node must know; what the environment says already goes first."""
    added = {**network_environment(place), MEETING_ENV: str(run.meeting_file(place.incarnation))}
    return added if place.nodes == 1 else {**added, "TORCH_ELASTIC_WORKER_IDENTICAL": "1"}


def publish_meeting(path: str, host: str, port: int) -> None:
    write_json(Path(path), {"host": host, "port": port, "pid": os.getpid()})
