"""Leader of the server job: starts vLLM, says where it is, watches over it, ends it.

python -m slipstream.serving.main RUN_DIR --attempt N
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.nodes import NodeError, Place, free_port
from slipstream.process import (
    REPLACED,
    TERMINATE_GRACE_S,
    Heartbeat,
    how_ended,
    last_lines,
    new_incarnation,
    on_terminate,
    spawn,
    stop,
    write_exit,
)
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, read_json, write_json
from slipstream.serving.abandoned import Abandoned
from slipstream.serving.command import server_command, vllm_python
from slipstream.serving.control import ServerControl, ServerError
from slipstream.serving.guard import Guard
from slipstream.serving.nodes import Follower, Head, parallel_environment
from slipstream.serving.probe import Capabilities, check, probe
from slipstream.serving.stall import StallWatch

ROLE = "server-0"
PORT_TRIES = 5
WATCH_INTERVAL_S = 5.0
CALL_TIMEOUT_S = 30.0
CANCEL_GRACE_S = 3.0
PORT_TAKEN = re.compile(r"address already in use|errno 98", re.IGNORECASE)


class StartError(RuntimeError):
    """The server did not come up, or is not what the run needs."""


class Unsuitable(StartError):
    """The server is not what the run needs, and would not be after another start."""


def required(config: RunConfig) -> dict[str, Any]:
    """What `probe.check` must ask of a server for this run."""
    return {
        "max_model_len": config.server.max_model_len,
        "num_sampler_logprobs": config.trainer.num_sampler_logprobs,
        "num_generations": config.trainer.num_generations,
        "sampling_mask": config.trainer.top_k > 0 and config.server.gpus > 0,
        "lora_rank": config.learner.lora_rank if config.learner.use_lora and config.server.enable_lora else None,
    }


class Leader:
    """One start of one server."""

    def __init__(self, run: RunFolder, config: RunConfig, attempt: int) -> None:
        self.run = run
        self.config = config
        self.attempt = attempt
        self.place = Place.here(config.server.nodes)
        self.incarnation = self.place.incarnation
        self.host = self.place.host
        self.log = run.log_file("server", attempt)
        self._head = Head(run, self.place)
        self._broken: str | None = None
        self.heartbeat = Heartbeat(run, ROLE, attempt, self.incarnation)
        self.signal: str | None = None
        self._woken = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None
        self._temporary = ""
        self._replaced = False
        self._next_look = 0.0

    def on_signal(self, name: str) -> None:
        self.signal = name
        self._woken.set()

    def lead(self) -> int:
        """Serve until a signal or the end of the server; the exit code. Leaves an exit record and no process."""
        self.heartbeat.start()
        self._temporary = tempfile.mkdtemp(prefix="slipstream-server-")
        code, reason, final = 1, "the leader failed", False
        try:
            control = self._start()
            with control:
                self._publish(control)
                code, reason = self._watch(control)
        except NodeError as error:
            reason = str(error)
        except Exception as error:
            if self.signal is None:
                reason, final = f"{type(error).__name__}: {error}", isinstance(error, Unsuitable)
            if self._replaced:
                code, reason = 0, REPLACED
        finally:
            withdraw_endpoint(self.run, self.incarnation)
            self._end_child()
            shutil.rmtree(self._temporary, ignore_errors=True)
        if self.signal is not None:
            code, reason = 0, f"stopped by {self.signal}"
        write_exit(self.run, ROLE, self.incarnation, self.attempt, code, reason, self.log, final=final)
        self.heartbeat.stop(phase="ended")
        return code

    def _start(self) -> ServerControl:
        """A healthy server. Another port is tried where somebody took ours between the choice and the start."""
        deadline = time.monotonic() + self.config.server.startup_timeout
        python = self.config.server.command[0] if self.config.server.command else vllm_python()
        for _ in range(PORT_TRIES):
            port = free_port(self.host)
            meeting = self._head.meeting()
            argv, env = server_command(self.config, self.run, port, python, self.host, self.place, meeting)
            env = {**parallel_environment(self.place), **os.environ, "TMPDIR": self._temporary, **env}
            self._child = child = spawn(argv, self.log, env)
            self._guard = Guard(child.pid)
            control = ServerControl(f"http://{self.host}:{port}", self.run.token_file, CALL_TIMEOUT_S)
            try:
                control.wait_healthy(deadline - time.monotonic(), alive=self._starting)
                return control
            except ServerError as error:
                control.close()
                tail = last_lines(self.log)
                if self._broken is not None:
                    raise NodeError(self._broken) from error
                if child.poll() is None or self.signal is not None:
                    raise StartError(
                        f"the server is not healthy: {error}{self._head.missing()}; see {self.log}"
                    ) from error
                if not PORT_TAKEN.search(tail):
                    raise StartError(f"the server ended {how_ended(child.returncode)}; see {self.log}") from error
                self._end_child()
        raise StartError(f"no free port on {self.host} in {PORT_TRIES} tries")

    def _end_child(self) -> None:
        if self._child is not None:
            stop(self._child, CANCEL_GRACE_S if self.run.cancel_file.exists() else TERMINATE_GRACE_S)
        if self._guard is not None:
            self._guard.release()

    def _starting(self) -> bool:
        self._broken = self._head.broken()
        if self._broken is not None:
            return False
        if time.monotonic() >= self._next_look:
            self._replaced = self.run.replaced("server", self.incarnation)
            self._next_look = time.monotonic() + WATCH_INTERVAL_S
        return not self._replaced and self.signal is None and self._child is not None and self._child.poll() is None

    def _publish(self, control: ServerControl) -> None:
        capabilities = probe(control)
        problems = check(capabilities, **required(self.config))
        if problems:
            raise Unsuitable("the server is not what the run needs: " + "; ".join(problems))
        write_endpoint(self.run, self.attempt, self.incarnation, control.base_url, capabilities, own=True)
        self.heartbeat.update(phase="serving", url=control.base_url)

    def _watch(self, control: ServerControl) -> tuple[int, str]:
        assert self._child is not None
        next_look = 0.0
        abandoned = Abandoned(self.run, self.attempt, 60 * self.config.recovery.max_idle_gpu_minutes)
        watch = StallWatch(control, self.config.server.stall_timeout)
        try:
            while self._child.poll() is None and self.signal is None and not watch.problem:
                if time.monotonic() >= next_look:
                    if self.run.replaced("server", self.incarnation):
                        return 0, REPLACED
                    if abandoned.look(time.monotonic()):
                        return 0, "the learner is gone, and no supervisor lives to stop the server"
                    self.heartbeat.update(progress=watch.generated)
                    next_look = time.monotonic() + WATCH_INTERVAL_S
                if (broken := self._head.broken()) is not None:
                    return 1, broken
                self._woken.wait(0.2)
        finally:
            watch.stop()
        if watch.problem:
            return 1, watch.problem
        own = f"the server ended {how_ended(self._child.poll())}"
        return 1, self._head.why_ended(own, lambda: self.signal)


def write_endpoint(
    run: RunFolder, attempt: int, incarnation: str, url: str, capabilities: Capabilities, own: bool
) -> dict[str, Any]:
    """Say on storage where the server is; `authenticated` tells clients to send the run's token."""
    endpoint = {
        "url": url,
        "incarnation": incarnation,
        "attempt": attempt,
        "model": capabilities.model,
        "authenticated": own,
        "capabilities": capabilities.to_plain(),
    }
    write_json(run.endpoint_file(), endpoint)
    return endpoint


