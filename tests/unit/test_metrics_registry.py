"""The registry against the specification's list of metrics, and against what runs log."""

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

from slipstream.metrics.registry import METRICS, find
from tests.generation_server import Answer, GenerationServer
from tests.learner_replay import ReplayTrainer, made_up_group, replay_config, tiny_model
from tests.metric_names import MISSING, logged
from tests.rollout_double import EOS, Double, FrequentReports, TwoTurns

# the specification's page, in its order
PAGE = """
num_tokens
completions/mean_length completions/min_length completions/max_length completions/mean_terminated_length
completions/min_terminated_length completions/max_terminated_length completions/clipped_ratio completions/duplicate_frac
tools/call_frequency tools/failure_frequency
rewards/{reward_func_name}/mean rewards/{reward_func_name}/group_std
reward reward_group_std reward_kept reward_dropped frac_reward_zero_std
sampling/sampling_logp_difference/mean sampling/sampling_logp_difference/max
sampling/importance_sampling_ratio/min sampling/importance_sampling_ratio/mean sampling/importance_sampling_ratio/max
sampling/masked_mean sampling/sampler_mass entropy aux_loss
clip_ratio/region_mean clip_ratio/low_mean clip_ratio/low_min clip_ratio/high_mean clip_ratio/high_max
rollout/duration_s rollout/generated_tokens_per_s rollout/concurrency rollout/concurrency_cap
rollout/turns_mean rollout/turns_max rollout/samples_per_rollout rollout/fork_frac
rollout/drift_tokens_mean rollout/drift_tokens_max rollout/score_queue_size rollout/queue_size
rollout/score_s rollout/score_wait_s rollout/score_block_s rollout/backpressure_s rollout/vllm_retry_count
rollout/vllm_kv_cache_usage_frac rollout/vllm_running_requests rollout/vllm_queued_requests rollout/vllm_preemption_count
tools/latency_s tools/{tool_name}/latency_s tools/{tool_name}/call_count tools/{tool_name}/failure_count
tools/unknown_name_count tools/parallel_calls_mean tools/loop_exhausted_frac
env/reset_s env/reward_s
sample/forwarded_tokens_mean sample/forwarded_tokens_max sample/trained_tokens_mean sample/time_in_queue_s
sample/staleness_mean sample/staleness_max sample/dropped_stale_count
batch/forwarded_tokens_per_step batch/trained_tokens_per_step batch/samples_per_step batch/groups_per_step
batch/microbatches_per_step batch/masked_token_frac batch/samples_per_row batch/row_tokens_mean batch/row_tokens_max
batch/row_fill_frac batch/row_imbalance batch/packing_ratio batch/pad_frac batch/dropped_oversize_count
perf/step_s perf/fwd_bwd_s perf/fwd_s perf/optimizer_s perf/rollout_wait_s
perf/weight_sync_s perf/weight_sync_pause_s perf/weight_sync_barrier_s perf/weight_sync_transfer_s
perf/fwd_bwd_forwarded_tokens_per_s perf/wall_clock_forwarded_tokens_per_s perf/wall_clock_trained_tokens_per_s
perf/fwd_bwd_mfu perf/wall_clock_mfu
"""
SPECIFIED = PAGE.split()

# what neither a replayed run (no server, no evaluation) nor the rollout loop alone can log
WITHOUT_SERVER = {
    "perf/weight_sync_s",
    "perf/weight_sync_pause_s",
    "perf/weight_sync_barrier_s",
    "perf/weight_sync_transfer_s",
}
ROLLOUT_PROCESS = ("rollout/", "completions/")
ROLLOUT_PROCESS_NAMES = {"reward", "reward_dropped", "frac_reward_zero_std", "reward_seen_min", "reward_seen_max"}
BY_THE_FEED = {"rollout/queue_size"}


def measured_by_rollouts(name: str) -> bool:
    return (name.startswith(ROLLOUT_PROCESS) or name in ROLLOUT_PROCESS_NAMES) and name not in BY_THE_FEED


def test_it_is_the_specification_s_list_and_what_is_marked_as_our_own() -> None:
    assert len(SPECIFIED) == len(set(SPECIFIED))
    assert {metric.name for metric in METRICS if not metric.own} == set(SPECIFIED)
    assert len(METRICS) == len({metric.name for metric in METRICS})


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_units_follow_the_names(metric) -> None:
    last = metric.name.rsplit("/", 1)[-1]
    if last.endswith("tokens_per_s"):
        assert (metric.unit, metric.reduction) == ("tokens/s", "rate")
    elif last.endswith("_s"):
        assert metric.unit == "s"
    if last.endswith("_frac") or last.startswith("frac_"):
        assert metric.unit == "0 to 1"
    words = re.split("_", last)
    expected = "sum" if "count" in words else "max" if "max" in words else "min" if "min" in words else None
    if expected:
        assert metric.reduction == expected
    assert metric.meaning.endswith(".")


def test_names_with_placeholders() -> None:
    assert find("rewards/accuracy/mean").name == "rewards/{reward_func_name}/mean"
    assert find("sample/dropped_zero_std_count").own
    assert find("sample/dropped_stale_count").name == "sample/dropped_stale_count"
    assert find("rewards/accuracy/median") is None


