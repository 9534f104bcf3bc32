"""The server of `slipstream up`: Prefect's, which asks its database again where a request met a lock.

SQLite refuses at once, whatever its time-out, a transaction that has read before another one wrote. Prefect answers 503
then, and has done nothing. Its own clients ask again; a browser does not.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from flows.prefect_rest import BUSY, PAUSES_S
from slipstream.process import importing

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class AskAgain:
    """An ASGI application that repeats a request which another one answers with 503, and passes on the last answer.

    Args:
        pauses_s: before each repetition.
    """

    def __init__(self, app: App, pauses_s: Sequence[float] = PAUSES_S) -> None:
        self._app, self._pauses_s = app, pauses_s

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = [await receive()]
        while body[-1].get("more_body"):
            body.append(await receive())
        for pause_s in self._pauses_s:
            if not await self._busy(scope, body, receive, send):
                return
            await asyncio.sleep(pause_s)
        await self._app(scope, _after(body, receive), send)

    async def _busy(self, scope: MutableMapping[str, Any], body: list[Message], receive: Receive, send: Send) -> bool:
        """Whether the answer is 503, which is withheld; any other is sent."""
        busy = False

        async def unless_busy(message: Message) -> None:
            nonlocal busy
            busy = busy or (message["type"] == "http.response.start" and message["status"] == BUSY)
            if not busy:
                await send(message)

        try:
            await self._app(dict(scope), _after(body, receive), unless_busy)
        except Exception:
            if not busy:  # Starlette raises an error after its answer too, for the server's log
                raise
        return busy


def _after(body: list[Message], receive: Receive) -> Receive:
    """First what came already, then what comes."""
    left = list(body)

    async def next_message() -> Message:
        return left.pop(0) if left else await receive()

    return next_message


def create_app() -> App:
    """For uvicorn's --factory."""
    with importing():
        from prefect.server.api.server import create_app

    return AskAgain(create_app())
