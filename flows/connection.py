"""Which Prefect server a command talks to.

Call `connect` before anything imports prefect: its settings are read once.
"""

import contextlib
import ipaddress
import os
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from flows.prefect_api import QUIET, PrefectUnavailable, check_reachable, configured_api, split_password
from flows.prefect_rest import FORBIDDEN, PrefectAway, PrefectRest
from flows.up.state import Up, auth_file, auth_string, prefect_home, running

PROBE_TIMEOUT_S = 30.0
UNAUTHORIZED = 401
OTHERWISE = "then that of `slipstream up` is used"


class PrefectRefused(PrefectUnavailable):
    """Something answers, and waiting does not help: a wrong password, or no Prefect API."""


@dataclass(frozen=True)
class Connection:
    """A Prefect server that answers.

    Attributes:
        url: of its API.
        source: where the address is from, in words.
        local: whether it is that of `slipstream up`.
    """

    url: str
    source: str
    local: bool = False


def connect(prefer_local: bool = True) -> Connection:
    """Find the Prefect server and set the environment so that prefect uses it.

    In this order: PREFECT_API_URL in the environment; the server of `slipstream up`; Prefect's active profile.

    Args:
        prefer_local: False: the profile comes before the server of `slipstream up`.

    Raises PrefectUnavailable with the way out, UpError.
    """
    os.environ |= QUIET
    up = running()
    given = os.environ.get("PREFECT_API_URL")
    profile = None if given else configured_api()
    if given:
        given, auth = split_password(given)
        if auth:
            os.environ |= {"PREFECT_API_URL": given, "PREFECT_API_AUTH_STRING": auth}
        check_reachable(given, OTHERWISE)
        if up is not None and given == up.url and not os.environ.get("PREFECT_API_AUTH_STRING"):
            os.environ["PREFECT_API_AUTH_STRING"] = auth_string()
        local = up is not None and given == up.url
        return _checked(Connection(given, "PREFECT_API_URL in the environment", local))
    if up is not None and (prefer_local or profile is None):
        return _local(up)
    if profile is not None:
        check_reachable(profile, OTHERWISE)
        return _checked(Connection(split_password(profile)[0], "Prefect's active profile"))
    raise PrefectUnavailable(
        "there is no Prefect server: start one with `slipstream up`, or set PREFECT_API_URL to one that runs"
    )


def _local(up: Up) -> Connection:
    if up.host != socket.gethostname():
        raise PrefectUnavailable(
            f"`slipstream up` runs on {up.host}, and listens only there: run this command on {up.host}, or set "
            "PREFECT_API_URL to another server"
        )
    try:
        httpx.get(f"{up.url}/health", timeout=PROBE_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError as error:
        raise PrefectUnavailable(
            f"the server of `slipstream up` at {up.url} does not answer ({str(error) or type(error).__name__}): it may be "
            "starting; else `slipstream down`, then `slipstream up`"
        ) from None
    os.environ |= {
        "PREFECT_API_URL": up.url,
        "PREFECT_API_AUTH_STRING": auth_string(),
        "PREFECT_HOME": str(prefect_home()),
    }
    return _checked(Connection(up.url, "slipstream up", True))


def _checked(found: Connection) -> Connection:
    """Raises PrefectRefused where what answers lets us not in, or is no Prefect. Ways in that only prefect's own client
    knows are left to it."""
    where = f"{found.url} ({found.source})"
    with contextlib.closing(PrefectRest.here(found.url, PROBE_TIMEOUT_S)) as rest:
        try:
            count = rest.call("POST", "flows/count", {})
        except PrefectAway as error:
            if error.status == FORBIDDEN or error.status >= 500:  # the latter is busy: prefect's own client is patient
                return found
            if error.status == UNAUTHORIZED:
                way_out = (
                    "PREFECT_API_AUTH_STRING is to be the USER:PASSWORD of that server, or PREFECT_API_KEY a key of its"
                )
                if found.local and not os.environ.get("PREFECT_API_KEY"):
                    way_out += f"; where {auth_file()} was changed since: `slipstream down`, then `slipstream up`"
                raise PrefectRefused(f"{where} lets us not in (401 Unauthorized): {way_out}") from None
            if error.status == 0:
                raise PrefectUnavailable(str(error)) from None
            count = str(error.status)
    if not isinstance(count, int):
        raise PrefectRefused(
            f"{where} is no Prefect API (asked for a number, it answers {str(count)[:60]!r}): PREFECT_API_URL is to be like "
            "http://127.0.0.1:4200/api, with /api at its end"
        )
    return found


def is_loopback(url: str) -> bool:
    """Whether only this host reaches the server."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def asks_nobody(url: str) -> bool:
    """Whether the API at `url` answers without a password or key. Raises PrefectUnavailable."""
    try:
        base = url.rstrip("/")
        answer = httpx.post(f"{base}/flows/count", json={}, timeout=PROBE_TIMEOUT_S, follow_redirects=True)
        if answer.status_code == FORBIDDEN:
            answer = httpx.get(f"{base}/admin/version", timeout=PROBE_TIMEOUT_S, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PrefectUnavailable(f"{url} does not answer ({str(error) or type(error).__name__})") from None
    return answer.is_success
