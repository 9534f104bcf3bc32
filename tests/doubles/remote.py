"""The doubles' side of the line to the server: which one counts, and calls to it."""

import http.client
import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from slipstream.run_folder import RunFolder, read_json

CALL_S = 3.0
POLL_S = 0.05


class ServerGone(Exception):
    """The server does not answer, or not with what it should."""


class Refused(RuntimeError):
    """The server refuses: a later attempt delivers to it."""


def usable_endpoint(run: RunFolder, attempt: int) -> dict[str, Any] | None:
    """The endpoint that a learner of `attempt` may use now, or None."""
    try:
        value = read_json(run.endpoint_file())
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    assignment = run.assignment()
    if not assignment:
        return value if value.get("attempt") == attempt else None
    named = assignment.get("server") or assignment.get("allocation")
    return value if value.get("incarnation") == named else None


def wait_for_endpoint(run: RunFolder, attempt: int, timeout_s: float, meanwhile: Callable[[], None]) -> dict[str, Any]:
    """The endpoint to use, once there is one. `meanwhile` is called again and again; it may raise.

    No limit where a supervisor leads.
    """
    supervised = bool(run.assignment())
    end = time.monotonic() + timeout_s
    while supervised or time.monotonic() < end or run.assignment():
        if endpoint := usable_endpoint(run, attempt):
            return endpoint
        meanwhile()
        time.sleep(POLL_S)
    raise TimeoutError(f"no server of attempt {attempt} within {timeout_s:g} s")


class Server:
    """One server, at one address."""

    def __init__(self, run: RunFolder, endpoint: dict[str, Any], timeout_s: float = CALL_S) -> None:
        self.incarnation = endpoint["incarnation"]
        self._address = urlsplit(endpoint["url"]).netloc
        self._headers = {"Authorization": f"Bearer {run.token_file.read_text().strip()}"}
        self._timeout_s = timeout_s

    def call(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises ServerGone, Refused."""
        connection = http.client.HTTPConnection(self._address, timeout=self._timeout_s)
        try:
            connection.request("POST", route, json.dumps(body), self._headers)
            answer = connection.getresponse()
            value: dict[str, Any] = json.loads(answer.read() or b"{}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerGone(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if answer.status == 409:
            raise Refused(str(value.get("error")))
        if answer.status != 200:
            raise ServerGone(f"{route}: {answer.status} {value}")
        return value
