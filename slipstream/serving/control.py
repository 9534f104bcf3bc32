"""Synchronous client for the routes that steer a server. Every call is bounded in time.

A call that may be made twice without harm is repeated where its answer was lost or the server stumbled; the bound holds
for all its tries together. Calls that may not are made once: `slipstream.serving.transport` repeats a delivery as a whole.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from slipstream.serving.auth import read_token

logger = logging.getLogger(__name__)

HEALTH_POLL_S = 0.2
CONNECT_S = 10.0  # a node without power answers nothing, not even with a refusal
REPEAT_DELAYS_S = (0.1, 0.3, 1.0, 2.0)
TRIES_IN_BOUND = 3  # so many that get no answer at all


class ServerError(RuntimeError):
    """A call to the server failed.

    Attributes:
        route: path that was called.
        status: HTTP status, or None where there was no answer.
        message: what the server said, or what went wrong on the way.
        timed_out: whether the whole bound passed without an answer.
    """

    def __init__(self, route: str, status: int | None, message: str, timed_out: bool = False) -> None:
        self.route = route
        self.status = status
        self.message = message
        self.timed_out = timed_out
        super().__init__(f"{route}: {'no answer' if status is None else f'HTTP {status}'}: {message}")

    @property
    def permanent(self) -> bool:
        """Whether trying again cannot help: the server understood and refused."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in (408, 425, 429)


