"""The few questions that are asked of a Prefect server without importing prefect, which takes seconds."""

import base64
import contextlib
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import httpx

from flows.prefect_api import configured_credentials, configured_headers, split_password

TIMEOUT_S = 20.0
PAGE = 200
FORBIDDEN = 403
BUSY = 503  # its database was locked: nothing was done, and the call may be made again
PAUSES_S = (0.2, 0.5, 1.5)  # before it is
TOKEN, CLIENT = "Prefect-Csrf-Token", "Prefect-Csrf-Client"
CANCELS = ("CANCELLING", "CANCELLED")
WORKS = ("RUNNING", "PENDING")
STARTED = (*WORKS, "CRASHED")


class PrefectAway(Exception):
    """The Prefect server does not answer, or refuses; nothing is known. `status`: of its answer; 0 where there is none."""

    status = 0


@dataclass(frozen=True)
class FlowRun:
    """A flow run as its Prefect server has it.

    Attributes:
        state: type of its state ("RUNNING"). name: of the state. at: when it was set, seconds since the epoch.
        deployment: id, or "" where no worker could start it again.
        run_count: how often it has been started.
        scheduled: made by a schedule.
        cancelled: when a person cancelled it, if nobody has started it again since, whatever state was forced on it; else 0.
        called: its own name. tags: its own.
    """

    id: str
    state: str
    name: str = ""
    at: float = 0.0
    deployment: str = ""
    run_count: int = 0
    scheduled: bool = False
    cancelled: float = 0.0
    called: str = ""
    tags: tuple[str, ...] = ()


