"""The server's nodes: what vLLM is told on each of them, and what a leader of a further node does.

Node 0 has the API server and the first engines; it says in the run's meeting file where the others find it, anew for
each try. The others run engines without an API server, for as long as node 0's leader lives.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from slipstream.nodes import HOST_ENV, Peers, Place, allowed_ports, free_port, network_environment, open_listener
from slipstream.process import REPLACED, Heartbeat, how_ended, spawn, stop, write_exit
from slipstream.run_config import RunConfig, ServerSection
from slipstream.run_folder import RunFolder, read_json, write_json
from slipstream.serving.guard import Guard

Command = Callable[[dict[str, Any]], tuple[list[str], dict[str, str]]]
LOOK_S = 1.0
ROLE = "server"


def beat_name(node: int) -> str:
    return f"server-{node}"


def record_name(node: int) -> str:
    """The role of a node in exit records."""
    return f"server-{node}"


def parallel_arguments(server: ServerSection, place: Place, meeting: Mapping[str, Any]) -> list[str]:
    """What makes vLLM one server over several nodes; nothing for one.

    Args:
        meeting: `host` of node 0, `rpc_port` of its data parallelism, `master_port` of an engine that spans nodes.
    """
    if place.nodes == 1:
        return []
    headless = ["--headless"] if place.node else []
    data_parallel = [
        *("--data-parallel-address", str(meeting["host"])),
        *("--data-parallel-rpc-port", str(meeting["rpc_port"])),
    ]
    if server.gpus and server.tensor_parallel_size > server.gpus:
        spanning = [
            *("--nnodes", str(place.nodes), "--node-rank", str(place.node)),
            *("--master-addr", str(meeting["host"]), "--master-port", str(meeting["master_port"])),
        ]
        return headless + spanning + (data_parallel if server.data_parallel_size > 1 else [])
    local = server.data_parallel_size // place.nodes
    start = ["--data-parallel-start-rank", str(place.node * local)] if place.node else []
    return [*headless, *data_parallel, "--data-parallel-size-local", str(local), *start]


def parallel_environment(place: Place) -> dict[str, str]:
    """Addresses and interfaces of vLLM's own connections, where the cluster names an address."""
    if HOST_ENV not in os.environ:
        return {}
    env = {**network_environment(place), "VLLM_HOST_IP": place.host}
    if allowed_ports() is not None:
        env["VLLM_PORT"] = str(free_port(place.host))  # the first that vLLM tries; the next ones follow it
    return env


def peers_of(run: RunFolder, place: Place) -> Peers:
    """Node 0 watches all others; each of these only node 0."""
    watched = list(range(1, place.nodes)) if place.node == 0 else [0]
    return Peers(run, place, record_name, watched, {node: beat_name(node) for node in watched})


class Head:
    """What node 0 does for the others: says where it is, and ends when one of them has ended."""

    def __init__(self, run: RunFolder, place: Place) -> None:
        self._run = run
        self._place = place
        self._peers = peers_of(run, place)
        self._tries = 0
        self._next_look = 0.0

    def meeting(self) -> dict[str, Any]:
        """Choose ports for a new try and publish them, which makes the others start their engines anew."""
        if self._place.nodes == 1:
            return {}
        self._tries += 1
        host = self._place.host
        with contextlib.closing(open_listener(host)) as one, contextlib.closing(open_listener(host)) as other:
            rpc, master = (int(listener.getsockname()[1]) for listener in (one, other))
        meeting = {"host": host, "rpc_port": rpc, "master_port": master, "try": self._tries}
        write_json(self._run.meeting_file(self._place.incarnation), meeting)
        return meeting

    def broken(self) -> str | None:
        """Why the server cannot go on, naming the node; None while all are there. Looks once a second."""
        now = time.monotonic()
        if self._place.nodes == 1 or now < self._next_look:
            return None
        self._next_look = now + LOOK_S
        if (ended := self._peers.ended()) is not None:
            return ended[1]
        verdict = self._peers.verdict(now)
        return verdict[1] if verdict else None

    def missing(self) -> str:
        """Which nodes have not come, in words that can be added to a sentence."""
        missing = self._peers.missing()
        return f"; of {self._place.nodes} nodes these have not come: {', '.join(map(str, missing))}" if missing else ""

    def why_ended(self, own: str, stopped: Callable[[], object]) -> str:
        """After the end of the server here: `own`, or that of the node that broke it."""
        cause = self._peers.cause(stopped) if self._place.nodes > 1 else None
        return f"{cause[1]} (here: {own})" if cause else own


