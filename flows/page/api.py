"""The few calls to Prefect's API that a run's page needs, each bounded in time, made again only where the server is busy.

Prefect's own client is used, so that every way to reach a server that it knows (password, key, certificates, headers)
works. Import this module only where prefect is imported anyway.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.prefect_rest import BUSY, PAUSES_S

CALL_S = 5.0


class PageApi:
    """Artifacts of one flow run, and events. Every method raises what httpx and prefect raise."""

    def __init__(self, client: SyncPrefectClient) -> None:
        self._client = client

    def _call(self, method: Any, route: str, body: Any) -> Any:
        for pause_s in PAUSES_S:
            try:
                return self._client.request(method, route, json=body)  # type: ignore[arg-type]
            except PrefectHTTPStatusError as error:
                if error.response.status_code != BUSY:
                    raise
            time.sleep(pause_s)
        return self._client.request(method, route, json=body)  # type: ignore[arg-type]

    def artifacts(self, flow_run_id: str, keys: Sequence[str]) -> dict[str, str]:
        """Ids of the flow run's artifacts by key; of several of one key the oldest."""
        body = {
            "artifacts": {"key": {"any_": list(keys)}},
            "flow_runs": {"id": {"any_": [flow_run_id]}},
        }
        found = self._call("POST", "/artifacts/filter", body).json()
        return {one["key"]: str(one["id"]) for one in sorted(found, key=lambda one: str(one["created"]), reverse=True)}

    def create(self, flow_run_id: str, key: str, kind: str, data: Any, description: str) -> str:
        """Make an artifact; its id."""
        body = {"key": key, "type": kind, "data": data, "description": description, "flow_run_id": flow_run_id}
        return str(self._call("POST", "/artifacts/", body).json()["id"])

    def update(self, artifact_id: str, data: Any, description: str) -> bool:
        """Change an artifact in place; False where the server does not have it."""
        try:
            self._call("PATCH", f"/artifacts/{artifact_id}", {"data": data, "description": description})
        except PrefectHTTPStatusError as error:
            if error.response.status_code == 404:
                return False
            raise
        return True

    def emit(self, events: Sequence[dict[str, Any]]) -> None:
        self._call("POST", "/events", list(events))


@contextlib.contextmanager
def page_api() -> Iterator[PageApi]:
    """The API that Prefect's settings name. For one thread: it changes settings of that thread's context only."""
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(httpx_settings={"timeout": CALL_S}, sync_client=True) as client,
    ):
        yield PageApi(client)
