"""The repetition of requests that met a lock, with an application that answers what a test says."""

import asyncio
from typing import Any

import pytest

from flows.up.server import AskAgain

BODY = [
    {"type": "http.request", "body": b"a", "more_body": True},
    {"type": "http.request", "body": b"b", "more_body": False},
]
PAUSES = (0.0, 0.0)


class Met(Exception):
    """What an application raises after its answer."""


def answers(*codes: int, kind: str = "http") -> tuple[list[int], list[bytes]]:
    """Codes that the client sees, and the bodies that the application was given, where it answers with `codes` in turn."""
    left, given, sent = list(codes), [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["spoilt"] = scope.get("spoilt", 0) + 1
        assert scope["spoilt"] == 1, "each repetition has the scope as it came"
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        given.append(body)
        code = left.pop(0)
        await send({"type": "http.response.start", "status": code})
        await send({"type": "http.response.body", "body": b"x"})
        if code >= 500 and scope["type"] == "http":
            raise Met(code)  # as Starlette does

    incoming = list(BODY)

    async def receive() -> Any:
        return incoming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    raised = []
    try:
        asyncio.run(AskAgain(app, PAUSES)({"type": kind, "path": "/api/x"}, receive, send))
    except Met as error:
        raised = list(error.args)
    starts = [message["status"] for message in sent if message["type"] == "http.response.start"]
    assert len(sent) == 2 * len(starts)
    assert raised == [code for code in starts if code >= 500 and kind == "http"], "the server's log has it"
    return starts, given


@pytest.mark.parametrize(
    ("codes", "seen"),
    [((200,), 200), ((404,), 404), ((500,), 500), ((503, 201), 201), ((503, 503, 200), 200), ((503, 503, 503), 503)],
)
def test_a_busy_answer_is_seen_only_where_it_is_the_last(codes: tuple[int, ...], seen: int) -> None:
    assert answers(*codes) == ([seen], [b"ab"] * len(codes))


def test_what_is_no_request_passes_through() -> None:
    assert answers(503, kind="lifespan") == ([503], [b"ab"])
