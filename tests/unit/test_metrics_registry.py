"""The registry against the specification's list of metrics, and against what runs log."""

import asyncio
import re

import numpy as np
import pytest

from slipstream.metrics.registry import METRICS, find
from slipstream.rollout.types import ZERO_STD, GroupResult
from tests.generation_server import Answer, GenerationServer
from tests.learner_replay import ReplayTrainer, made_up_group, replay_config
from tests.metric_names import MISSING, logged
from tests.moe import model_of
from tests.rollout_double import EOS, Double, FrequentReports, TwoTurns

# the specification's page, in its order: name, unit, what becomes of a window's observations. By hand, from its words.
PAGE = """
num_tokens | tokens | latest
completions/mean_length | tokens | mean over rollouts
completions/min_length | tokens | min
completions/max_length | tokens | max
completions/mean_terminated_length | tokens | mean over rollouts
completions/min_terminated_length | tokens | min
completions/max_terminated_length | tokens | max
completions/clipped_ratio | 0 to 1 | mean over rollouts
completions/duplicate_frac | 0 to 1 | mean over rollouts
tools/call_frequency | calls | mean over rollouts
tools/failure_frequency | 0 to 1 | mean over calls
rewards/{reward_func_name}/mean | reward | mean over samples
rewards/{reward_func_name}/group_std | reward | mean over samples
reward | reward | mean over scored rollouts
reward_group_std | reward | mean over samples
reward_kept | reward | mean over samples
reward_dropped | reward | mean over groups
frac_reward_zero_std | 0 to 1 | mean over groups
sampling/sampling_logp_difference/mean | nats | mean over trained tokens
sampling/sampling_logp_difference/max | nats | max
sampling/importance_sampling_ratio/min | | min
sampling/importance_sampling_ratio/mean | | mean over trained tokens
sampling/importance_sampling_ratio/max | | max
sampling/masked_mean | 0 to 1 | mean over trained tokens
sampling/sampler_mass | 0 to 1 | mean over trained tokens
entropy | nats | mean over trained tokens
aux_loss | | mean over rows
clip_ratio/region_mean | 0 to 1 | mean over trained tokens
clip_ratio/low_mean | 0 to 1 | mean over trained tokens
clip_ratio/low_min | 0 to 1 | min
clip_ratio/high_mean | 0 to 1 | mean over trained tokens
clip_ratio/high_max | 0 to 1 | max
rollout/duration_s | s | mean over rollouts
rollout/generated_tokens_per_s | tokens/s | rate
rollout/concurrency | rollouts | mean over reports
rollout/concurrency_cap | rollouts | mean over reports
rollout/turns_mean | turns | mean over rollouts
rollout/turns_max | turns | max
rollout/samples_per_rollout | samples | mean over rollouts
rollout/fork_frac | 0 to 1 | mean over turn changes
rollout/drift_tokens_mean | tokens | mean over turn changes
rollout/drift_tokens_max | tokens | max
rollout/score_queue_size | groups | mean over reports
rollout/queue_size | samples | mean over sightings
rollout/score_s | s | mean over groups
rollout/score_wait_s | s | mean over groups
rollout/score_block_s | s | mean over groups
rollout/backpressure_s | s | mean over waits
rollout/vllm_retry_count | requests | sum
rollout/vllm_kv_cache_usage_frac | 0 to 1 | mean over polls
rollout/vllm_running_requests | requests | mean over polls
rollout/vllm_queued_requests | requests | mean over polls
rollout/vllm_preemption_count | requests | sum
tools/latency_s | s | mean over calls
tools/{tool_name}/latency_s | s | mean over calls
tools/{tool_name}/call_count | calls | sum
tools/{tool_name}/failure_count | calls | sum
tools/unknown_name_count | calls | sum
tools/parallel_calls_mean | calls | mean over messages
tools/loop_exhausted_frac | 0 to 1 | mean over rollouts
env/reset_s | s | mean over rollouts
env/reward_s | s | mean over rollouts
sample/forwarded_tokens_mean | tokens | mean over samples
sample/forwarded_tokens_max | tokens | max
sample/trained_tokens_mean | tokens | mean over samples
sample/time_in_queue_s | s | mean over samples
sample/staleness_mean | weight updates | mean over samples
sample/staleness_max | weight updates | max
sample/dropped_stale_count | samples | sum
batch/forwarded_tokens_per_step | tokens | mean over steps
batch/trained_tokens_per_step | tokens | mean over steps
batch/samples_per_step | samples | mean over steps
batch/groups_per_step | groups | mean over steps
batch/microbatches_per_step | micro-batches | mean over steps
batch/masked_token_frac | 0 to 1 | mean over forwarded tokens
batch/samples_per_row | samples | mean over rows
batch/row_tokens_mean | tokens | mean over rows
batch/row_tokens_max | tokens | max
batch/row_fill_frac | 0 to 1 | mean over rows
batch/row_imbalance | | mean over micro-batches
batch/packing_ratio | | mean over forwarded tokens
batch/pad_frac | 0 to 1 | mean over steps
batch/dropped_oversize_count | samples | sum
perf/step_s | s | mean over steps
perf/fwd_bwd_s | s | mean over steps
perf/fwd_s | s | mean over steps
perf/optimizer_s | s | mean over steps
perf/rollout_wait_s | s | mean over steps
perf/weight_sync_s | s | mean over deliveries
perf/weight_sync_pause_s | s | mean over deliveries
perf/weight_sync_barrier_s | s | mean over deliveries
perf/weight_sync_transfer_s | s | mean over deliveries
perf/fwd_bwd_forwarded_tokens_per_s | tokens/s | rate
perf/wall_clock_forwarded_tokens_per_s | tokens/s | rate
perf/wall_clock_trained_tokens_per_s | tokens/s | rate
perf/fwd_bwd_mfu | 0 to 1 | rate
perf/wall_clock_mfu | 0 to 1 | rate
"""
SPECIFIED = [tuple(cell.strip() for cell in line.split("|")) for line in PAGE.strip().splitlines()]
OURS = {
    "loss",
    "grad_norm",
    "learning_rate",
    "epoch",
    "reward_seen_min",
    "reward_seen_max",
    "rollout/backpressure_frac",
    "perf/save_s",
    "sample/dropped_{reason}_count",
    "eval/reward",
    "eval/reward_std",
    "eval/rewards/{reward_func_name}",
    "eval/mean_length",
    "eval/clipped_ratio",
    "eval/prompts",
}