def test_what_the_trainer_logs(tmp_path: Path) -> None:
    groups = [made_up_group(number, 3, 5, 8) for number in range(8)]
    for group in groups:
        for sample in group.samples:
            sample.queued_at, sample.rewards_by_name = 1.0, {"length": (sample.reward, 0.5)}
    config = replay_config(tmp_path, gradient_accumulation_steps=2, logging_steps=2)
    trainer = ReplayTrainer(tiny_model(), config, groups, 64)
    trainer.train()
    windows = [entry for entry in trainer.state.log_history if "loss" in entry]
    names = set().union(*windows) - {"step"}
    logged(names, MISSING, lambda name: not measured_by_rollouts(name) and name not in WITHOUT_SERVER)
    assert all(np.isfinite(value) for window in windows for value in window.values())
    assert windows[-1]["num_tokens"] == trainer.state.num_input_tokens_seen > 0


def test_what_the_rollout_loop_reports() -> None:
    def script(body, index):
        ids = [97] * (1 + body["sampling_params"]["seed"] % 5) + [EOS]
        return Answer(ids, [("run/a1/0", 0, len(ids))])

    server = GenerationServer(script)
    server.metrics = load_text(0.1, 2, 0, 7)

    async def run() -> Double:
        async with Double(server, 12, TwoTurns) as double:
            await double.until(lambda: double.ended, "the end of the data")
            await double.until(
                lambda: {"rollout/vllm_running_requests", "rollout/duration_s"} <= set(double.window.peek()),
                "a report",
            )
            return double

    double = asyncio.run(run())
    values = double.window.reduce()
    logged(set(values), MISSING, measured_by_rollouts)
    assert values["rollout/fork_frac"] == 1
    assert values["rollout/drift_tokens_max"] >= 2
    assert values["rollout/vllm_kv_cache_usage_frac"] == pytest.approx(0.1)
    assert values["rollout/vllm_preemption_count"] == 0, "what the server counted before is not this run's"


def load_text(usage: float, running: int, waiting: int, preemptions: int) -> str:
    labels = '{engine="0",model_name="m"}'
    pairs = {
        "kv_cache_usage_perc": usage,
        "num_requests_running": running,
        "num_requests_waiting": waiting,
        "num_preemptions_total": preemptions,
    }
    return "".join(f"vllm:{name}{labels} {float(value)}\n" for name, value in pairs.items())


# ---- the concurrency limit in the loop


def counting(body, index):
    ids = [97] * (index + 1) + [EOS]
    return Answer(ids, [("run/a1/0", 0, len(ids))])


def test_the_cap_comes_down_with_the_server_s_load_and_up_again() -> None:
    """Sixteen groups may run at first; the load falls only after the cap has come down."""
    server = GenerationServer(counting)
    server.metrics = load_text(0.95, 48, 3, 5)
    caps = []

    async def run() -> None:
        # 48 * 64 tokens of cache at 64 a request
        async with Double(server, 40, FrequentReports, {"kv_cache_tokens": 48 * 64, "end": None}) as double:
            assert double.loop._cap.cap == 48
            await double.until(lambda: double.loop._cap.cap < 30, "two cuts")
            caps.append(double.loop._cap.cap)
            server.metrics = load_text(0.3, 5, 0, 9)
            await double.until(lambda: double.loop._cap.cap > caps[0], "growth")
            caps.append(double.loop._cap.cap)
            count = len(double.groups)
            await double.until(lambda: len(double.groups) > count + 20, "more groups")
            await double.until(
                lambda: double.window.peek().get("rollout/vllm_preemption_count") == 4, "the preemptions"
            )

    asyncio.run(run())
    assert caps[1] > caps[0] >= 3
    assert server.peak <= 48


def test_without_metrics_it_is_max_concurrent_rollouts() -> None:
    server = GenerationServer(counting)

    async def run() -> Double:
        async with Double(server, 20, FrequentReports, max_concurrent_rollouts=7) as double:
            await double.until(lambda: double.ended, "the end of the data")
            await double.until(lambda: "rollout/concurrency_cap" in double.window.peek(), "a report")
            return double

    values = asyncio.run(run()).window.reduce()
    assert values["rollout/concurrency_cap"] == 7
    assert server.peak <= 7
    assert not any(name.startswith("rollout/vllm_kv") for name in values)


def test_backpressure_is_the_wait_for_training_and_not_for_the_cap() -> None:
    server = GenerationServer(counting)

    async def run(**config) -> dict[str, float]:
        async with Double(server, 30, FrequentReports, **config) as double:
            await double.until(
                lambda: double.window.peek().get("rollout/backpressure_frac", 0) > 0.2 or double.ended, "backpressure"
            )
            double.allowance.value = 10**9
            await double.until(lambda: double.ended, "the end of the data")
            await double.until(lambda: "rollout/backpressure_s" in double.window.peek(), "a report")
            if "allowance" in config:
                await double.until(lambda: double.window.peek()["rollout/backpressure_s"] > 0.01, "the wait")
            return double.window.peek()

    held = asyncio.run(run(allowance=40))
    assert held["rollout/backpressure_s"] > 0.01
    capped = asyncio.run(run(max_concurrent_rollouts=3))  # one group at a time
    assert capped["rollout/backpressure_s"] == 0
    assert capped["rollout/backpressure_frac"] == 0