class Follower:
    """Leader of a further server node: engines for node 0's API server, in the ways of its leader."""

    def __init__(self, run: RunFolder, config: RunConfig, place: Place, attempt: int, command: Command) -> None:
        """`command`: (meeting) → arguments and additions to the environment of the engines."""
        self.run = run
        self.config = config
        self.place = place
        self.attempt = attempt
        self.signal: str | None = None
        self.log = place.log_file(run, ROLE, attempt)
        self._command = command
        self._peers = peers_of(run, place)
        self._woken = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None

    def on_signal(self, name: str) -> None:
        self.signal = name
        self._woken.set()

    def lead(self) -> int:
        """Run engines until a signal, their end, or that of node 0; the exit code. Leaves a record and no process."""
        name = record_name(self.place.node)
        heartbeat = Heartbeat(self.run, beat_name(self.place.node), self.attempt, self.place.incarnation).start()
        temporary = tempfile.mkdtemp(prefix="slipstream-server-")
        code, reason = 1, "the leader failed"
        try:
            code, reason = self._follow(temporary, heartbeat)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._end_child()
            shutil.rmtree(temporary, ignore_errors=True)
        if self.signal is not None:
            code, reason = 0, f"stopped by {self.signal}"
        write_exit(self.run, name, self.place.incarnation, self.attempt, code, reason, self.log)
        heartbeat.stop(phase="ended")
        return code

    def _follow(self, temporary: str, heartbeat: Heartbeat) -> tuple[int, str]:
        meeting: dict[str, Any] | None = None
        bound_s = self.config.server.startup_timeout
        deadline = time.monotonic() + bound_s
        while self.signal is None:
            if (end := self._must_end()) is not None:
                return end
            found = self._meeting()
            if found is None and time.monotonic() > deadline:
                leader_log = self.run.log_file(ROLE, self.attempt)
                return 1, f"node 0 did not say where it is in server.startup_timeout = {bound_s:g} s: see {leader_log}"
            if found is not None and found != meeting:
                meeting = found
                self._end_child()
                argv, env = self._command(meeting)
                self._child = spawn(argv, self.log, {**os.environ, "TMPDIR": temporary, **env})
                self._guard = Guard(self._child.pid)
                heartbeat.update(phase="serving")
            if self._child is not None and (code := self._child.poll()) is not None:
                ended = self._engines_ended(code, meeting)
                if ended is not None:
                    return ended
            self._woken.wait(LOOK_S)
        return 0, f"stopped by {self.signal}"

    def _meeting(self) -> dict[str, Any] | None:
        return read_json(self.run.meeting_file(self.place.incarnation))

    def _must_end(self) -> tuple[int, str] | None:
        if self.run.replaced(ROLE, self.place.incarnation):
            return 0, REPLACED
        # without node 0 there is nothing to do
        return self._peers.ended() or self._peers.verdict(time.monotonic())

    def _engines_ended(self, code: int, meeting: dict[str, Any] | None) -> tuple[int, str] | None:
        """The engines end by themselves where node 0 ended; None where it makes another try."""
        cause = self._peers.cause(lambda: self.signal or self._meeting() != meeting)
        if cause is not None or self._meeting() != meeting:
            return cause
        return 1, f"the engines of node {self.place.node} ended {how_ended(code)}"

    def _end_child(self) -> None:
        if self._child is not None:
            stop(self._child)
            self._child = None
        if self._guard is not None:
            self._guard.release()
            self._guard = None