def withdraw_endpoint(run: RunFolder, incarnation: str) -> None:
    """Take back what `write_endpoint` said, where it still is this server's word."""
    with contextlib.suppress(OSError, ValueError):
        if (read_json(run.endpoint_file()) or {}).get("incarnation") == incarnation:
            run.endpoint_file().unlink()


def attach_external(
    run: RunFolder,
    attempt: int,
    url: str,
    requirements: dict[str, Any] | None = None,
    timeout_s: float = CALL_TIMEOUT_S,
) -> dict[str, Any]:
    """Use a server that somebody else started: wait for it, probe it, write its endpoint file, and return that.

    Args:
        requirements: keyword arguments of `probe.check` (see `required`).
        timeout_s: bound of waiting for it and of each call, in seconds.

    Raises ServerError where it does not answer, StartError where it lacks something.
    """
    with ServerControl(url, None, timeout_s) as control:
        control.wait_healthy(timeout_s)
        capabilities = probe(control)
    problems = check(capabilities, **(requirements or {}))
    if problems:
        raise Unsuitable(f"the server at {url} is not what the run needs: " + "; ".join(problems))
    return write_endpoint(run, attempt, new_incarnation(), url.rstrip("/"), capabilities, own=False)


def run(run_dir: str | Path, attempt: int) -> int:
    """Lead the server of a run; returns the exit code: 0 after a signal, 1 on any failure."""
    folder = RunFolder.open(run_dir)
    config = RunConfig.model_validate(tomllib.loads(folder.run_file.read_text(encoding="utf-8")))
    if config.server.url:
        raise StartError(f"server.url = {config.server.url!r}: there is no server to start, use attach_external")
    place = Place.here(config.server.nodes)
    leader: Leader | Follower = (
        Leader(folder, config, attempt) if place.node == 0 else _follower(folder, config, attempt)
    )
    on_terminate(leader.on_signal)
    return leader.lead()


def _follower(run: RunFolder, config: RunConfig, attempt: int) -> Follower:
    place = Place.here(config.server.nodes)
    python = config.server.command[0] if config.server.command else vllm_python()

    def command(meeting: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
        argv, env = server_command(config, run, 0, python, place.host, place, meeting)
        return argv, {**parallel_environment(place), **env}

    return Follower(run, config, place, attempt, command)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m slipstream.serving.main", description="Lead the server of a run.")
    parser.add_argument("run_dir", help="the run folder")
    parser.add_argument("--attempt", type=int, required=True, help="number of the attempt")
    arguments = parser.parse_args(argv)
    return run(arguments.run_dir, arguments.attempt)


if __name__ == "__main__":
    sys.exit(main())
