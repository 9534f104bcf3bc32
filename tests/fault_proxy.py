"""A proxy before a server, which harms what passes: some requests by chance, by their own seed, or those that a test names."""

import asyncio
import hashlib
import json
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

GENERATION = ("/inference/v1/generate", "/v1/completions")
ANSWERS = ("500", "502", "503", "429")
# what may happen to a request; "silent": no answer ever comes, "lost" and "reset": none, but the server did its work or not
FAULTS = (*ANSWERS, "reset", "lost", "silent", "slow", "truncated", "half")

Hold = Callable[[web.Request, bytes], Awaitable[None]]


@dataclass(frozen=True)
class Rates:
    """How often a request is harmed, and how often in a row the same request may be.

    Args:
        share: of requests, 0 to 1.
        in_row: of the same request; then it passes, so that a run's end does not hang on luck.
        kinds: drawn from with equal chance.
        silent_in_row: of the same request, how many may be left without an answer.
    """

    share: float = 0.0
    in_row: int = 3
    kinds: tuple[str, ...] = FAULTS
    silent_in_row: int = 1


@dataclass
class _History:
    seen: int = 0
    in_row: int = 0
    silent: int = 0


@dataclass
class FaultProxy:
    """Stands before `target` on a free loopback port, on a thread of its own; `with`.

    Attributes:
        generation, control: how often requests for samples and all others are harmed.
        hold: awaited with each request and its body before it passes; never returning holds the request for ever.
        named: fault of the next requests of a route, in order, whatever the rates say.
        counts: (route, fault) -> how often; "passed" is one too.
        held: requests in `hold` now.
    """

    target: str
    seed: int = 0
    generation: Rates = Rates()
    control: Rates = Rates()
    hold: Hold | None = None
    named: dict[str, list[str]] = field(default_factory=dict)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    held: int = 0
    url: str = ""

    def __enter__(self) -> "FaultProxy":
        self._loop = asyncio.new_event_loop()
        self._histories: dict[str, _History] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(30)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    async def _open(self) -> None:
        self._session = ClientSession(
            connector=TCPConnector(limit=0, force_close=True), timeout=ClientTimeout(total=None), auto_decompress=False
        )
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0])

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    # ---- what happens to a request

    def _choose(self, request: web.Request, body: bytes) -> str:
        if named := self.named.get(request.path):
            return named.pop(0)
        sampling = request.path in GENERATION
        rates = self.generation if sampling else self.control
        # a request for samples has a seed of its own; any other is the same as the last of its route
        identity = hashlib.blake2b(request.path.encode() + body * sampling, digest_size=8).hexdigest()
        history = self._histories.setdefault(identity, _History())
        history.seen += 1
        rng = random.Random(f"{self.seed}/{identity}/{history.seen}")
        fault = rng.choice(rates.kinds) if rng.random() < rates.share else "passed"
        if history.in_row >= rates.in_row or (fault == "silent" and history.silent >= rates.silent_in_row):
            fault = "passed"
        harmed = fault not in ("passed", "slow")
        history.in_row = history.in_row + 1 if harmed else 0
        history.silent += fault == "silent"
        return fault

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if self.hold is not None:
            self.held += 1
            try:
                await self.hold(request, body)
            finally:
                self.held -= 1
        fault = self._choose(request, body)
        self.counts[request.path, fault] += 1
        if fault in ANSWERS:
            return web.Response(status=int(fault), text=f"injected {fault}")
        if fault == "reset":
            return _reset(request)
        if fault == "silent":
            await asyncio.Event().wait()
        status, headers, content = await self._forward(request, body)
        if fault == "lost":
            return _reset(request)
        if fault == "half":  # well-framed, and yet not all of it
            return web.Response(status=status, headers=headers, body=content[: len(content) // 2])
        if fault in ("slow", "truncated"):
            return await self._in_pieces(request, status, headers, content, whole=fault == "slow")
        return web.Response(status=status, headers=headers, body=content)

    async def _forward(self, request: web.Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
        headers = {
            k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length", "connection")
        }
        async with self._session.request(
            request.method, self.target.rstrip("/") + str(request.rel_url), data=body or None, headers=headers
        ) as response:
            kind = {"Content-Type": response.headers.get("Content-Type", "application/octet-stream")}
            return response.status, kind, await response.read()

    @staticmethod
    async def _in_pieces(
        request: web.Request, status: int, headers: dict[str, str], content: bytes, whole: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={**headers, "Content-Length": str(len(content))})
        await response.prepare(request)
        size = max(len(content) // 10, 1)
        for begin in range(0, len(content) if whole else len(content) // 2, size):
            await response.write(content[begin : begin + size] if whole else content[begin : begin + 1])
            await asyncio.sleep(0.02)
        if not whole:
            return _reset(request, response)
        await response.write_eof()
        return response

    # ---- for tests

    def harmed(self, *routes: str) -> dict[str, int]:
        """How often each fault was injected, in all or on these routes."""
        found: Counter[str] = Counter()
        for (route, fault), count in self.counts.items():
            if fault != "passed" and (not routes or route in routes):
                found[fault] += count
        return dict(found)


def _reset(request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
    """End the connection with a reset, not an orderly end."""
    transport: Any = request.transport
    if transport is not None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    return response or web.Response()


def prompt_tokens(body: bytes) -> list[int]:
    """The prompt of a request for samples."""
    value = json.loads(body)
    return list(value.get("token_ids") or value["prompt"])
