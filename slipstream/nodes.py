"""The nodes of one job: which of them this is, the address and ports to listen on, what became of the others.

One leader runs on each node of a role. They share the job's incarnation, and meet in the run folder: node 0 publishes
where it listens; each beats and leaves an exit record, and each watches those of the others.
"""

import contextlib
import ipaddress
import os
import random
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from slipstream.process import INCARNATION_ENV, job_incarnation
from slipstream.run_folder import RunFolder, read_json

HOST_ENV = "SLIPSTREAM_HOST"
RANK_ENV = "SLIPSTREAM_NODE_RANK"
NODES_ENV = "SLIPSTREAM_NODES"
PORTS_ENV = "SLIPSTREAM_PORTS"
LOOPBACK = "127.0.0.1"
PEER_SILENT_S = 180.0  # a leader beats every two seconds; storage may stumble longer than a process does
CAUSE_S = 10.0  # in which a leader that lives gives a sign, and one that failed has left its record
LEAVE_S = 60.0  # between the end of the first node and that of the last


class NodeError(RuntimeError):
    """The environment of a job contradicts itself, or a node of the job is not there."""


@dataclass(frozen=True)
class Place:
    """One node of a job. `host` is the address on which it listens, for the other nodes."""

    node: int
    nodes: int
    host: str
    incarnation: str

    @classmethod
    def here(cls, nodes: int) -> "Place":
        """This process's place among the `nodes` of its role, from the job's environment; without one, the only node.

        Raises NodeError where the environment says something else than the configuration.
        """
        given = os.environ.get(NODES_ENV, "1")
        rank = os.environ.get(RANK_ENV, "0")
        if not given.isdecimal() or int(given) != nodes:
            raise NodeError(
                f"{NODES_ENV} = {given!r}, but the run wants {nodes} nodes of this role: start one leader on each of "
                f"{nodes} nodes, with {RANK_ENV}, {NODES_ENV}, {HOST_ENV} and {INCARNATION_ENV} set"
            )
        if not rank.isdecimal() or int(rank) >= nodes:
            raise NodeError(f"{RANK_ENV} = {rank!r}: must be from 0 to {nodes - 1}")
        if nodes > 1:
            missing = [name for name in (HOST_ENV, INCARNATION_ENV, RANK_ENV) if not os.environ.get(name)]
            if missing:
                raise NodeError(f"{', '.join(missing)} not set: a job of {nodes} nodes needs them on each node")
        return cls(int(rank), nodes, os.environ.get(HOST_ENV, LOOPBACK), job_incarnation())

    def role(self, role: str) -> str:
        """The name of `role` in the exit record: `learner` on node 0, `learner.1` on the next."""
        return node_role(role, self.node)

    def log_file(self, run: RunFolder, role: str, attempt: int) -> Path:
        """The log of this node: `learner-2.log` on node 0, `learner-2-n1.log` on the next."""
        if self.node == 0:
            return run.log_file(role, attempt)
        return run.logs / f"{role}-{attempt}-n{self.node}.log"


def node_role(role: str, node: int) -> str:
    return role if node == 0 else f"{role}.{node}"


def interface_of(host: str) -> str:
    """The name of the network interface that carries the address `host`. Raises NodeError where none does."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise NodeError(f"{HOST_ENV} = {host!r} is no address: {error}") from error
    interfaces = psutil.net_if_addrs()
    for name, entries in interfaces.items():
        if any(entry.address.split("%")[0] in addresses for entry in entries):
            return name
    loops = [name for name, entries in interfaces.items() if any(entry.address == LOOPBACK for entry in entries)]
    if loops and all(ipaddress.ip_address(str(address).split("%")[0]).is_loopback for address in addresses):
        return loops[0]  # all of 127.0.0.0/8 is the loopback's, though it lists one address
    raise NodeError(f"{HOST_ENV} = {host!r} is no address of this node: it has {', '.join(sorted(interfaces))}")


def network_environment(place: Place) -> dict[str, str]:
    """Which interface gloo and NCCL use: the one that carries `place.host`. Raises NodeError where none does."""
    if place.nodes == 1 and HOST_ENV not in os.environ:
        return {"GLOO_SOCKET_IFNAME": "lo"}
    name = interface_of(place.host)
    # NCCL takes a name as the beginning of one, unless told otherwise
    return {"GLOO_SOCKET_IFNAME": name if place.nodes > 1 else "lo", "NCCL_SOCKET_IFNAME": f"={name}"}


def allowed_ports() -> tuple[int, int] | None:
    """First and last port that may be listened on (SLIPSTREAM_PORTS, like 20000-20999); None: any."""
    text = os.environ.get(PORTS_ENV, "").strip()
    if not text:
        return None
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1024 <= first <= last <= 65535:
        raise NodeError(f"{PORTS_ENV} = {text!r}: must be two ports from 1024 to 65535, like 20000-20999")
    return first, last


def candidate_ports() -> Iterator[int]:
    """Ports to try, in random order where the choice is restricted; 0 lets the system choose."""
    allowed = allowed_ports()
    if allowed is None:
        yield 0
        return
    ports = list(range(allowed[0], allowed[1] + 1))
    random.SystemRandom().shuffle(ports)
    yield from ports


def open_listener(host: str) -> socket.socket:
    """A listening socket on a free port of the interface that `host` names, and on no other.

    Raises OSError where `host` is no address of this machine, or every allowed port is taken.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    failed: OSError | None = None
    for port in candidate_ports():
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address[0], port, *address[2:]))
            listener.listen(1024)
            return listener
        except OSError as error:
            listener.close()
            failed = error
        except BaseException:
            listener.close()
            raise
    raise failed or OSError(f"no port of {host} is allowed")


