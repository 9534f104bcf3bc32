"""A Prefect server that wants a token of its own with every change."""

from pathlib import Path

import pytest

from flows.connection import connect
from flows.prefect_rest import PrefectRest
from tests.prefect_server import PASSWORD, PrefectServer

pytestmark = pytest.mark.integration


def test_it_is_asked_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = PrefectServer(tmp_path / "prefect", PREFECT_SERVER_CSRF_PROTECTION_ENABLED="true")
    try:
        rest = PrefectRest(server.start().url, PASSWORD)
        flow = rest.call("POST", "flows/", {"name": "train"})
        made = rest.call("POST", "flow_runs/", {"flow_id": flow["id"], "state": {"type": "RUNNING"}})
        found = rest.flow_runs([made["id"]])[made["id"]]
        assert found.state == "RUNNING"
        again = PrefectRest(server.url, PASSWORD)  # another process, with a token of its own
        assert again.set_state(found, "CANCELLED", "Cancelled", "its run was cancelled")
        assert rest.flow_runs([made["id"]])[made["id"]].state == "CANCELLED"

        monkeypatch.setenv("PREFECT_API_URL", server.url)
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", PASSWORD)
        monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
        assert connect().url == server.url
    finally:
        server.kill()
