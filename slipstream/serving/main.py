"""Leader of the server job: starts vLLM, says where it is, watches over it, ends it.

python -m slipstream.serving.main RUN_DIR --attempt N
"""

import argparse
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.process import (
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
from slipstream.serving.command import LOOPBACK, server_command, vllm_python
from slipstream.serving.control import ServerControl, ServerError
from slipstream.serving.guard import Guard
from slipstream.serving.probe import Capabilities, check, probe

HOST_ENV = "SLIPSTREAM_HOST"
ROLE = "server-0"
PORT_TRIES = 5
WATCH_INTERVAL_S = 5.0
CALL_TIMEOUT_S = 30.0
CANCEL_GRACE_S = 3.0
ABANDONED_S = 180.0  # a live supervisor beats every two seconds, and stops the server within as many
PORT_TAKEN = re.compile(r"address already in use|errno 98", re.IGNORECASE)


class StartError(RuntimeError):
    """The server did not come up, or is not what the run needs."""


def free_port(host: str) -> int:
    """A port of `host` that was free a moment ago."""
    with socket.socket() as probe_socket:
        probe_socket.bind((host, 0))
        return int(probe_socket.getsockname()[1])


def required(config: RunConfig) -> dict[str, Any]:
    """What `probe.check` must ask of a server for this run."""
    return {
        "max_model_len": config.server.max_model_len,
        "num_sampler_logprobs": config.trainer.num_sampler_logprobs,
        "num_generations": config.trainer.num_generations,
        "sampling_mask": config.trainer.top_k > 0 and config.server.gpus > 0,
        "lora_rank": config.learner.lora_rank if config.learner.use_lora and config.server.enable_lora else None,
    }


class Abandoned:
    """Whether nobody needs the server any more: the learner has ended, and the flow that would stop the server is dead.

    A server that outlives its run would hold its GPUs until somebody notices.
    """

    def __init__(self, run: RunFolder, attempt: int) -> None:
        self._run = run
        self._attempt = attempt
        self._beat: Any = None
        self._since: float | None = None

    def look(self, now: float) -> bool:
        """One look at `now` (monotonic, in seconds); True once both have held for `ABANDONED_S`."""
        try:
            beat = read_json(self._run.heartbeat_file("supervisor"))
            records = [read_json(path) or {} for path in (self._run.path / "exit").glob("learner-*.json")]
        except (OSError, ValueError):  # a file system that stumbles proves nothing
            return False
        ended = any(record.get("attempt") == self._attempt for record in records)
        if not ended or beat != self._beat:
            self._beat, self._since = beat, None
        if ended and self._since is None:
            self._since = now
        return self._since is not None and now - self._since > ABANDONED_S


class Leader:
    """One start of one server."""

    def __init__(self, run: RunFolder, config: RunConfig, attempt: int) -> None:
        self.run = run
        self.config = config
        self.attempt = attempt
        self.incarnation = new_incarnation()
        self.host = os.environ.get(HOST_ENV, LOOPBACK)
        self.log = run.log_file("server", attempt)
        self.heartbeat = Heartbeat(run, ROLE, attempt, self.incarnation)
        self.signal: str | None = None
        self._woken = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None
        self._temporary = ""

    def on_signal(self, name: str) -> None:
        self.signal = name
        self._woken.set()

    def lead(self) -> int:
        """Serve until a signal or the end of the server; the exit code. Leaves an exit record and no process."""
        self.heartbeat.start()
        self._temporary = tempfile.mkdtemp(prefix="slipstream-server-")
        code, reason = 1, "the leader failed"
        try:
            control = self._start()
            with control:
                self._publish(control)
                code, reason = self._watch(control)
        except Exception as error:
            if self.signal is None:
                reason = f"{type(error).__name__}: {error}"
        finally:
            self._end_child()
            shutil.rmtree(self._temporary, ignore_errors=True)
        if self.signal is not None:
            code, reason = 0, f"stopped by {self.signal}"
        write_exit(self.run, ROLE, self.incarnation, self.attempt, code, reason, self.log)
        self.heartbeat.stop(phase="ended")
        return code

    def _start(self) -> ServerControl:
        """A healthy server. Another port is tried where somebody took ours between the choice and the start."""
        deadline = time.monotonic() + self.config.server.startup_timeout
        python = self.config.server.command[0] if self.config.server.command else vllm_python()
        for _ in range(PORT_TRIES):
            port = free_port(self.host)
            argv, env = server_command(self.config, self.run, port, python, self.host)
            self._child = child = spawn(argv, self.log, {**os.environ, "TMPDIR": self._temporary, **env})
            self._guard = Guard(child.pid)
            control = ServerControl(f"http://{self.host}:{port}", self.run.token_file, CALL_TIMEOUT_S)
            try:
                control.wait_healthy(deadline - time.monotonic(), alive=self._starting)
                return control
            except ServerError as error:
                control.close()
                tail = last_lines(self.log)
                if child.poll() is None or self.signal is not None:
                    raise StartError(f"the server is not healthy: {error}; see {self.log}") from error
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
        return self.signal is None and self._child is not None and self._child.poll() is None

    def _publish(self, control: ServerControl) -> None:
        capabilities = probe(control)
        problems = check(capabilities, **required(self.config))
        if problems:
            raise StartError("the server is not what the run needs: " + "; ".join(problems))
        write_endpoint(self.run, self.attempt, self.incarnation, control.base_url, capabilities, own=True)
        self.heartbeat.update(phase="serving", url=control.base_url)

    def _watch(self, control: ServerControl) -> tuple[int, str]:
        assert self._child is not None
        next_look = 0.0
        abandoned = Abandoned(self.run, self.attempt)
        while self._child.poll() is None and self.signal is None:
            if time.monotonic() >= next_look:
                if abandoned.look(time.monotonic()):
                    return 0, "the learner has ended, and no supervisor lives to stop the server"
                with contextlib.suppress(ServerError):  # a busy or frozen server shows as progress that stands still
                    self.heartbeat.update(progress=generated_tokens(control.metrics()))
                next_look = time.monotonic() + WATCH_INTERVAL_S
            self._woken.wait(0.2)
        return 1, f"the server ended {how_ended(self._child.poll())}"


def generated_tokens(metrics: str) -> int:
    """Tokens generated by all engines since the start, from the text of /metrics."""
    values = re.findall(r"^vllm:generation_tokens_total(?:\{[^}]*\})? (\S+)$", metrics, re.MULTILINE)
    return int(sum(float(value) for value in values))


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
        raise StartError(f"the server at {url} is not what the run needs: " + "; ".join(problems))
    return write_endpoint(run, attempt, new_incarnation(), url.rstrip("/"), capabilities, own=False)


def run(run_dir: str | Path, attempt: int) -> int:
    """Lead the server of a run; returns the exit code: 0 after a signal, 1 on any failure."""
    folder = RunFolder.open(run_dir)
    config = RunConfig.model_validate(tomllib.loads(folder.run_file.read_text(encoding="utf-8")))
    if config.server.url:
        raise StartError(f"server.url = {config.server.url!r}: there is no server to start, use attach_external")
    leader = Leader(folder, config, attempt)
    on_terminate(leader.on_signal)
    return leader.lead()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m slipstream.serving.main", description="Lead the server of a run.")
    parser.add_argument("run_dir", help="the run folder")
    parser.add_argument("--attempt", type=int, required=True, help="number of the attempt")
    arguments = parser.parse_args(argv)
    return run(arguments.run_dir, arguments.attempt)


if __name__ == "__main__":
    sys.exit(main())
