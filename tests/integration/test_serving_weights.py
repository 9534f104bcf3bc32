"""Weights reach the real server: what it generates afterwards is the new policy's, to 1e-4."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.serving.transport import SlipstreamTransport
from tests.models import new_model
from tests.serving_process import (
    VllmServer,
    delivery,
    largest_difference,
    load,
    logprobs_of,
    reference_logprobs,
    wait_for,
)

pytestmark = pytest.mark.integration
PROMPT = list(range(10, 90))  # more than two cache blocks of 32 tokens
TOLERANCE = 1e-4
FAR = 0.1  # different weights are told apart by far more than the tolerance


@pytest.fixture(scope="module")
def transport(vllm_server: VllmServer) -> Iterator[SlipstreamTransport]:
    with vllm_server.control() as control:
        transport = SlipstreamTransport(control, torch.device("cpu"), "weights", 1, 60.0, bucket_bytes=40_000)
        transport.connect()
        yield transport
        transport.close()


def test_server_and_transformers_agree_before_and_after_syncs(
    vllm_server: VllmServer, transport: SlipstreamTransport
) -> None:
    first, second = load(vllm_server.model), new_model(tied=True, seed=1)
    assert second.config.tie_word_embeddings
    for version, (model, other) in enumerate([(first, second), (second, first), (first, second)]):
        times = transport.send(*delivery(model), label=f"weights/a1/{version}")
        assert 0 < times.pause_s + times.transfer_s <= times.total_s
        for temperature in (1.0, 0.7):
            choice = vllm_server.generate(PROMPT, temperature=temperature)
            assert largest_difference(choice, model, PROMPT, temperature) < TOLERANCE
            assert largest_difference(choice, other, PROMPT, temperature) > FAR
            assert choice["weight_versions"] == [{"version": f"weights/a1/{version}", "start": 0, "end": 16}]


def test_a_prompt_cached_before_a_sync_is_computed_with_the_new_weights(
    vllm_server: VllmServer, transport: SlipstreamTransport
) -> None:
    old, new = new_model(tied=True, seed=2), new_model(tied=True, seed=3)
    transport.send(*delivery(old), label="weights/a1/10")
    vllm_server.generate(PROMPT, max_tokens=1)
    hits = cache_hits(vllm_server)
    vllm_server.generate(PROMPT, max_tokens=1)
    assert cache_hits(vllm_server) > hits  # the prompt was cached indeed
    transport.send(*delivery(new), label="weights/a1/11")
    assert largest_difference(vllm_server.generate(PROMPT), new, PROMPT) < TOLERANCE


def cache_hits(server: VllmServer) -> float:
    with server.control() as control:
        lines = [line for line in control.metrics().splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    assert lines
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_a_request_in_flight_changes_policy_where_its_label_does(
    vllm_server: VllmServer, transport: SlipstreamTransport
) -> None:
    old, new = new_model(tied=True, seed=4), new_model(tied=True, seed=5)

    def caught(first: int) -> dict[str, Any]:
        """What a request got between two deliveries, the second of which came in the middle of it."""
        transport.send(*delivery(old), label=f"weights/a1/{first}")
        with vllm_server.control() as control:
            before = generated(control.metrics())
        answer: dict[str, Any] = {}
        thread = threading.Thread(target=lambda: answer.update(vllm_server.generate(PROMPT, max_tokens=400)))
        thread.start()
        with vllm_server.control() as control:
            wait_for(lambda: generated(control.metrics()) > before + 5, "generation")
        transport.send(*delivery(new), label=f"weights/a1/{first + 1}")
        thread.join(120)
        return answer

    first, answer = 20, caught(20)
    while len(answer["weight_versions"]) == 1 and first < 26:  # it was over before: this process had to wait for a core
        first, answer = first + 2, caught(first + 2)
    spans = answer["weight_versions"]
    assert [span["version"] for span in spans] == [f"weights/a1/{first}", f"weights/a1/{first + 1}"]
    switch = spans[1]["start"]
    assert spans[0]["start"] == 0
    assert 0 < switch == spans[0]["end"] < spans[1]["end"] == 400
    got = logprobs_of(answer)
    by_old = (got - reference_logprobs(old, PROMPT, answer["token_ids"])).abs()
    by_new = (got - reference_logprobs(new, PROMPT, answer["token_ids"])).abs()
    assert by_old[:switch].max() < TOLERANCE
    assert by_new[switch:].max() < TOLERANCE  # also its prefix was computed again
    assert by_old[switch:].max() > FAR


def generated(metrics: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_weights_travel_in_the_announced_dtype(vllm_server: VllmServer, transport: SlipstreamTransport) -> None:
    model = new_model(tied=True, seed=6)
    rounded = new_model(tied=True, seed=6)
    rounded.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    parameters, tensors = delivery(model)
    announced = [type(p)(p.name, torch.bfloat16, p.shape) for p in parameters]
    transport.send(announced, tensors, label="weights/a1/30")
    assert largest_difference(vllm_server.generate(PROMPT), rounded, PROMPT) < TOLERANCE
