"""Verdict and saturation, row by row."""

import pytest

from slipstream.metrics.verdict import (
    COLLAPSE,
    HEALTHY,
    MIXTURE,
    NOT_RANDOM,
    REGRESSION,
    SATURATED,
    STUCK,
    Limits,
    diagnose,
    duplicates,
    saturation,
    verdict,
)

LIMITS = Limits(max_staleness=4, max_concurrent_rollouts=64, num_generations=8)


def window(wait=0.0, held=0.0, **others):
    """A step of ten seconds, of which training waited `wait` and generation `held`."""
    names = {name.replace("__", "/"): value for name, value in others.items()}
    return {
        "perf/step_s": 10.0,
        "perf/rollout_wait_s": wait,
        "rollout/backpressure_s": held,
        "rollout/queue_size": 3,
        **names,
    }


@pytest.mark.parametrize(
    ("wait", "held", "kind", "said"),
    [
        (0.0, 0.0, "balanced", "waits 0%"),
        (0.9, 0.9, "balanced", "waits 9%"),
        (6.0, 0.0, "generation-bound", "training waits 60% of the time for rollouts; 3 samples are queued"),
        (0.5, 7.0, "trainer-bound", "generation waits 70% of the time for training, 4 steps ahead"),
        (4.0, 5.0, "held by max_staleness", "raise max_staleness (now 4)"),
    ],
)
def test_which_side_waits(wait, held, kind, said):
    found = verdict(window(wait, held), LIMITS)
    assert found is not None
    assert found.kind == kind
    assert said in str(found)
    assert str(found).startswith(f"{kind}: ")


def test_the_share_of_time_goes_before_the_mean_wait():
    """A mean of short waits says little about the time they take together."""
    found = verdict({**window(0.0, 0.05), "rollout/backpressure_frac": 0.8}, LIMITS)
    assert found is not None
    assert found.kind == "trainer-bound"


@pytest.mark.parametrize("missing", ["perf/step_s", "perf/rollout_wait_s", "rollout/backpressure_s"])
def test_no_verdict_without_both_sides(missing):
    values = window(5.0, 5.0)
    del values[missing]
    assert verdict(values, LIMITS) is None


CAPPED = {"rollout__concurrency": 20, "rollout__concurrency_cap": 24}


@pytest.mark.parametrize(
    ("values", "knob"),
    [
        (CAPPED, "server's load limits it to 24 rollouts"),
        (
            {"rollout__concurrency": 60, "rollout__concurrency_cap": 64, "rollout__vllm_kv_cache_usage_frac": 0.2},
            "raise it",
        ),
        (
            {"rollout__concurrency": 60, "rollout__concurrency_cap": 64, "rollout__vllm_kv_cache_usage_frac": 0.7},
            "more GPUs",
        ),
        ({"rollout__concurrency": 8, "rollout__concurrency_cap": 64}, "lower max_completion_length"),
        ({**CAPPED, "rollout__score_queue_size": 2}, "reward functions faster"),
        ({**CAPPED, "frac_reward_zero_std": 0.9}, "see the saturation diagnosis"),
        ({**CAPPED, "sample__dropped_stale_count": 40, "batch__samples_per_step": 16}, "too old when they arrived"),
        ({**CAPPED, "sample__dropped_stale_count": 8, "batch__samples_per_step": 16}, "server's load limits it"),
        ({**CAPPED, "sample__dropped_oversize_count": 3}, "raise token_budget"),
        ({**CAPPED, "sample__dropped_failed_count": 3}, "3 rollouts failed to be generated"),
    ],
)
def test_what_holds_generation(values, knob):
    found = verdict(window(8.0, **values), LIMITS)
    assert found is not None
    assert found.kind == "generation-bound"
    assert knob in found.advice


# ---- saturation


def line(begin, end, count=30):
    """A straight line over the history."""
    return [begin + (end - begin) * i / (count - 1) for i in range(count)]


def history(zero_std, dropped, reward, **others):
    series = {"frac_reward_zero_std": zero_std, "reward_dropped": dropped, "reward": reward, **others}
    count = max(len(values) for values in series.values())
    series["reward_seen_min"], series["reward_seen_max"] = [0.0] * count, [1.0] * count
    return [{name: values[i] for name, values in series.items() if i < len(values)} for i in range(count)]


