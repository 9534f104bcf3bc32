"""ASGI middleware that closes a server to everybody without the run's token."""

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

TOKEN_FILE_ENV = "SLIPSTREAM_TOKEN_FILE"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

REFUSAL = b'{"error":{"message":"missing or wrong bearer token","type":"Unauthorized","code":401}}'


class TokenError(RuntimeError):
    """There is no usable token."""


def read_token(path: str | Path | None) -> str:
    """The token in the file `path`. Raises TokenError where it is not named, not readable, or empty."""
    if not path:
        raise TokenError(f"{TOKEN_FILE_ENV} is not set: it must name the file that holds the server's token")
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise TokenError(f"the token file {path} ({TOKEN_FILE_ENV}) is not readable: {error.strerror}") from None
    if not token:
        raise TokenError(f"the token file {path} ({TOKEN_FILE_ENV}) is empty")
    return token


class RequireToken:
    """Answers 401 to each HTTP and WebSocket request without `Authorization: Bearer <token>`, whatever its route.

    For `vllm --middleware slipstream.serving.auth.RequireToken`. Raises TokenError when made without a token.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = b"Bearer " + read_token(os.environ.get(TOKEN_FILE_ENV)).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # the connect event; closing before accepting answers 403 on the wire
            await send({"type": "websocket.close", "code": 1008, "reason": "unauthorized"})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})

    def _allowed(self, scope: Scope) -> bool:
        given = [value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)
