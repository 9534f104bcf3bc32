"""Generation requests of a run whose server may be replaced while it goes on.

Who says which server counts is the run folder; when a new one may be asked, the label of its weights.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from slipstream.rollout.client import GenerationError, SamplingSettings, ServerUnavailable, VLLMClient
from slipstream.rollout.setup import LoopSetup
from slipstream.run_folder import RunFolder
from slipstream.serving.labels import parse_label, torn_label

logger = logging.getLogger(__name__)

POLL_S = 1.0
ANSWER_S = 10.0
RETRY_DELAYS_S = (0.1, 0.5, 1.0, 2.0, 4.0)  # then it is asked whether the server is there at all
MOST_ROUNDS = 3  # of retries of one request that a server answers with 5xx, though it says that it is healthy
NOT_OURS = (401, 403)  # somebody else's server has got the address


class FollowingClient(VLLMClient):
    """Waits where the server cannot be reached, and asks again: the same one, or the next one of the run.

    A request fails as in `VLLMClient` where no server came within `patience_s` seconds, and where the server says that it
    is healthy but answers it with 5xx all the same.

    Args:
        run, setup: whose server.
    """

    def __init__(self, *args: Any, run: RunFolder, setup: LoopSetup, patience_s: float, **kwargs: Any) -> None:
        super().__init__(*args, retry_delays_s=RETRY_DELAYS_S, **kwargs)
        self._patience_s = patience_s
        self._run, self._run_id, self._attempt = run, setup.run_id, setup.attempt
        self._incarnation = setup.server_incarnation
        self._known = setup.server_incarnation is not None
        self._ready = asyncio.Event()
        self._ready.set()
        self._moved = asyncio.Event()  # one for each server; set once it is not the one any more
        self._wake = asyncio.Event()
        self._since: float | None = None  # when the server was lost
        self._why = ""
        self._fresh = False  # the server has answered nothing yet
        self._given_up: ServerUnavailable | None = None

    async def _post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        rounds, server = 0, self._moved
        while True:
            await self._ready.wait()
            if self._given_up is not None:
                raise self._given_up
            if server is not self._moved:
                rounds, server = 0, self._moved
            request = asyncio.ensure_future(super()._post(route, body))
            leaving = asyncio.ensure_future(server.wait())
            try:
                await asyncio.wait({request, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not request.done():
                    continue  # a node without power does not even close the connection
                answer = request.result()
                if not _aborted(answer):
                    return answer
                self._lose(server, "the server aborted a request")
            except ServerUnavailable as error:
                rounds += error.answered
                if rounds >= MOST_ROUNDS:
                    raise
                self._lose(server, str(error))
            except GenerationError as error:
                if error.status not in NOT_OURS:
                    raise
                self._lose(server, str(error))
            finally:
                request.cancel()
                leaving.cancel()
                await asyncio.gather(request, leaving, return_exceptions=True)

    def _lose(self, server: asyncio.Event, why: str) -> None:
        if server is self._moved and self._ready.is_set() and self._given_up is None:
            logger.warning("waiting for the server: %s", why)
            self._ready.clear()
            self._since, self._why = time.monotonic(), why
            self._wake.set()

    async def follow(self) -> None:
        while self._given_up is None:
            await self._look()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POLL_S)
            self._wake.clear()

    async def _look(self) -> None:
        endpoint = await asyncio.to_thread(self._run.endpoint, self._attempt)  # storage may take its time
        if endpoint is not None:
            self._note(str(endpoint["url"]).rstrip("/"), endpoint.get("incarnation"))
        if self._ready.is_set():
            return
        problem = "it is not the run's server any more" if endpoint is None and self._known else await self._problem()
        if not problem:
            logger.warning("generating again, at %s", self._base_url)
            self._since, self._fresh = None, False
            self._ready.set()
        elif self._since is not None and time.monotonic() - self._since > self._patience_s:
            self._give_up(
                f"no server of the run for {self._patience_s:g} s (as long as trainer.vllm_server_timeout and the "
                f"supervisor's deadlines ask for): {problem}; {self._why}"
            )

    def _note(self, url: str, incarnation: str | None) -> None:
        if not self._known and url == self._base_url:
            self._incarnation, self._known = incarnation, True
        if (url, incarnation) == (self._base_url, self._incarnation):
            return
        logger.warning("the run has another server, %s: waiting for its weights", url)
        self._base_url, self._incarnation, self._known = url, incarnation, True
        self._since, self._why, self._fresh = time.monotonic(), f"{url} has come", True
        self._ready.clear()
        self._moved.set()
        self._moved = asyncio.Event()

    async def _problem(self) -> str:
        """Why the server cannot be asked yet; '' where it can."""
        status, _ = await self._ask("/health")
        if status != 200:
            return (
                f"{self._base_url} does not answer" if status is None else f"{self._base_url}/health answers {status}"
            )
        status, text = await self._ask("/weight_info")
        if status == 404 and not self._fresh:
            return ""
        try:
            label = str(json.loads(text)["weight_version"]) if status == 200 else None
        except (ValueError, KeyError, TypeError):
            label = None
        if label is None:
            return f"{self._base_url} does not say which weights it has"
        if parse_label(label, self._run_id, self._attempt) is not None:
            return ""
        if not self._fresh and label != torn_label(self._run_id, self._attempt):
            self._give_up(
                f"{self._base_url} has lost the weights of attempt {self._attempt} of {self._run_id}, it labels its own "
                f"{label!r}: another run delivers to it, or somebody restarted it. Give each run a server of its own, then "
                "resume"
            )
        self._since = time.monotonic()  # it is there; the trainer delivers once its step is done
        return f"the weights of {self._base_url} are not this run's yet, but {label!r}"

    async def _ask(self, route: str) -> tuple[int | None, str]:
        assert self._session is not None, "open() first"
        try:
            async with asyncio.timeout(ANSWER_S), self._session.get(self._base_url + route) as response:
                return response.status, await response.text()
        except (OSError, aiohttp.ClientError, UnicodeDecodeError):
            return None, ""

    def _give_up(self, why: str) -> None:
        self._given_up = ServerUnavailable(why)
        self._ready.set()


def _aborted(answer: dict[str, Any]) -> bool:
    """A server that is stopped, or whose trainer has come anew, ends its requests half done."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    return isinstance(choices, list) and any(isinstance(c, dict) and c.get("finish_reason") == "abort" for c in choices)


def make_client(
    config: Any, setup: LoopSetup, model: str, sampling: SamplingSettings, on_retry: Callable[[], None]
) -> VLLMClient:
    """The client of a run, which follows its server; a script without a run folder has the one server of its config."""
    run_dir = getattr(config, "run_dir", None)
    arguments: dict[str, Any] = {
        "token_file": config.vllm_server_token_file,
        "timeout_s": config.vllm_server_timeout,
        "use_generate_route": setup.use_generate_route,
        "returns_candidates": setup.returns_candidates,
        "on_retry": on_retry,
    }
    if not run_dir:
        return VLLMClient(config.vllm_server_base_url, model, sampling, **arguments)
    arguments |= {"run": RunFolder(Path(run_dir)), "setup": setup}
    patience_s = getattr(config, "server_patience", None) or config.vllm_server_timeout
    return FollowingClient(config.vllm_server_base_url, model, sampling, patience_s=patience_s, **arguments)
