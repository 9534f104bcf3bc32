"""Generation requests to the vLLM server: token ids in, token ids out."""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

logger = logging.getLogger(__name__)

FLOOR_LOGPROB = -9999.0
RETRY_DELAYS_S = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
# below the five seconds after which the server closes an idle connection, so that no request meets a closing one
KEEPALIVE_S = 2.0

GENERATE_ROUTE = "/inference/v1/generate"
COMPLETIONS_ROUTE = "/v1/completions"


class GenerationError(Exception):
    """A request failed for good: the server refused it (4xx), it timed out twice, or its answer makes no sense."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ServerUnavailable(Exception):
    """The server could not be reached, or answered 5xx, on every try. `answered`: it did on the last one."""

    def __init__(self, message: str, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


@dataclass
class Choice:
    """One generated sequence. Heads hold the sampler's `k` likeliest tokens, whether or not one was sampled."""

    token_ids: list[int]
    logprobs: list[float]
    heads: list[dict[int, float]] | None
    labels: list[str | None]
    candidates: list[list[int]] | None
    finish_reason: str | None


@dataclass(frozen=True)
class SamplingSettings:
    """What every request of a run has in common."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float | None
    head_size: int
    stop_token_ids: tuple[int, ...]

    def parameters(self) -> dict[str, Any]:
        """Every field that shapes the distribution, sent explicitly: the model's generation config must not apply."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k if self.top_k > 0 else -1,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(self.stop_token_ids),
        }

    @property
    def truncates(self) -> bool:
        """Whether a token is drawn from a candidate set smaller than the vocabulary."""
        return self.top_k > 0 or self.top_p < 1 or bool(self.min_p)

    @property
    def num_logprobs(self) -> int:
        """One more than the head: the server lists the sampled token first and then cuts, and the head must not
        depend on what was sampled."""
        return self.head_size + 1 if self.head_size else 0


def head_of(entries: list[dict[str, Any]], size: int) -> dict[int, float]:
    """The `size` likeliest tokens among the server's entries, by their rank."""
    return {
        int(e["token_id"]): max(float(e["logprob"]), FLOOR_LOGPROB)
        for e in entries
        if e.get("rank") is not None and 1 <= e["rank"] <= size
    }


def labels_of(spans: list[dict[str, Any]] | None, length: int) -> list[str | None]:
    """One version label per token from the server's spans; None where no span covers the token."""
    labels: list[str | None] = [None] * length
    for span in spans or []:
        for i in range(max(0, span["start"]), min(length, span["end"])):
            labels[i] = span["version"]
    return labels


def candidates_of(choice: dict[str, Any]) -> list[list[int]]:
    """The set that each token of a choice was drawn from. Raises GenerationError where the answer has no such sets."""
    sets, ids = choice.get("sampling_mask"), choice["token_ids"] or []
    if sets is None:
        raise GenerationError("the server returned no sampling_mask, though it runs with --return-sampling-mask")
    if len(sets) != len(ids):
        raise GenerationError(f"the server returned a sampling_mask of {len(sets)} entries for {len(ids)} tokens")
    for position, (token, candidates) in enumerate(zip(ids, sets, strict=True)):
        if token not in candidates:
            raise GenerationError(
                f"the server's sampling_mask leaves out token {token} at {position}, which it sampled"
            )
    return sets


def parse_generate(choice: dict[str, Any], head_size: int, candidates: bool = False) -> Choice:
    """A choice of the token-in token-out route; `candidates`: it must have the candidate sets."""
    ids = choice["token_ids"] or []
    content = (choice.get("logprobs") or {}).get("content") or []
    heads = [head_of(entry["top_logprobs"], head_size) for entry in content] if head_size else None
    return Choice(
        token_ids=list(ids),
        logprobs=[max(float(entry["logprob"]), FLOOR_LOGPROB) for entry in content],
        heads=heads,
        labels=labels_of(choice.get("weight_versions"), len(ids)),
        candidates=candidates_of(choice) if candidates else None,
        finish_reason=choice.get("finish_reason"),
    )


def parse_completions(choice: dict[str, Any], head_size: int) -> Choice:
    """A choice of the OpenAI completions route, with `return_tokens_as_token_ids` (keys are `token_id:N`).

    That route has no ranks. The server lists the head in rank order after the sampled token, so the `head_size` likeliest
    of the entries are the head.
    """
    ids = choice["token_ids"]
    found = choice.get("logprobs") or {}
    heads = None
    if head_size:
        heads = []
        for entries in found.get("top_logprobs") or []:
            pairs = sorted(((int(k.split(":", 1)[1]), v) for k, v in entries.items()), key=lambda pair: -pair[1])
            heads.append({token: max(float(v), FLOOR_LOGPROB) for token, v in pairs[:head_size]})
    return Choice(
        token_ids=list(ids),
        logprobs=[max(float(v), FLOOR_LOGPROB) for v in found.get("token_logprobs") or []],
        heads=heads,
        labels=[None] * len(ids),
        candidates=None,
        finish_reason=choice.get("finish_reason"),
    )


