"""Rank 0's hold on the server: which one counts, by the run folder; whether it is still there; the next one."""

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from slipstream.learner.reporter import Reporter
from slipstream.learner.sync import wire_dtype
from slipstream.nodes import HOST_ENV, LOOPBACK
from slipstream.run_folder import RunFolder
from slipstream.serving.control import ServerControl, ServerError
from slipstream.serving.group import GroupError
from slipstream.serving.probe import Capabilities, probe
from slipstream.serving.transport import WeightTransport, make_transport

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at storage
ANSWER_S = 10.0  # until a server that does not answer /health counts as gone


class ServerGone(RuntimeError):
    """No server that counts was there for longer than the learner waits (`learner.patience`)."""


class ServerNotUsable(RuntimeError):
    """The server lacks something; the message says with which flag to restart it."""

    final = True


class ServerReplaced(GroupError):
    """The server was replaced while it was sent to."""


class ServerLink:
    """The server that counts for an attempt. Without a run folder that is the one of the config, for good.

    Args:
        config: of the trainer.
        run_id: who delivers.
        problems: what the run misses on a server, each with the way out.
        reporter: of the trainer.
        step: optimizer steps done.

    Attributes:
        control, capabilities: of the server attached to.
        incarnation: of that server; None where no endpoint tells.
        leaving: asked while a server is waited for; True ends the wait without one.
    """

    control: ServerControl
    capabilities: Capabilities

    def __init__(
        self,
        config: Any,
        run_id: str,
        problems: Callable[[Capabilities], list[str]],
        reporter: Reporter,
        step: Callable[[], int],
    ) -> None:
        self._config = config
        self._run = RunFolder(config.run_dir) if config.run_dir else None
        self._problems = problems
        self._run_id = run_id
        self._reporter = reporter
        self._step = step
        self._timeout_s: float = config.vllm_server_timeout
        self._patience_s: float = config.server_patience or self._timeout_s
        self._attached = False
        self.incarnation: str | None = None
        self.leaving: Callable[[], bool] = lambda: False
        self._lost_at: float | None = None
        self._looked = float("-inf")
        self._endpoint: dict[str, Any] | None = None

    # ---- where it is

    def _look(self, now: bool = False) -> dict[str, Any] | None:
        """The endpoint that counts, at most `LOOK_S` old."""
        if self._run is not None and (now or time.monotonic() - self._looked >= LOOK_S):
            self._endpoint = self._run.endpoint(self._config.attempt)
            self._looked = time.monotonic()
            if self.incarnation is None and self._attached and self._endpoint is not None:
                same = str(self._endpoint["url"]).rstrip("/") == self.control.base_url
                self.incarnation = self._endpoint.get("incarnation") if same else None
        return self._endpoint

    def moved(self, now: bool = False) -> bool:
        """Whether another server counts than the one attached to."""
        endpoint = self._look(now)
        if endpoint is None:
            return False
        here = self.control.base_url, self.incarnation
        return (str(endpoint["url"]).rstrip("/"), endpoint.get("incarnation")) != here

    def absent(self) -> bool:
        """Whether none counts at present, though one did. Raises ServerGone once that has lasted too long."""
        absent = self._look() is None and self.incarnation is not None
        if not absent:
            self._lost_at = None
        elif self._lost_at is None:
            self._lost_at = time.monotonic()
        elif time.monotonic() - self._lost_at > self._patience_s:
            raise self._gone("none has been named")
        return absent

    def lost(self) -> bool:
        """Whether the server has gone, after it failed: replaced, or it does not answer. Outside a run never."""
        if self._run is None:
            return False
        lost = self.moved(now=True)
        if not lost:
            try:
                with self.control.with_timeout(ANSWER_S) as control:
                    control.call("GET", "/health")
            except ServerError:
                lost = True
        if lost and self._lost_at is None:
            self._lost_at = time.monotonic()
        return lost

    def check_replaced(self) -> None:
        """Raise ServerReplaced where another server counts: a node without power does not say that it is gone."""
        if self.moved():
            raise ServerReplaced(f"{self.control.base_url} has been replaced by another server")

    def delivered(self) -> None:
        """The server has this run's weights."""
        self._lost_at = None

    # ---- attaching

    def attach(self) -> bool:
        """Find the server that counts, wait until it answers, and probe it; False where the run is leaving.

        One that does not answer, or refuses the token, is waited over until another counts. Raises ServerGone after
        `server_patience` without one, ServerNotUsable; outside a run ServerError.
        """
        if self._run is None:
            return self._attach_to(self._config.vllm_server_base_url, None, self._timeout_s)
        begun, seen, waiting = self._lost_at or time.monotonic(), self.incarnation, False
        while True:
            last = "the run folder names none"
            url, incarnation = self._where()
            if incarnation != seen:  # one that has only just come may take its time
                begun, seen = time.monotonic(), incarnation
            if url is not None:
                try:
                    return self._attach_to(url, incarnation, 0.0)
                except ServerError as error:
                    last = str(error)
            if not waiting:
                waiting = True
                self._reporter.phase("waiting for the server")
                logger.warning("waiting for the server: %s", last)
            if self.leaving():
                return False
            if time.monotonic() - begun > self._patience_s:
                raise self._gone(last)
            time.sleep(LOOK_S)

    def _where(self) -> tuple[str | None, str | None]:
        assert self._run is not None
        endpoint = self._look(now=True)
        if endpoint is not None:
            return str(endpoint["url"]), endpoint.get("incarnation")
        if self.incarnation is not None or self._run.endpoint_file().exists() or self._run.assignment():
            return None, None
        return self._config.vllm_server_base_url, None  # a script's run folder tells of no server

    def _attach_to(self, url: str, incarnation: str | None, wait_s: float) -> bool:
        control = ServerControl(url, self._config.vllm_server_token_file, self._timeout_s)
        try:
            if wait_s:
                control.wait_healthy(wait_s)
            else:
                control.call("GET", "/health", timeout_s=min(ANSWER_S, self._timeout_s))
            capabilities = probe(control)
            problems = self._problems(capabilities)
            if self._attached:
                problems += differences(self.capabilities, capabilities)
            if problems:
                raise ServerNotUsable(
                    "the server cannot be used as it runs:\n" + "\n".join(f"- {problem}" for problem in problems)
                )
        except BaseException:
            control.close()
            raise
        if self._attached:
            self.control.close()
            where = {"url": url, "incarnation": incarnation}
            self._reporter.event("attached to another server", self._step(), **where)
            self._reporter.phase("delivering weights")
        self.control, self.capabilities, self.incarnation, self._attached = control, capabilities, incarnation, True
        return True

    def transport(self) -> tuple[WeightTransport, torch.dtype | None]:
        """A new one to the server attached to, and the dtype that its weights travel in."""
        config = self._config
        transport = make_transport(
            self.control,
            self.capabilities.transfer_backend,  # type: ignore[arg-type]
            config.device,
            self._run_id,
            config.attempt,
            self._timeout_s,
            bind_host=learner_host(),
            watch=self.check_replaced,
        )
        return transport, wire_dtype(self.capabilities.dtype)

    def _gone(self, last: str) -> ServerGone:
        return ServerGone(
            f"no server of this run for {self._patience_s:g} s (as long as trainer.vllm_server_timeout and the supervisor's "
            f"deadlines ask for): {last}; see the server's log, then resume"
        )

    def close(self) -> None:
        if self._attached:
            self.control.close()


def differences(before: Capabilities, now: Capabilities) -> list[str]:
    """What a run that was set up for one server relies on, and misses on the next."""
    problems = []
    if now.model != before.model:
        problems.append(f"it serves {now.model}, the one before it {before.model}: start it with the same model")
    for name, flag in (
        ("has_generate_route", "--enable-scale-out, or vLLM as the one before it"),
        ("sampling_mask", "--return-sampling-mask"),
    ):
        if getattr(now, name) != getattr(before, name):
            problems.append(f"{name} is {getattr(now, name)}, of the one before it {getattr(before, name)}: see {flag}")
    if (now.max_model_len or 0) < (before.max_model_len or 0):
        problems.append(
            f"its sequence length is {now.max_model_len}, of the one before it {before.max_model_len}: start it with "
            f"--max-model-len {before.max_model_len}"
        )
    return problems


def learner_host() -> str:
    """The address of this host that the server's nodes can reach, as the cluster layer says it."""
    return os.environ.get(HOST_ENV, LOOPBACK)
