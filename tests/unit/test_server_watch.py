"""Generation where the server goes away under it: what is waited for, for how long, and that no prompt is lost."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from slipstream.rollout import server_watch
from slipstream.rollout.client import GenerationError, SamplingSettings, ServerUnavailable
from slipstream.rollout.loop import AsyncRolloutLoop
from slipstream.rollout.server_watch import FollowingClient, make_client
from slipstream.rollout.setup import LoopSetup
from slipstream.run_folder import RunFolder, write_json
from tests.generation_server import Answer, GenerationServer
from tests.rollout_double import Double

OURS = "run/a1/3"
SETTINGS = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, min_p=None, head_size=0, stop_token_ids=())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_watch, "POLL_S", 0.01)
    monkeypatch.setattr(server_watch, "RETRY_DELAYS_S", (0.001, 0.001))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "run")


def asynchronous(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def call(**fixtures: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(60):
                await test(**fixtures)

        asyncio.run(bounded())

    return call


def publish(run: RunFolder, url: str, incarnation: str) -> None:
    write_json(run.endpoint_file(), {"url": url, "incarnation": incarnation, "attempt": 1})


class Ours(GenerationServer):
    """Labels what it generates as it labels its weights. `mode`: "ok", "silent", or a status for each generation."""

    def __init__(self, label: str = OURS) -> None:
        super().__init__(lambda body, index: Answer([5, 6, 9], [(self.label, 0, 3)]), self._fault)
        self.label = label
        self.mode: str | int = "ok"

    async def _fault(self, request: web.Request) -> web.StreamResponse | None:
        if self.mode == "silent":
            await asyncio.Event().wait()
        return web.Response(status=self.mode, text="no") if isinstance(self.mode, int) else None


@contextlib.asynccontextmanager
async def client_of(
    run: RunFolder, url: str, incarnation: str | None = "one", patience_s: float = 60.0
) -> AsyncIterator[FollowingClient]:
    setup = LoopSetup("run", 1, "m", True, 64, server_incarnation=incarnation)
    client = FollowingClient(
        url,
        "m",
        SETTINGS,
        run=run,
        setup=setup,
        timeout_s=60.0,
        patience_s=patience_s,
    )
    await client.open()
    following = asyncio.create_task(client.follow())
    try:
        yield client
    finally:
        following.cancel()
        await client.close()


async def ask(client: FollowingClient) -> list[int]:
    (choice,) = await client.generate([1, 2], n=1, max_tokens=8, seed=0)
    return choice.token_ids


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


@asynchronous
async def test_groups_in_flight_on_a_server_that_falls_silent_are_generated_by_the_next_one(run: RunFolder) -> None:
    first, second = Ours(), Ours("default")
    first.mode = "silent"
    double = Double(
        first,
        8,
        AsyncRolloutLoop,
        setup={"server_incarnation": "one", "group_tokens": 10.0},
        run_dir=str(run.path),
        attempt=1,
        max_concurrent_rollouts=24,
        log_completions=False,
    )
    async with second, double:
        publish(run, first.url, "one")
        await until(lambda: first.running == 24)
        publish(run, second.url, "two")
        await until(lambda: second.asked >= 3)
        assert second.bodies == [], "its weights are not this run's yet"
        second.label = OURS
        await double.until(lambda: double.ended, "the end of the data")
        assert first.running == 0, "nothing is asked of the one before any more"
    assert sorted(group.number for group in double.groups) == list(range(8))
    assert {str(group.dropped) for group in double.groups} == {"{'zero_std': 3}"}, "of none the weights were foreign"


@asynchronous
async def test_the_same_server_that_answers_again_is_asked_again(run: RunFolder) -> None:
    async with Ours() as server, client_of(run, server.url) as client:
        publish(run, server.url, "one")
        server.mode, server.healthy = 503, False
        asked = asyncio.create_task(ask(client))
        await until(lambda: server.asked >= 3)
        assert not asked.done()
        server.mode, server.healthy = "ok", True
        assert await asked == [5, 6, 9]


@asynchronous
async def test_whoever_else_has_got_the_address_is_not_taken_for_the_server(run: RunFolder) -> None:
    async with Ours("other/a1/0") as stranger, Ours() as ours, client_of(run, stranger.url) as client:
        publish(run, stranger.url, "one")
        stranger.mode, stranger.healthy = 401, False
        asked = asyncio.create_task(ask(client))
        await until(lambda: stranger.asked >= 3)
        assert not asked.done()
        publish(run, ours.url, "two")
        assert await asked == [5, 6, 9]
    assert len(stranger.bodies) == 1


@asynchronous
async def test_what_the_server_aborted_is_generated_again(run: RunFolder) -> None:
    async with Ours() as server, client_of(run, server.url) as client:
        publish(run, server.url, "one")
        reasons = ["abort", "stop"]
        server.script = lambda body, index: Answer([5], [(OURS, 0, 1)], reasons.pop(0))
        assert await ask(client) == [5]
        assert reasons == []


@asynchronous
async def test_no_server_is_not_waited_for_for_ever(run: RunFolder) -> None:
    async with client_of(run, "http://127.0.0.1:1", patience_s=0.2) as client:
        with pytest.raises(ServerUnavailable, match=r"no server of the run for 0.2 s \(as long as.*run's server"):
            await ask(client)
        with pytest.raises(ServerUnavailable):
            await ask(client)


@asynchronous
async def test_a_healthy_server_that_fails_a_request_for_ever_ends_the_waiting(run: RunFolder) -> None:
    async with Ours() as server, client_of(run, server.url) as client:
        publish(run, server.url, "one")
        server.mode = 500
        with pytest.raises(ServerUnavailable, match="answered 500"):
            await ask(client)
        server.mode = 400
        with pytest.raises(GenerationError):
            await ask(client)


@asynchronous
async def test_a_server_that_lost_the_weights_under_its_name_is_told_by_its_label(run: RunFolder) -> None:
    async with Ours() as server, client_of(run, server.url, None) as client:
        publish(run, server.url, "one")
        assert await ask(client) == [5, 6, 9]
        server.label, server.mode = "default", 503
        with pytest.raises(ServerUnavailable, match=r"labels its own 'default': another run delivers to it"):
            await ask(client)


@asynchronous
async def test_a_torn_delivery_is_waited_over(run: RunFolder) -> None:
    async with Ours() as server, client_of(run, server.url) as client:
        publish(run, server.url, "one")
        server.label, server.mode = "run/a1/torn", 503
        asked = asyncio.create_task(ask(client))
        await until(lambda: server.asked >= 3)
        server.label, server.mode = OURS, "ok"
        assert await asked == [5, 6, 9]


@asynchronous
async def test_a_request_may_take_less_time_than_a_server_is_waited_for(run: RunFolder) -> None:
    config = SimpleNamespace(
        vllm_server_base_url="http://127.0.0.1:1", vllm_server_token_file=None, run_dir=str(run.path)
    )
    config.vllm_server_timeout = 0.2
    for config.server_patience, seconds in ((None, 0.2), (7.0, 7.0)):
        client = make_client(config, LoopSetup("run", 1, "m", True, 64), "m", SETTINGS, lambda: None)
        assert isinstance(client, FollowingClient)
        assert (client._timeout_s, client._patience_s) == (0.2, seconds)
