"""Generation from a real server: what a request carries, by both routes."""

import asyncio

import pytest

from slipstream.rollout.client import Choice, SamplingSettings, VLLMClient
from tests.serving_process import VllmServer

pytestmark = pytest.mark.integration

PROMPT = [72, 101, 108, 108, 111]
HEAD = 4


def generate(server: VllmServer, use_generate_route: bool, n: int, seed: int) -> list[Choice]:
    async def main() -> list[Choice]:
        settings = SamplingSettings(0.7, 1.0, 0, None, HEAD, (2,))
        client = VLLMClient(
            server.base_url,
            str(server.model),
            settings,
            token_file=server.token_file,
            timeout_s=120,
            use_generate_route=use_generate_route,
        )
        await client.open()
        try:
            return await client.generate(PROMPT, n=n, max_tokens=24, seed=seed)
        finally:
            await client.close()

    return asyncio.run(main())


def test_both_routes_give_the_same_tokens_log_probabilities_and_head(vllm_server: VllmServer) -> None:
    direct = generate(vllm_server, True, n=3, seed=11)
    fallback = generate(vllm_server, False, n=3, seed=11)
    assert [c.token_ids for c in direct] == [c.token_ids for c in fallback]
    for a, b in zip(direct, fallback, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert a.heads is not None
        assert b.heads is not None
        for head_a, head_b in zip(a.heads, b.heads, strict=True):
            assert sorted(head_a.values()) == pytest.approx(sorted(head_b.values()), abs=1e-4)
            assert head_a.keys() == head_b.keys()
        assert a.finish_reason == b.finish_reason


def test_the_head_is_the_likeliest_tokens_whatever_was_sampled(vllm_server: VllmServer) -> None:
    outside = 0
    for choice in generate(vllm_server, True, n=8, seed=5):
        assert choice.heads is not None
        assert len(choice.token_ids) == len(choice.logprobs) == len(choice.heads)
        for token, logprob, head in zip(choice.token_ids, choice.logprobs, choice.heads, strict=True):
            assert len(head) == HEAD
            if token not in head:
                outside += 1
                assert logprob <= min(head.values()) + 1e-6
            else:
                assert head[token] == pytest.approx(logprob, abs=1e-6)
    assert outside > 0, "a random model samples outside its four likeliest tokens"


def test_each_sequence_of_a_coalesced_request_has_its_own_seed(vllm_server: VllmServer) -> None:
    choices = generate(vllm_server, True, n=8, seed=3)
    assert len({tuple(c.token_ids) for c in choices}) > 1
    again = generate(vllm_server, True, n=8, seed=3)
    assert [c.token_ids for c in choices] == [c.token_ids for c in again]