class ServerControl:
    """Steers one server.

    Args:
        base_url: like http://127.0.0.1:8000.
        token_file: file that holds the bearer token, or None for a server that asks for none.
        timeout_s: bound of each call, in seconds.

    Raises TokenError where the token file is missing or empty; each method raises ServerError.
    """

    def __init__(self, base_url: str, token_file: str | Path | None, timeout_s: float) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self._token_file = token_file
        self._token = read_token(token_file) if token_file is not None else None
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        # a connection each: after an error of a route vLLM closes the one it came over, under the next request.
        # trust_env off: a proxy of the environment must not stand between the nodes of a cluster
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(base_url=self.base_url, headers=headers, limits=limits, trust_env=False)

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> "ServerControl":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def with_timeout(self, timeout_s: float) -> "ServerControl":
        """Another client of the same server with another bound."""
        return ServerControl(self.base_url, self._token_file, timeout_s)

    def call(
        self, method: str, route: str, *, timeout_s: float | None = None, repeat: bool = False, **kwargs: Any
    ) -> httpx.Response:
        """One request; raises ServerError on anything but a 2xx answer. `repeat`: it may be made again, as it does no
        harm a second time; all tries together stay within the bound."""
        bound = self.timeout_s if timeout_s is None else timeout_s
        if not repeat:
            return self._once(method, route, bound, bound, kwargs)
        end = time.monotonic() + bound
        for delay in (*REPEAT_DELAYS_S, None):
            left = max(end - time.monotonic(), 0.01)
            try:
                return self._once(method, route, min(bound / TRIES_IN_BOUND, left), bound, kwargs)
            except ServerError as error:
                if error.permanent or delay is None or time.monotonic() + delay >= end:
                    raise
                logger.warning("repeating in %g s: %s", delay, error)
            time.sleep(delay)
        raise AssertionError("the last try returns or raises")

    def _once(self, method: str, route: str, timeout_s: float, bound: float, kwargs: dict[str, Any]) -> httpx.Response:
        try:
            wait = httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S))
            response = self._client.request(method, route, timeout=wait, **kwargs)
        except httpx.ConnectTimeout:
            raise ServerError(
                route, None, f"no connection to {self.base_url} within {min(timeout_s, CONNECT_S):g} s", True
            ) from None
        except httpx.TimeoutException:
            raise ServerError(route, None, f"no answer from {self.base_url} within {bound:g} s", True) from None
        except httpx.HTTPError as error:
            raise ServerError(route, None, self._clean(f"{self.base_url}: {error or type(error).__name__}")) from None
        if not response.is_success:
            raise ServerError(route, response.status_code, self._clean(_message(response)))
        if "json" in response.headers.get("content-type", ""):
            self._json(route, response)  # an answer cut short on its way counts as lost
        return response

    def _clean(self, text: str) -> str:
        return text.replace(self._token, "<token>") if self._token else text

    def _get(self, route: str, **kwargs: Any) -> dict[str, Any]:
        return self._json(route, self.call("GET", route, repeat=True, **kwargs))

    def _post(self, route: str, *, repeat: bool = False, **kwargs: Any) -> dict[str, Any]:
        return self._json(route, self.call("POST", route, repeat=repeat, **kwargs))

    def _json(self, route: str, response: httpx.Response) -> dict[str, Any]:
        try:
            value = response.json()
        except ValueError:
            raise ServerError(route, response.status_code, "the answer is not JSON") from None
        return value if isinstance(value, dict) else {"value": value}

    def wait_healthy(self, deadline_s: float, alive: Callable[[], bool] | None = None) -> None:
        """Return once the server answers /health. Raises ServerError after `deadline_s` seconds, at once when `alive`
        says that its process ended, or when it refuses the token."""
        end = time.monotonic() + deadline_s
        while True:
            try:
                self.call("GET", "/health", timeout_s=min(5.0, self.timeout_s))
                return
            except ServerError as error:
                if error.status in (401, 403):
                    raise
                last = error
            if alive is not None and not alive():
                raise ServerError("/health", None, "the server's process ended before it was healthy")
            if time.monotonic() > end:
                raise ServerError("/health", last.status, f"not healthy within {deadline_s:g} s: {last.message}")
            time.sleep(HEALTH_POLL_S)

    # --- what it is

    def server_info(self) -> dict[str, Any]:
        return self._get("/server_info", params={"config_format": "json"})

    def models(self) -> list[dict[str, Any]]:
        return list(self._get("/v1/models").get("data", []))

    def version(self) -> str:
        return str(self._get("/version").get("version", ""))

    def metrics(self, repeat: bool = False) -> str:
        """The text of /metrics (Prometheus exposition format)."""
        return self.call("GET", "/metrics", repeat=repeat).text

    def world_size(self) -> int:
        """Workers that take part in a weight transfer: tensor x pipeline x data parallel."""
        return int(self._get("/get_world_size")["world_size"])

    # --- generation

    def pause(self, mode: str = "keep") -> None:
        """Stop decoding; `keep` freezes requests in flight, and the engine drops its caches and recomputes them."""
        self._post("/pause", repeat=True, params={"mode": mode})

    def resume(self) -> None:
        self._post("/resume", repeat=True)

    def is_paused(self) -> bool:
        return bool(self._get("/is_paused")["is_paused"])

    def abort_requests(self) -> None:
        """End every request in flight."""
        self._post("/abort_requests", repeat=True, json={})

    def reset_prefix_cache(self) -> bool:
        """Whether it was reset: not while requests hold blocks."""
        return bool(self._post("/reset_prefix_cache").get("success"))

    # --- weights

    def init_weight_transfer(self, info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", json={"init_info": info})

    def shutdown_weight_transfer(self) -> None:
        self._post("/shutdown_weight_transfer_engine")

    def start_weight_update(self) -> None:
        self._post("/start_weight_update")

    def update_weights(self, info: dict[str, Any]) -> None:
        self._post("/update_weights", json={"update_info": info})

    def finish_weight_update(self, label: str | None = None) -> None:
        """Finish, and label what is generated from now on (None: leave the label)."""
        self._post("/finish_weight_update", json={"weight_version": label})

    def set_weight_version(self, label: str) -> None:
        """Change the label only."""
        self._post("/update_weight_version", repeat=True, json={"new_version": label})

    def weight_version(self) -> str:
        return str(self._get("/weight_info")["weight_version"])


def _message(response: httpx.Response) -> str:
    """The server's own words, from the shapes that its error answers have."""
    try:
        value = response.json()
    except ValueError:
        return response.text[:500] or response.reason_phrase
    if isinstance(value, dict):
        error = value.get("error", value.get("detail", value))
        if isinstance(error, dict):
            error = error.get("message", error)
        return str(error)[:2000]
    return str(value)[:2000]
