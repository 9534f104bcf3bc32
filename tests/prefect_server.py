"""A real Prefect server for tests, on a port that it keeps, so that it can be killed and started again."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from slipstream.process import last_lines, spawn, stop
from tests.prefect_database import seed

ROOT = Path(__file__).resolve().parents[1]
STANDINS = ROOT / "tests" / "standins"
BUSY = 503
PASSWORD = "tester:not-a-real-secret"
PATIENCE_S = 180


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return clean | {
        "PYTHONPATH": f"{STANDINS}:{ROOT}",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        **more,
    }


class PrefectServer:
    """A `prefect server start` that asks for a password, on a port that it keeps."""

    def __init__(self, home: Path, ui: bool = False, **settings: str) -> None:
        self.home = home
        self._ui = ui
        self._settings = settings
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}/api"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "PrefectServer":
        seed(self.home)
        argv = [sys.executable, "-m", "prefect", "server", "start", *([] if self._ui else ["--no-ui"])]
        argv += ["--host", "127.0.0.1", "--port", str(self._port)]
        settings = {
            "PREFECT_HOME": str(self.home),
            "PREFECT_SERVER_API_AUTH_STRING": PASSWORD,
            "PREFECT_API_AUTH_STRING": PASSWORD,
            "PREFECT_UI_API_URL": self.url,  # else the UI asks the default port
            "PREFECT_UI_URL": self.url.removesuffix("/api"),
            **self._settings,
        }
        self._process = spawn(argv, self.home / "server.log", environment(**settings))
        end = time.monotonic() + PATIENCE_S
        while not self._answers():
            assert self._process.poll() is None, last_lines(self.home / "server.log")
            assert time.monotonic() < end, "the Prefect server did not start"
            time.sleep(0.2)
        return self

    def _answers(self) -> bool:
        try:
            return _client.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def kill(self) -> None:
        if self._process is not None:
            stop(self._process, 0)


# One for all requests: a new one reads the system's certificates, 25 ms of a core, and tests ask many times a second.
# No connection is kept: tests kill servers.
_limits = httpx.Limits(max_keepalive_connections=0)
_client = httpx.Client(trust_env=False, follow_redirects=True, timeout=60, limits=_limits)


def request(method: str, url: str, body: Any = None, auth: tuple[str, str] | None = None) -> Any:
    """What a Prefect server answers, decoded; asked again while it is busy (SQLite is locked), and what only reads also
    where no answer came in time: a test machine may be slow."""
    reads = method == "GET" or url.endswith(("/filter", "/count"))
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            answer = _client.request(method, url, json=body, auth=auth)
            if answer.status_code != BUSY or time.monotonic() > end:
                break
        except httpx.TimeoutException:
            if not reads or time.monotonic() > end:
                raise
        time.sleep(0.5)
    answer.raise_for_status()
    return answer.json() if answer.content else None


def password() -> tuple[str, str]:
    """User and password of a `PrefectServer`."""
    user, _, secret = PASSWORD.partition(":")
    return user, secret


def ask(url: str, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    return list(request("POST", f"{url}/{route}", body, password()))
