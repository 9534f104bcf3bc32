"""A double of vLLM's two generation routes, to inject faults and to script answers.

It keeps to the protocol as the real server speaks it (`tests/integration/test_generation_routes.py` compares the client
against that one): the sampled token is listed first among the log-probabilities and the list is then cut to the number
asked for, the completions route has no ranks and no version spans, and choices carry an index.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from aiohttp import web

VOCABULARY = 300


@dataclass
class Answer:
    """One sequence to answer with; `versions` are labels by span (label, start, end)."""

    token_ids: list[int]
    versions: list[tuple[str, int, int]] | None = None
    finish_reason: str = "stop"


@lru_cache
def policy(phase: int) -> tuple[list[float], list[int]]:
    """Some fixed log-probabilities, and the tokens from the likeliest down."""
    scores = [math.sin(v * 1.7 + phase) * 3 for v in range(VOCABULARY)]
    total = math.log(sum(map(math.exp, scores)))
    return [score - total for score in scores], sorted(range(VOCABULARY), key=lambda v: -scores[v])


def logprob_of(token: int, prompt_length: int, position: int) -> float:
    """The double's policy: another distribution at each position."""
    return policy(prompt_length + position)[0][token]


def listed(token: int, prompt_length: int, position: int, count: int) -> list[dict[str, Any]]:
    """The entries of one position: the sampled token, then the likeliest, cut to `count`."""
    probs, order = policy(prompt_length + position)
    tokens = list(dict.fromkeys([token, *order[:count]]))[: max(count, 1)]
    return [{"token_id": v, "logprob": probs[v], "rank": order.index(v) + 1} for v in tokens]


Script = Callable[[dict[str, Any], int], Answer]
Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


class GenerationServer:
    """Serves on a free port; `async with`. Records every request.

    Args:
        script: (request body, index of the choice) -> the answer.
        fault: awaited first; what it returns is answered instead, None lets the request pass.
    """

    def __init__(self, script: Script | None = None, fault: Fault | None = None) -> None:
        self.script = script or (lambda body, index: Answer([5, 6]))
        self.fault = fault
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.running = self.peak = 0  # sequences under way
        self.metrics: str | None = None  # the text of /metrics; None: there is no such route
        self.healthy, self.label = True, "default"  # what /health and /weight_info say
        self.asked = 0  # how often /health was
        self.url, self.model = "", "m"

    async def __aenter__(self) -> "GenerationServer":
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_get("/weight_info", self._weight_info)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        return web.Response(status=200 if self.healthy else 503)

    async def _weight_info(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"weight_version": self.label})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=404) if self.metrics is None else web.Response(text=self.metrics)

    async def _answers(self, request: web.Request, sampling_key: str | None) -> Any:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        sampling = body[sampling_key] if sampling_key else body
        count = sampling["n"]
        self.running += count
        self.peak = max(self.peak, self.running)
        try:
            if self.fault is not None and (instead := await self.fault(request)) is not None:
                return instead
            await asyncio.sleep(0.001)
            return body, sampling, [self.script(body, i) for i in range(count)]
        finally:
            self.running -= count

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        found = await self._answers(request, "sampling_params")
        if isinstance(found, web.StreamResponse):
            return found
        body, sampling, answers = found
        choices = []
        for index, answer in enumerate(answers):
            content = []
            for i, token in enumerate(answer.token_ids):
                entries = listed(token, len(body["token_ids"]), i, sampling["logprobs"])
                content.append({"token_id": token, "logprob": entries[0]["logprob"], "top_logprobs": entries})
            spans = [{"version": v, "start": a, "end": b} for v, a, b in answer.versions or []]
            choices.append(
                {
                    "index": index,
                    "token_ids": answer.token_ids,
                    "logprobs": {"content": content},
                    "finish_reason": answer.finish_reason,
                    "weight_versions": spans,
                }
            )
        return web.json_response({"choices": choices[::-1]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        found = await self._answers(request, None)
        if isinstance(found, web.StreamResponse):
            return found
        body, sampling, answers = found
        choices = []
        for index, answer in enumerate(answers):
            entries = [
                listed(token, len(body["prompt"]), i, sampling["logprobs"]) for i, token in enumerate(answer.token_ids)
            ]
            top = [{f"token_id:{e['token_id']}": e["logprob"] for e in at} for at in entries]
            choices.append(
                {
                    "index": index,
                    "token_ids": answer.token_ids,
                    "logprobs": {"token_logprobs": [at[0]["logprob"] for at in entries], "top_logprobs": top},
                    "finish_reason": answer.finish_reason,
                }
            )
        return web.json_response({"choices": choices})
