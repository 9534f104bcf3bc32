"""The generation client against a server that injects faults."""

import asyncio
import socket

import aiohttp
import pytest
from aiohttp import web

from slipstream.rollout.client import (
    FLOOR_LOGPROB,
    GenerationError,
    SamplingSettings,
    ServerUnavailable,
    VLLMClient,
    head_of,
    labels_of,
    parse_generate,
)
from tests.generation_server import VOCABULARY, Answer, GenerationServer, logprob_of

SETTINGS = SamplingSettings(temperature=0.7, top_p=1.0, top_k=0, min_p=None, head_size=3, stop_token_ids=(9, 8))
ROUTES = pytest.mark.parametrize("generate_route", [True, False])


class Faults:
    """Does what it was told for each request in turn, then nothing."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.seen = 0

    async def __call__(self, request):
        self.seen += 1
        if not self.answers:
            return None
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            return web.Response(status=answer, text=f"says {answer}")
        return await answer(request)


async def dropped(request):
    """The connection ends before an answer."""
    request.transport.close()
    return web.Response()


async def cut(request):
    """The connection ends within the answer."""
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"choices"')
    request.transport.close()
    return response


async def never(request):
    await asyncio.Event().wait()


def ask(server, **options):
    """Ask once for `n` sequences; what came, or the exception."""
    call = {"n": options.pop("n", 1), "max_tokens": 16, "seed": 3} | options.pop("call", {})

    async def run():
        async with server:
            client = VLLMClient(
                server.url, "served", options.pop("settings", SETTINGS), **({"retry_delays_s": (0.01,) * 3} | options)
            )
            await client.open()
            try:
                return await client.generate([1, 2, 3], **call)
            finally:
                await client.close()

    return asyncio.run(run())


@ROUTES
@pytest.mark.parametrize("fault", [500, 503, 429, 408, dropped, cut])
def test_a_passing_fault_is_retried_and_counted(fault, generate_route):
    faults, retries = Faults(fault, fault), []
    server = GenerationServer(fault=faults)
    (choice,) = ask(server, use_generate_route=generate_route, on_retry=lambda: retries.append(1))
    assert choice.token_ids == [5, 6]
    assert (faults.seen, len(retries)) == (3, 2)
    assert server.bodies[0] == server.bodies[2], "the same request again, seed included"


@ROUTES
@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_a_refusal_is_never_retried(status, generate_route):
    faults = Faults(status)
    with pytest.raises(GenerationError, match=f"{status}: says {status}") as caught:
        ask(GenerationServer(fault=faults), use_generate_route=generate_route)
    assert caught.value.status == status
    assert faults.seen == 1


@pytest.mark.parametrize("fault", [502, dropped])
def test_a_lasting_fault_is_the_server_s(fault):
    faults = Faults(*[fault] * 10)
    with pytest.raises(ServerUnavailable, match="failed on 4 tries"):
        ask(GenerationServer(fault=faults))
    assert faults.seen == 4


def test_one_timeout_is_retried_and_two_are_final():
    (choice,) = ask(GenerationServer(fault=Faults(never)), timeout_s=1.0)
    assert choice.token_ids == [5, 6]
    faults = Faults(*[never] * 5)
    with pytest.raises(GenerationError, match="twice"):
        ask(GenerationServer(fault=faults), timeout_s=0.2)
    assert faults.seen == 2


def test_nobody_there_is_the_server_s_fault():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: refused

        async def run():
            client = VLLMClient(f"http://127.0.0.1:{unused.getsockname()[1]}", "m", SETTINGS, retry_delays_s=(0.01,))
            await client.open()
            try:
                await client.generate([1], n=1, max_tokens=1, seed=0)
            finally:
                await client.close()

        with pytest.raises(ServerUnavailable, match="failed on 2 tries"):
            asyncio.run(run())


def test_a_timeout_while_connecting_is_no_slow_answer(monkeypatch):
    async def connect(self, *args, **kwargs):
        raise aiohttp.ConnectionTimeoutError("no SYN-ACK")

    monkeypatch.setattr(aiohttp.TCPConnector, "connect", connect)
    with pytest.raises(ServerUnavailable, match="failed on 4 tries"):
        ask(GenerationServer())


@ROUTES
def test_a_wrong_number_of_sequences_is_refused(generate_route):
    class Short(GenerationServer):
        async def _answers(self, request, key):
            body, sampling, answers = await super()._answers(request, key)
            return body, sampling, answers[:-1]

    with pytest.raises(GenerationError, match="2 sequences of 3"):
        ask(Short(), n=3, use_generate_route=generate_route)


@ROUTES
def test_the_head_does_not_depend_on_the_sampled_token(generate_route):
    likeliest = sorted(range(VOCABULARY), key=lambda v: -logprob_of(v, 3, 0))
    sampled = likeliest[:6] + likeliest[-2:]
    server = GenerationServer(lambda body, index: Answer([sampled[index]]))
    choices = ask(server, n=len(sampled), use_generate_route=generate_route)
    assert [choice.token_ids[0] for choice in choices] == sampled
    for choice in choices:
        assert choice.heads[0] == pytest.approx({v: logprob_of(v, 3, 0) for v in likeliest[:3]})
        assert choice.logprobs == pytest.approx([logprob_of(choice.token_ids[0], 3, 0)])


def test_both_routes_parse_to_the_same():
    def script(body, index):
        return Answer([index, 7, 250], [("r/a1/4", 0, 3)], "length" if index else "stop")

    one, other = (ask(GenerationServer(script), n=2, use_generate_route=route) for route in (True, False))
    for a, b in zip(one, other, strict=True):
        assert (a.token_ids, a.logprobs, a.heads, a.candidates, a.finish_reason) == (
            b.token_ids,
            b.logprobs,
            b.heads,
            b.candidates,
            b.finish_reason,
        )
        assert (a.labels, b.labels) == (["r/a1/4"] * 3, [None] * 3)
    assert [choice.token_ids[0] for choice in one] == [0, 1], "in the order of their index"


@ROUTES
@pytest.mark.parametrize("finish_reason", ["length", "stop"])
def test_an_empty_answer(generate_route, finish_reason):
    server = GenerationServer(lambda body, index: Answer([], finish_reason=finish_reason))
    (choice,) = ask(server, use_generate_route=generate_route)
    assert (choice.token_ids, choice.logprobs, choice.heads, choice.labels) == ([], [], [], [])


@ROUTES
def test_everything_that_shapes_the_distribution_is_sent(generate_route):
    server = GenerationServer()
    ask(server, use_generate_route=generate_route, n=2, call={"max_tokens": 11, "seed": 77})
    (body,) = server.bodies
    sent = body["sampling_params"] if generate_route else body
    expected = {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": [9, 8],
        "logprobs": 4,  # one more than the head
        "n": 2,
        "max_tokens": 11,
        "seed": 77,
    }
    assert {key: sent.get(key) for key in expected} == expected
    assert body["model"] == "served"
    assert body["token_ids" if generate_route else "prompt"] == [1, 2, 3]
    if not generate_route:
        assert body["return_token_ids"] is True
        assert body["return_tokens_as_token_ids"] is True


def test_filters_and_an_adapter_are_sent():
    server = GenerationServer()
    settings = SamplingSettings(1.0, 0.9, 50, 0.05, 0, ())
    (choice,) = ask(server, settings=settings, call={"lora": "policy-v3"})
    sent = server.bodies[0]["sampling_params"]
    assert (sent["top_p"], sent["top_k"], sent["min_p"], sent["logprobs"]) == (0.9, 50, 0.05, 0)
    assert server.bodies[0]["model"] == "policy-v3"
    assert choice.heads is None


def test_the_token_is_read_from_its_file_and_sent_as_a_header(tmp_path):
    (tmp_path / "token").write_text("s3cret\n")
    server = GenerationServer()
    ask(server, token_file=tmp_path / "token")
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    server = GenerationServer()
    ask(server)
    assert "Authorization" not in server.headers[0]


def test_as_many_requests_are_in_flight_as_were_asked():
    """None is answered before all 300 have arrived."""
    count = 300

    async def run():
        all_here = asyncio.Event()

        async def barrier(request):
            if server.running == count:
                all_here.set()
            await asyncio.wait_for(all_here.wait(), 60)

        server = GenerationServer(fault=barrier)
        async with server:
            client = VLLMClient(server.url, "m", SamplingSettings(1.0, 1.0, 0, None, 0, ()), retry_delays_s=())
            await client.open()
            asked = (client.generate([1], n=1, max_tokens=4, seed=i) for i in range(count))
            answers = await asyncio.gather(*asked)
            await client.close()
            return answers, server.peak

    answers, peak = asyncio.run(run())
    assert len(answers) == peak == count


def test_the_text_of_a_route_or_none():
    async def run():
        async with GenerationServer() as server:
            client = VLLMClient(server.url, "m", SETTINGS)
            await client.open()
            missing = await client.get_text("/metrics")
            await client.close()
        return missing

    assert asyncio.run(run()) is None


def test_a_head_is_cut_by_rank_and_floored():
    entries = [
        {"token_id": 4, "logprob": -7.0, "rank": 30},
        {"token_id": 1, "logprob": -0.1, "rank": 1},
        {"token_id": 2, "logprob": float("-inf"), "rank": 2},
        {"token_id": 3, "logprob": -3.0, "rank": 3},
    ]
    assert head_of(entries, 2) == {1: -0.1, 2: FLOOR_LOGPROB}


def test_labels_of_spans():
    spans = [{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 3, "end": 9}]
    assert labels_of(spans, 5) == ["a", "a", None, "b", "b"]
    assert labels_of(None, 2) == [None, None]


def test_a_sampled_token_at_the_floor_stays_finite():
    choice = parse_generate(
        {"token_ids": [1], "logprobs": {"content": [{"logprob": float("-inf"), "top_logprobs": []}]}}, 0
    )
    assert choice.logprobs == [FLOOR_LOGPROB]