# logged by no run of the tests
NOT_YET = {"tools": "the trainer refuses tools", "environment": "the trainer refuses an environment"}
# logged by the run on a real server in tests/integration/test_concurrency_real.py
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
    assert len(SPECIFIED) == len({name for name, _, _ in SPECIFIED}) == 97
    found = {(m.name, m.unit, f"mean over {m.over}" if m.over else m.reduction) for m in METRICS if not m.own}
    assert found == set(SPECIFIED)
    assert {metric.name for metric in METRICS if metric.own} == OURS
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
    if expected and not metric.latest:
        assert metric.reduction == expected
    assert bool(metric.over) == (metric.reduction == "mean")
    assert metric.meaning.endswith(".")


def test_names_with_placeholders() -> None:
    assert find("rewards/accuracy/mean").name == "rewards/{reward_func_name}/mean"
    assert find("sample/dropped_zero_std_count").own
    assert find("sample/dropped_stale_count").name == "sample/dropped_stale_count"
    assert find("rewards/accuracy/median") is None


@pytest.fixture(scope="module")
def trainer_windows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Windows of a replayed training of a mixture of experts, on a device whose peak is known."""
    groups = [made_up_group(number, 3, 5, 8) for number in range(8)]
    for group in groups:
        for sample in group.samples:
            sample.queued_at, sample.rewards_by_name = 1.0, {"length": (sample.reward, 0.5)}
    groups[1] = GroupResult(1, 0, 1, 1, [], {ZERO_STD: 3})
    saving = {"save_strategy": "steps", "save_steps": 1}
    config = replay_config(tmp_path_factory.mktemp("run"), gradient_accumulation_steps=2, logging_steps=2, **saving)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slipstream.learner.trainer.device_peak", lambda args, dtype: 1e12)
        trainer = ReplayTrainer(model_of("qwen3_moe"), config, groups, 64)
    trainer.train()
    windows = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert windows[-1]["num_tokens"] == trainer.state.num_input_tokens_seen > 0
    return windows


def test_what_the_trainer_logs(trainer_windows: list[dict[str, float]]) -> None:
    names = set().union(*trainer_windows) - {"step"}
    missing = MISSING - {"moe", "peak FLOPs"}
    logged(names, missing, lambda name: not measured_by_rollouts(name) and name not in WITHOUT_SERVER)
    assert all(np.isfinite(value) for window in trainer_windows for value in window.values())


@pytest.fixture(scope="module")
def loop_values() -> dict[str, float]:
    """What the rollout loop measures, with an evaluation."""

    def script(body, index):
        # every fourth prompt has the same answer three times
        same = (index // 3) % 4 == 0
        ids = [97] * (1 if same else 1 + body["sampling_params"]["seed"] % 5) + [EOS]
        return Answer(ids, [("run/a1/0", 0, len(ids))])

    server = GenerationServer(script)
    server.metrics = load_text(0.1, 2, 0, 7)
    held_out = [{"prompt": [{"role": "user", "content": "z"}]}]

    async def run() -> Double:
        async with Double(server, 12, TwoTurns, {"eval_dataset": held_out}) as double:
            await double.until(lambda: double.ended, "the end of the data")
            await double.until(lambda: "rollout/vllm_running_requests" in double.window.peek(), "a poll")
            double.ask("evaluate", 1)
            await double.until(lambda: double.evaluations, "the evaluation")
            return double

    double = asyncio.run(run())
    evaluation = {f"eval/{name}": value for name, value in double.evaluations[0].metrics.items()}
    return double.window.reduce() | evaluation


def test_what_the_rollout_loop_reports(loop_values: dict[str, float]) -> None:
    logged(set(loop_values), MISSING - {"eval"}, lambda name: measured_by_rollouts(name) or name.startswith("eval/"))
    assert loop_values["rollout/fork_frac"] == 1
    assert loop_values["rollout/drift_tokens_max"] >= 2
    assert loop_values["rollout/vllm_kv_cache_usage_frac"] == pytest.approx(0.1)
    assert loop_values["rollout/vllm_preemption_count"] == 0, "what the server counted before is not this run's"


def test_every_metric_is_logged_somewhere(
    trainer_windows: list[dict[str, float]], loop_values: dict[str, float]
) -> None:
    names = set().union(*trainer_windows, loop_values) - {"step"}
    found = {entry.name for name in names if (entry := find(name)) is not None}
    expected = {metric.name for metric in METRICS if metric.needs not in NOT_YET}
    assert expected - found == WITHOUT_SERVER


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