class VLLMClient:
    """One connection pool to one server, without a cap on connections."""

    def __init__(
        self,
        base_url: str,
        model: str,
        settings: SamplingSettings,
        *,
        token_file: str | Path | None = None,
        timeout_s: float = 1800.0,
        use_generate_route: bool = True,
        returns_candidates: bool = False,
        on_retry: Callable[[], None] = lambda: None,
        retry_delays_s: tuple[float, ...] = RETRY_DELAYS_S,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._model = model
        self._settings = settings
        self._token_file = token_file
        self._timeout_s = timeout_s
        self._generate_route = use_generate_route
        self._candidates = returns_candidates and use_generate_route and settings.truncates
        self._on_retry = on_retry
        self._delays = retry_delays_s
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Open the pool; call it on the event loop that will use it."""
        headers = {}
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {Path(self._token_file).read_text().strip()}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, connect=30.0),
            trust_env=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def follow(self) -> None:
        """Watch which server counts, where that can change; here it cannot. Run it beside the requests."""

    async def generate(
        self, prompt_ids: list[int], *, n: int, max_tokens: int, seed: int, lora: str | None = None
    ) -> list[Choice]:
        """Sample `n` sequences from one prompt.

        Raises:
            GenerationError: the server refused the request (never retried), or it timed out twice.
            ServerUnavailable: no answer, or 5xx, on every try.
        """
        sampling = {**self._settings.parameters(), "n": n, "max_tokens": max_tokens, "seed": seed}
        head = self._settings.head_size
        if self._generate_route:
            body: dict[str, Any] = {
                "model": lora or self._model,
                "token_ids": prompt_ids,
                "sampling_params": {**sampling, "logprobs": self._settings.num_logprobs, "detokenize": False},
            }
            answer = await self._post(GENERATE_ROUTE, body)
            return self._parsed(answer, n, lambda choice: parse_generate(choice, head, self._candidates))
        body = {
            "model": lora or self._model,
            "prompt": prompt_ids,
            **sampling,
            "logprobs": self._settings.num_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        answer = await self._post(COMPLETIONS_ROUTE, body)
        return self._parsed(answer, n, lambda choice: parse_completions(choice, head))

    @staticmethod
    def _parsed(answer: dict[str, Any], n: int, parse: Callable[[dict[str, Any]], Choice]) -> list[Choice]:
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            if len(choices) != n:
                raise GenerationError(f"the server returned {len(choices)} sequences of {n}")
            return [parse(choice) for choice in choices]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise GenerationError(
                f"the server's answer is none that it should give: {type(error).__name__}: {error}; it begins {answer!r:.300}"
            ) from error

    async def get_text(self, route: str) -> str | None:
        """The body of a GET, or None where the server does not have the route or does not answer."""
        assert self._session is not None, "open() first"
        try:
            async with self._session.get(self._base_url + route) as response:
                return await response.text() if response.status == 200 else None
        except (OSError, aiohttp.ClientError, UnicodeDecodeError):  # a TimeoutError is an OSError
            return None

    async def _post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        assert self._session is not None, "open() first"
        timeouts = 0
        last, answered = "", False
        for delay in (*self._delays, None):
            answered = False
            try:
                async with self._session.post(self._base_url + route, json=body) as response:
                    if response.status == 200:
                        return await response.json()
                    message = (await response.text())[:2000]
                    if 400 <= response.status < 500 and response.status not in (408, 425, 429):
                        raise GenerationError(f"{route} answered {response.status}: {message}", response.status)
                    last, answered = f"{route} answered {response.status}: {message}", True
            except aiohttp.ConnectionTimeoutError as error:  # a TimeoutError too, but nobody is there to be slow
                last = f"{route}: {type(error).__name__}: {error}"
            except TimeoutError:
                timeouts += 1
                last = f"{route}: no answer within {self._timeout_s:g} s"
                if timeouts >= 2:
                    raise GenerationError(f"{last}, twice") from None
            except (aiohttp.ClientError, OSError) as error:
                last = f"{route}: {type(error).__name__}: {error}"
            except ValueError as error:  # cut short on the way, or the page of a proxy
                last = f"{route} answered 200, but no JSON: {error}"
            if delay is None:
                break
            self._on_retry()
            logger.warning("retrying in about %g s: %s", delay, last)
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))
        raise ServerUnavailable(f"{self._base_url} failed on {len(self._delays) + 1} tries; the last: {last}", answered)