@pytest.mark.parametrize(
    ("zero_std", "dropped", "reward", "kind", "advice"),
    [
        (line(0.1, 0.3), line(1.0, 0.0), line(0.2, 0.6), HEALTHY, ""),
        (line(0.2, 0.3), line(0.9, 0.9), line(0.5, 0.5), HEALTHY, ""),
        (line(0.1, 0.9), line(0.6, 0.95), line(0.4, 0.95), SATURATED, "harder prompts"),
        ([0.9], [0.95], [0.95], SATURATED, "harder prompts"),  # from the first window on
        (line(0.9, 0.9), line(0.05, 0.05), line(0.1, 0.1), STUCK, "Read some completions"),
        ([1.0], [0.0], [0.0], STUCK, "Read some completions"),
        (line(0.6, 0.6), line(0.2, 0.2), line(0.6, 0.6), MIXTURE, "Read the rollouts"),  # others get much: not stuck
        (line(0.2, 0.8), line(0.9, 0.1), line(0.8, 0.2), REGRESSION, "duplicate_frac and entropy"),
        (line(0.1, 0.4), line(0.9, 0.1), line(0.8, 0.2), REGRESSION, "duplicate_frac and entropy"),  # early
        (line(0.8, 0.8), line(0.5, 0.5), line(0.2, 0.9), MIXTURE, "Read the rollouts"),
        (line(0.8, 0.8), line(0.5, 0.5), line(0.9, 0.2), MIXTURE, "Read the rollouts"),
    ],
)
def test_the_table_of_saturation(zero_std, dropped, reward, kind, advice):
    found = saturation(history(zero_std, dropped, reward))
    assert found is not None
    assert found.kind == kind
    assert advice in found.advice


def test_completions_that_are_cut_off_come_first_where_nothing_passes():
    windows = history(line(0.9, 0.9), line(0, 0), line(0, 0), **{"completions/clipped_ratio": line(0.8, 0.8)})
    found = saturation(windows)
    assert found is not None
    assert found.kind == STUCK
    assert "80% of the completions are cut off" in found.advice


def test_levels_are_read_against_the_reward_s_range():
    """Stuck at -9 of -10 to -1 is the bottom, though it is a tenth of the range above it; at 90 of 0 to 100 the top."""
    low = [{**w, "reward_seen_min": -10.0, "reward_seen_max": -1.0} for w in history([0.9], [-9.0], [-8.5])]
    high = [{**w, "reward_seen_max": 100.0} for w in history([0.9], [90.0], [92.0])]
    assert [saturation(w).kind for w in (low, high)] == [STUCK, SATURATED]
    assert saturation(high, (0.0, 1000.0)).kind == STUCK


def test_rewards_that_were_never_different():
    """A range of nothing is taken as 0 to 1."""
    always = [
        {"frac_reward_zero_std": 1.0, "reward": v, "reward_dropped": v, "reward_seen_min": v, "reward_seen_max": v}
        for v in (0.0, 1.0)
    ]
    assert [saturation([w]).kind for w in always] == [STUCK, SATURATED]


def test_groups_that_no_function_scores():
    found = saturation([{"frac_reward_zero_std": 1.0, "reward": 0.5}])
    assert found is not None
    assert found.kind == "unscored"


def test_without_a_group_there_is_nothing_to_say():
    assert saturation([]) is None
    assert saturation([{"loss": 1.0}]) is None
    assert diagnose([{"loss": 1.0}], 8) == ""


# ---- duplicates


@pytest.mark.parametrize(
    ("share", "entropy", "kind"),
    [
        (line(0.0, 0.02), line(1.0, 0.9), HEALTHY),
        (line(0.1, 0.1), line(1.0, 0.2), HEALTHY),  # short answers repeat by chance
        (line(0.875, 0.875), line(1.0, 1.0), NOT_RANDOM),  # 7/8, from the start
        ([0.0] * 10 + [0.87] * 10, line(1.0, 1.0, 20), NOT_RANDOM),  # a jump
        (line(0.0, 0.6), line(1.0, 0.3), COLLAPSE),
        (line(0.0, 0.87), line(1.0, 0.01), COLLAPSE),  # all copies in the end, but slowly
    ],
)
def test_the_table_of_duplicates(share, entropy, kind):
    windows = [{"completions/duplicate_frac": d, "entropy": e} for d, e in zip(share, entropy, strict=True)]
    found = duplicates(windows, 8)
    assert found is not None
    assert found.kind == kind


def test_both_diagnoses_in_one_text():
    copies = [{"frac_reward_zero_std": 1.0, "reward": 0.0, "reward_dropped": 0.0, "completions/duplicate_frac": 0.75}]
    text = diagnose(copies, 4)
    assert text.startswith(STUCK)
    assert NOT_RANDOM in text
    healthy = [{"frac_reward_zero_std": 0.1, "reward": 0.5, "completions/duplicate_frac": 0.0}]
    assert diagnose(healthy, 4) == "healthy: 90% of the groups give a gradient."
