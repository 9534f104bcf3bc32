"""Calls to a Prefect server that is busy, by a server that answers what a test says."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flows.prefect_rest import BUSY, PAUSES_S, PrefectAway, PrefectRest


@contextmanager
def answering(*codes: int, body: bytes = b"[]") -> Iterator[tuple[PrefectRest, list[str]]]:
    """A server that gives these answers in turn, the last one again and again; and the bodies that it was sent."""
    left, asked = list(codes), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(left.pop(0) if len(left) > 1 else left[0])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    rest = PrefectRest(f"http://127.0.0.1:{server.server_port}/api")
    try:
        yield rest, asked
    finally:
        rest.close()
        server.shutdown()
        server.server_close()


def test_a_busy_server_is_asked_again() -> None:
    with answering(BUSY, BUSY, 200) as (rest, asked):
        assert rest.flow_runs(["a"]) == {}
    assert len(asked) == 3
    assert len(set(asked)) == 1


def test_one_that_stays_busy_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.prefect_rest.PAUSES_S", (0.0,) * len(PAUSES_S))
    with answering(BUSY) as (rest, asked), pytest.raises(PrefectAway, match="503"):
        rest.flow_runs(["a"])
    assert len(asked) == 1 + len(PAUSES_S)


def test_another_refusal_is_not_repeated() -> None:
    with answering(500) as (rest, asked), pytest.raises(PrefectAway, match="500"):
        rest.flow_runs(["a"])
    assert len(asked) == 1


@pytest.mark.parametrize("body", [b"<html>", b'{"detail": []}', b'["x"]', b"[{}]", b"7", b'[{"id": "a", "state": 7}]'])
def test_what_is_no_prefect_is_away(body: bytes) -> None:
    with answering(200, body=body) as (rest, _):
        with pytest.raises(PrefectAway, match=rest.url):
            rest.flow_runs(["a"])
        with pytest.raises(PrefectAway, match=rest.url):
            rest.starting("slipstream:a", ["train"])


def test_the_user_s_headers_are_sent_and_never_instead_of_the_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"X-Proxy-Token": "let-me-through", "authorization": "of somebody else"}
    monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", json.dumps(given))
    sent = PrefectRest("http://127.0.0.1:1/api", "me:secret")._client.headers
    assert sent["X-Proxy-Token"] == "let-me-through"
    assert sent.get_list("Authorization") == ["Basic " + base64.b64encode(b"me:secret").decode()]


@pytest.mark.parametrize("text", ["{", "[]", '"a"', "7", '{"a": 1}', '{"a": "\u00e4"}', "null"])
def test_headers_that_are_none_are_left_to_prefect(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", text)
    with answering(200) as (rest, _):
        assert rest.flow_runs(["a"]) == {}


def test_a_refusal_that_speaks_of_csrf_is_one_where_there_is_no_token() -> None:
    """As other programs' pages do."""
    with answering(403, body=b"CSRF verification failed") as (rest, asked), pytest.raises(PrefectAway, match="403"):
        rest.flow_runs(["a"])
    assert len(asked) == 2