class PrefectRest:
    """A Prefect API. All calls are bounded in time, made again where the server is busy, and raise PrefectAway.

    Args:
        url: of the API, with its "/api".
        auth: basic-auth string "user:password"; "": none. key: API key; "": none.

    The headers that the user has set up for Prefect's own client are sent too.
    """

    def __init__(self, url: str, auth: str = "", key: str = "", timeout_s: float = TIMEOUT_S) -> None:
        url, given = split_password(url)  # the address is told in messages
        auth = auth or given
        self.url = url.rstrip("/")
        headers = httpx.Headers(configured_headers())
        if key:
            headers["Authorization"] = f"Bearer {key}"
        if auth:
            headers["Authorization"] = f"Basic {base64.b64encode(auth.encode()).decode()}"
        try:
            proxied = httpx.URL(url).host not in ("127.0.0.1", "localhost", "::1")
        except httpx.InvalidURL:  # which the first call tells
            proxied = False
        self._client = httpx.Client(headers=headers, timeout=timeout_s, trust_env=proxied, follow_redirects=True)

    @classmethod
    def here(cls, url: str, timeout_s: float = TIMEOUT_S) -> "PrefectRest":
        """With the credentials that the user has set up."""
        auth, key = configured_credentials()
        return cls(url, auth, key, timeout_s)

    def close(self) -> None:
        self._client.close()

    def call(self, method: str, route: str, body: Any = None) -> Any:
        """What the server answers to one call; asked again a few times where it is busy."""
        try:
            for pause_s in (*PAUSES_S, None):
                answer = self._client.request(method, f"{self.url}/{route}", json=body)
                if answer.status_code == FORBIDDEN and "CSRF" in answer.text:
                    self._take_token()
                    answer = self._client.request(method, f"{self.url}/{route}", json=body)
                if answer.status_code != BUSY or pause_s is None:
                    break
                time.sleep(pause_s)
            answer.raise_for_status()
            return answer.json() if answer.content else None
        except httpx.HTTPStatusError as error:
            said = f"{error.response.status_code} {error.response.reason_phrase}"
            away = PrefectAway(f"the Prefect server at {self.url} answers {said} to {method} {route}")
            away.status = error.response.status_code
            raise away from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            why = str(error) or type(error).__name__
            raise PrefectAway(f"the Prefect server at {self.url} does not answer ({why})") from None

    def _take_token(self) -> None:
        """Some servers want, with every change, a token that they give to whoever is let in, for some time."""
        client = self._client.headers.setdefault(CLIENT, str(uuid.uuid4()))
        answer = self._client.get(f"{self.url}/csrf-token", params={"client": client})
        if answer.is_success:
            with self._understood():
                self._client.headers[TOKEN] = answer.json()["token"]

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        """What answers something else than Prefect would is no Prefect that anything is known of."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            said = f"{type(error).__name__}: {error}"[:200]
            raise PrefectAway(
                f"what answers at {self.url} does not answer as Prefect 3 does ({said}): PREFECT_API_URL is to be the "
                "address of its API, with /api at its end"
            ) from None

    def flow_runs(self, ids: Iterable[str]) -> dict[str, FlowRun]:
        """Those of `ids` that the server knows."""
        wanted, found = sorted(set(ids)), {}
        for start in range(0, len(wanted), PAGE):
            some = {"flow_runs": {"id": {"any_": wanted[start : start + PAGE]}}, "limit": PAGE}
            with self._understood():
                for value in self.call("POST", "flow_runs/filter", some):
                    found[str(value["id"])] = self._flow_run(value)
        return found

    def starting(self, tag: str, flows: Sequence[str], states: Sequence[str] = STARTED) -> list[FlowRun]:
        """Flow runs of the flows, with the tag, that were started and have not ended well: they may lack their folder."""
        body = {
            "flow_runs": {"tags": {"all_": [tag]}, "state": {"type": {"any_": list(states)}}},
            "flows": {"name": {"any_": list(flows)}},
            "sort": "START_TIME_DESC",
            "limit": PAGE,
        }
        with self._understood():
            return [self._flow_run(value) for value in self.call("POST", "flow_runs/filter", body)]

    def remove_ended(self, deployment: str, name: str, keep: int, most: int) -> int:
        """Delete flow runs of a deployment that have ended well in a state of that name, at most `most`, the newest first.

        Args:
            keep: so many of the newest stay.
        """
        body = {
            "flow_runs": {
                "deployment_id": {"any_": [deployment]},
                "state": {"type": {"any_": ["COMPLETED"]}, "name": {"any_": [name]}},
            },
            "sort": "START_TIME_DESC",
            "offset": keep,
            "limit": most,
        }
        with self._understood():
            found = self.call("POST", "flow_runs/filter", body)
            for value in found:
                self.call("DELETE", f"flow_runs/{value['id']}")
            return len(found)

    def _flow_run(self, value: dict[str, Any]) -> FlowRun:
        state = value.get("state") or {}
        kind, own = str(state.get("type") or ""), str(value["id"])
        return FlowRun(
            own,
            kind,
            str(state.get("name") or ""),
            _epoch(state.get("timestamp")),
            str(value.get("deployment_id") or ""),
            int(value.get("run_count") or 0),
            bool(value.get("auto_scheduled")),
            self._cancelled_at(own) if kind in (*CANCELS, "CRASHED", "FAILED") else 0.0,
            str(value.get("name") or ""),
            tuple(map(str, value.get("tags") or ())),
        )

    def _cancelled_at(self, flow_run: str) -> float:
        """When the first cancel came among the states that it has been in since it last ran."""
        found = 0.0
        for when, kind in reversed(self._states(flow_run)):
            if kind not in (*CANCELS, "CRASHED", "FAILED"):
                break
            found = when if kind in CANCELS else found
        return found

    def _states(self, flow_run: str) -> list[tuple[float, str]]:
        """(seconds since the epoch, type) of all its states, oldest first."""
        history = self.call("GET", f"flow_run_states/?flow_run_id={flow_run}")
        with self._understood():
            return sorted((_epoch(state["timestamp"]), str(state["type"])) for state in history)

    def set_state(self, flow_run: FlowRun, state: str, name: str, message: str) -> bool:
        """Put it into a state, whatever rules there are; False where it was cancelled meanwhile, which stays."""
        value: dict[str, Any] = {"type": state, "name": name, "message": message}
        if state == "SCHEDULED":
            value["state_details"] = {"scheduled_time": datetime.now(UTC).isoformat()}
        now = self.flow_runs([flow_run.id]).get(flow_run.id)
        if now is None or (now.state in CANCELS and state != "CANCELLED"):
            return False
        self.call("POST", f"flow_runs/{flow_run.id}/set_state", {"state": value, "force": True})
        before = [kind for _, kind in self._states(flow_run.id)[-2:-1]]
        if state != "CANCELLED" and before and before[0] in CANCELS:  # between the look and the call
            undone = {"type": before[0], "name": before[0].capitalize(), "message": "cancelled by a person"}
            self.call("POST", f"flow_runs/{flow_run.id}/set_state", {"state": undone, "force": True})
            return False
        return True


def _epoch(text: Any) -> float:
    return datetime.fromisoformat(str(text)).timestamp() if text else 0.0