def free_port(host: str) -> int:
    """A port of `host` that was free a moment ago. Raises OSError like `open_listener`."""
    with contextlib.closing(open_listener(host)) as listener:
        return int(listener.getsockname()[1])


class Peers:
    """What became of the other nodes of a job, by their exit records and heartbeats.

    Args:
        record: (number of a node) → its role in exit records.
        watched: numbers of the nodes that matter to this one.
        beats: name of each watched node's heartbeat.
    """

    def __init__(
        self,
        run: RunFolder,
        place: Place,
        record: Callable[[int], str],
        watched: Sequence[int],
        beats: Mapping[int, str],
    ) -> None:
        self._run = run
        self._place = place
        self._record_name = record
        self._watched = watched
        self._beats = beats
        self._seen: dict[int, tuple[Any, float]] = {}
        self._hosts: dict[int, str] = {}
        self._done_since: float | None = None
        self._looked = float("-inf")

    def _record(self, node: int) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            return read_json(self._run.exit_file(self._record_name(node), self._place.incarnation))
        return None

    def beat(self, node: int) -> dict[str, Any] | None:
        """The heartbeat of a node's leader of this incarnation, if there is one."""
        with contextlib.suppress(OSError, ValueError):
            beat = read_json(self._run.heartbeat_file(self._beats[node]))
            if beat and beat.get("incarnation") == self._place.incarnation:
                self._hosts[node] = str(beat.get("host", ""))
                return dict(beat)
        return None

    def fault(self, node: int, what: str) -> str:
        """A reason that blames the machine a node's leader was last seen on."""
        host = self._hosts.get(node) or str((self.beat(node) or {}).get("host") or "")
        return f"node {host}: the leader of node {node} {what}" if host else f"the leader of node {node} {what}"

    def missing(self) -> list[int]:
        """The watched nodes whose leader has not said anything yet."""
        return [node for node in self._watched if self.beat(node) is None]

    def ended(self) -> tuple[int, str] | None:
        """Code and reason, naming the node, of the watched node that ended first; None while all go on."""
        records = {node: record for node in self._watched if (record := self._record(node))}
        if not records:
            return None
        node = min(records, key=lambda n: (records[n].get("returncode") == 0, float(records[n].get("time") or 0)))
        record = records[node]
        code, host, reason = record.get("returncode") or 0, record.get("host"), record.get("reason")
        if str(reason).startswith("node "):  # it names its culprit itself
            return int(code != 0), str(reason)
        return int(code != 0), f"node {node} ({host}) ended: {reason}"

    def silent(self, now: float, bound_s: float = PEER_SILENT_S) -> int | None:
        """The node whose leader has given no sign for `bound_s` seconds by this process's own looks; None: all live.

        `now`: monotonic, in seconds. A file system that stumbles here proves nothing, and no more does a pause of this
        process: the others may have been suspended with it.
        """
        if now - self._looked > bound_s / 3:
            self._seen.clear()
        self._looked = now
        for node in self._watched:
            try:
                beat = read_json(self._run.heartbeat_file(self._beats[node]))
            except (OSError, ValueError):
                self._seen.pop(node, None)
                continue
            if beat is None:  # it has not come yet
                continue
            mark = beat.get("counter"), beat.get("incarnation")
            if node not in self._seen or self._seen[node][0] != mark:
                self._seen[node] = (mark, now)
            elif now - self._seen[node][1] > bound_s:
                return node
        return None

    def verdict(self, now: float) -> tuple[int, str] | None:
        """Why this node must end now: exit code and reason; None while it may go on.

        One that failed ends the others at once; one that ended well leaves them `LEAVE_S` seconds.
        """
        ended = self.ended()
        if ended is not None:
            if self._done_since is None:
                self._done_since = now
            if ended[0] or now - self._done_since > LEAVE_S:
                return ended
            return None
        silent = self.silent(now)
        if silent is not None:
            return 1, self.fault(silent, f"gave no sign for {PEER_SILENT_S:g} s")
        return None

    def cause(self, hurry: Callable[[], object] = lambda: False, wait_s: float = CAUSE_S) -> tuple[int, str] | None:
        """After a failure here: code and reason if another node had ended, or died without a word; else None.

        Looks for up to `wait_s` seconds, or until `hurry()`.
        """
        begin = time.monotonic()
        counters = {node: (self.beat(node) or {}).get("counter") for node in self._watched}
        still = set(self._watched)
        while time.monotonic() - begin < wait_s and not hurry():
            if (ended := self.ended()) is not None:
                return ended
            still = {node for node in still if (self.beat(node) or {}).get("counter") == counters[node]}
            time.sleep(0.2)
        if still and not hurry():
            return 1, self.fault(min(still), f"died without a word, no sign of it for {wait_s:g} s")
        return self.ended()
