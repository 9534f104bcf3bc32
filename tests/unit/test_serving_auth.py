import asyncio
from pathlib import Path
from typing import Any

import pytest

from slipstream.serving.auth import TOKEN_FILE_ENV, RequireToken, TokenError


class App:
    """An ASGI app that notes what reaches it."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope["type"])


def request(middleware: RequireToken, scope: dict[str, Any]) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": f"{scope['type']}.connect"}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    asyncio.run(middleware(scope, receive, send))
    return sent


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    monkeypatch.setenv(TOKEN_FILE_ENV, str(path))
    return path


@pytest.mark.usefixtures("token_file")
@pytest.mark.parametrize("path", ["/health", "/metrics", "/docs", "/v1/models", "/pause", "/nowhere"])
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"Bearer wrong")],
        [(b"authorization", b"Bearer s3cretx")],
        [(b"authorization", b"s3cret")],
        [(b"authorization", b"bearer s3cret")],
        [(b"authorization", b"Bearer s3cret"), (b"authorization", b"Bearer wrong")],
        [(b"x-authorization", b"Bearer s3cret")],
        [(b"authorization", b"\xff\xfe")],
    ],
)
def test_http_without_the_token_is_answered_401_and_goes_no_further(path: str, headers: list[Any]) -> None:
    app = App()
    sent = request(RequireToken(app), {"type": "http", "path": path, "headers": headers})
    assert app.reached == []
    assert sent[0]["status"] == 401
    assert b"s3cret" not in b"".join(message.get("body", b"") for message in sent)


@pytest.mark.usefixtures("token_file")
def test_a_websocket_without_the_token_is_closed() -> None:
    app = App()
    sent = request(RequireToken(app), {"type": "websocket", "path": "/v1/realtime", "headers": []})
    assert app.reached == []
    assert [message["type"] for message in sent] == ["websocket.close"]


@pytest.mark.usefixtures("token_file")
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_the_token_opens_every_route(kind: str) -> None:
    app = App()
    headers = [(b"Authorization", b"Bearer s3cret")]
    assert request(RequireToken(app), {"type": kind, "path": "/pause", "headers": headers}) == []
    assert app.reached == [kind]


@pytest.mark.usefixtures("token_file")
def test_start_and_stop_of_the_server_need_no_token() -> None:
    app = App()
    request(RequireToken(app), {"type": "lifespan"})
    assert app.reached == ["lifespan"]


def test_without_a_usable_token_it_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_FILE_ENV, raising=False)
    with pytest.raises(TokenError, match="is not set"):
        RequireToken(App())
    path = tmp_path / "token"
    monkeypatch.setenv(TOKEN_FILE_ENV, str(path))
    with pytest.raises(TokenError, match="not readable"):
        RequireToken(App())
    path.write_text(" \n")
    with pytest.raises(TokenError, match="is empty"):
        RequireToken(App())
