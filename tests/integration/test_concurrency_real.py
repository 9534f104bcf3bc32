"""The concurrency limit against a real server whose KV cache is far too small for what it is asked."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.rollout.concurrency import SHRINKAGE, ServerLoad
from slipstream.run_folder import read_jsonl
from slipstream.serving.labels import make_label
from slipstream.serving.probe import probe
from tests.learner_process import finish, learner, learner_run, write_prompts
from tests.metric_names import MISSING, logged
from tests.models import SPECIALS, byte_tokenizer
from tests.rollout_double import Double, FrequentReports, Running
from tests.serving_process import MAX_MODEL_LEN, VllmServer, new_run, serving

pytestmark = pytest.mark.integration

BLOCKS, BLOCK_SIZE = 96, 32


@pytest.fixture(scope="module")
def small_server(tiny_model_tied: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server that holds 3,072 tokens, and decodes up to 32 requests at once."""
    run = new_run(
        tmp_path_factory.mktemp("runs"),
        tiny_model_tied,
        "small",
        max_num_seqs=32,
        extra_args=["--num-gpu-blocks-override", str(BLOCKS)],
    )
    with serving(run, tiny_model_tied) as server, server.control() as control:
        control.set_weight_version(make_label("run", 1, 0))
        yield server


class PollsOften(FrequentReports):
    server_poll_s = 0.25


def double(server: VllmServer, kv_cache_tokens: int | None) -> Double:
    """Endless prompts with answers of about 170 tokens, in groups of four."""
    return Double(
        Running(server.base_url, str(server.model)),
        20,
        PollsOften,
        {"end": None, "max_model_len": MAX_MODEL_LEN, "kv_cache_tokens": kv_cache_tokens},
        byte_tokenizer(),
        [SPECIALS.index("<|im_end|>")],
        vllm_server_token_file=str(server.token_file),
        num_generations=4,
        max_concurrent_rollouts=64,
        max_completion_length=256,
    )


def test_it_starts_at_what_the_cache_holds_at_full_length_and_grows(small_server: VllmServer) -> None:
    with small_server.control() as control:
        tokens = probe(control).kv_cache_tokens
    assert tokens == BLOCKS * BLOCK_SIZE

    async def run() -> None:
        async with double(small_server, tokens) as loop:
            assert loop.loop._cap.cap == tokens // MAX_MODEL_LEN == 6
            await loop.until(lambda: loop.loop._cap.cap > 6, "growth")

    asyncio.run(run())


def test_it_comes_down_while_the_cache_is_full_and_the_run_goes_on(small_server: VllmServer) -> None:
    """The loop is not told the size of the cache, so it starts at 64 rollouts, of which 32 run: the server preempts."""
    cuts: list[tuple[float, int, int]] = []

    async def run() -> None:
        async with double(small_server, None) as loop:
            cap, observe = loop.loop._cap, loop.loop._cap.observe

            def watched(load: ServerLoad | None, in_flight: int) -> int:
                before = cap.cap
                after = observe(load, in_flight)
                if after < before:
                    assert load is not None
                    cuts.append((load.kv_usage, before, after))
                return after

            cap.observe = watched  # type: ignore[method-assign]
            await loop.until(lambda: loop.window.peek().get("rollout/vllm_preemption_count", 0) > 0, "a preemption")
            await loop.until(lambda: len(cuts) >= 2, "the second cut, once the first had its effect")
            count = len(loop.groups)
            await loop.until(lambda: len(loop.groups) >= count + 8, "more groups")
            assert sum(len(group.samples) for group in loop.groups) > 0

    asyncio.run(run())
    assert cuts[0][1:] == (64, 44)
    # a calm poll between two cuts may add to it
    assert all(after == int(before * SHRINKAGE) for _, before, after in cuts)
    assert all(usage > 0.8 for usage, _, _ in cuts)


def test_a_run_on_it_logs_every_metric_and_says_what_holds_it(small_server: VllmServer, tmp_path: Path) -> None:
    data = write_prompts(tmp_path / "train.jsonl", 200)
    settings = {"max_steps": 12, "max_completion_length": 64, "report_to": ["tensorboard"]}
    run = learner_run(tmp_path / "runs", "small", small_server, data, **settings)
    with learner(run, 1) as leader:
        finish(run, leader, 1)
    windows = [line for line in read_jsonl(run.records(1) / "metrics.jsonl") if "loss" in line]
    assert len(windows) == 12
    names = {name for line in windows for name, value in line.items() if isinstance(value, float | int)}
    logged(names - {"step", "time", "attempt"}, MISSING | {"several turns"})
    assert list((run.trackers / "tensorboard").glob("events.*"))
    assert [line["step"] for line in windows if "verdict" in line], "no window says what holds the run up"
    assert all(isinstance(line["saturation"], str) for line in windows if "saturation" in line)
    assert max(line.get("rollout/concurrency_cap", 0) for line in windows) <= 64
