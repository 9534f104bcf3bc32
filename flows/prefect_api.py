"""The Prefect API of one command: the configured one, or a private one that lives as long as the command.

Prefect's own temporary server would do without this module, but it shares the terminal's process group (a Ctrl-C ends
it before the flow could report), writes into the terminal, and outlives a killed flow. This one does not, and it asks
for a random password.

Import this module, and enter `prefect_api`, before anything imports prefect: its settings are read once.
"""

import contextlib
import fcntl
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

import httpx

from slipstream.process import last_lines, spawn, stop

START_TIMEOUT_S = 180.0
REACH_TIMEOUT_S = 30.0
QUIET = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
# Nothing is scheduled and nobody looks at this server: its background services and its UI would only cost CPU.
PRIVATE = {
    "PREFECT_SERVER_UI_ENABLED": "false",
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_FOREMAN_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_ENABLED": "false",
}


_private = False  # whether this process uses a server of its own


class PrefectUnavailable(Exception):
    """The private Prefect API could not be started."""


def configured_api(environment: dict[str, str] | None = None) -> str | None:
    """The URL of the Prefect API that the user has set up, by the environment or by the active profile."""
    return _configured("PREFECT_API_URL", "url", environment) or None


def configured_credentials() -> tuple[str, str]:
    """Basic-auth string and API key that the user has set up; "" where there is none."""
    return _configured("PREFECT_API_AUTH_STRING", "auth_string"), _configured("PREFECT_API_KEY", "key")


def configured_headers() -> dict[str, str]:
    """Headers that the user has set up for all calls to Prefect, as a proxy before the server may want them.

    What is no JSON object of ASCII texts is left to prefect's own client, which refuses it.
    """
    try:
        value = json.loads(_configured("PREFECT_CLIENT_CUSTOM_HEADERS", "") or "{}")
    except ValueError:
        return {}
    texts = [*value, *value.values()] if isinstance(value, dict) else [None]
    return dict(value) if all(isinstance(text, str) and text.isascii() for text in texts) else {}


def _configured(name: str, key: str, environment: dict[str, str] | None = None) -> str:
    """A setting of Prefect's, by the environment or by the active profile."""
    env = dict(os.environ) if environment is None else environment
    if env.get(name):
        return env[name]
    home = Path(env.get("PREFECT_HOME") or Path(env.get("HOME", "~")).expanduser() / ".prefect")
    try:
        profiles = tomllib.loads((home / "profiles.toml").read_text())
    except (OSError, ValueError):
        return ""
    active = env.get("PREFECT_PROFILE") or profiles.get("active", "")
    values = profiles.get("profiles", {}).get(active, {})
    return str(values.get(name) or values.get("api", {}).get(key) or "")


def split_password(url: str) -> tuple[str, str]:
    """A URL without the USER:PASSWORD that it may hold, so that it can be shown; and that, or ""."""
    try:
        parts = urlsplit(url)
    except ValueError:  # which a call tells
        return url, ""
    user, at, host = parts.netloc.rpartition("@")
    return (urlunsplit(parts._replace(netloc=host)), unquote(user)) if at else (url, "")


def check_reachable(url: str, otherwise: str = "then this command starts a private one") -> None:
    """Raise PrefectUnavailable where nothing answers at a configured URL: it is often one that was forgotten.

    Args:
        otherwise: what happens where none is configured.
    """
    try:
        httpx.get(f"{url.rstrip('/')}/health", timeout=REACH_TIMEOUT_S)  # any answer will do, also one that wants a key
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        where = "the environment" if os.environ.get("PREFECT_API_URL") else "Prefect's active profile"
        shown, why = split_password(url)[0], str(error) or type(error).__name__
        raise PrefectUnavailable(
            f"PREFECT_API_URL = {shown!r} (from {where}) does not answer ({why}): start that server, or unset the variable "
            f"(prefect config unset PREFECT_API_URL): {otherwise}"
        ) from None


def nobody_looks() -> bool:
    """Whether flow runs of this process are on a private server, which has no UI and ends with it."""
    return _private


@contextlib.contextmanager
def prefect_api(home: Path, log_name: str) -> Iterator[str]:
    """The API's URL, with the environment set so that prefect uses it; a private server is stopped at the end.

    Args:
        home: PREFECT_HOME of a private server (made with mode 0700), unless the user has set one.
        log_name: its log is `home`/`log_name`.log, removed after a clean end.
    """
    os.environ |= QUIET
    url = configured_api()
    if url:
        check_reachable(url)
        yield url
        return
    home = Path(os.environ.get("PREFECT_HOME") or home).absolute()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    password = f"slipstream:{secrets.token_urlsafe(24)}"
    os.environ |= {
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_API_AUTH_STRING": password,
        "PREFECT_API_AUTH_STRING": password,
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
    }
    log = home / f"{log_name}.log"
    with _alone(home / "start.lock"):
        process, url = _start(log)
    os.environ["PREFECT_API_URL"] = url
    global _private
    _private = True
    try:
        yield url
    finally:
        stop(process, grace_s=10)
        log.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One start at a time: of two servers that make one database at once, one fails. Where storage has no locks, not so."""
    with open(path, "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _start(log: Path) -> tuple[subprocess.Popen[bytes], str]:
    end = time.monotonic() + START_TIMEOUT_S
    while True:
        port = _free_port()
        url = f"http://127.0.0.1:{port}/api"
        argv = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
        process = spawn(argv, log, {**os.environ, **PRIVATE})
        try:
            if _wait_healthy(process, url, end):
                return process, url
        except BaseException:
            stop(process, grace_s=2)
            raise
        if time.monotonic() > end or process.returncode != 1:  # 1: uvicorn could not bind, somebody took the port
            stop(process, grace_s=2)
            raise PrefectUnavailable(f"the Prefect API did not start\n--- last lines of {log}\n{last_lines(log)}")


def _wait_healthy(process: subprocess.Popen[bytes], url: str, end: float) -> bool:
    with httpx.Client(trust_env=False, timeout=2) as client:
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(httpx.HTTPError):
                if client.get(f"{url}/health").status_code == 200:
                    return True
            time.sleep(0.1)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
