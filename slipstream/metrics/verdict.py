"""What a window's metrics say in plain words: which side of the pipeline holds the other up, and what the groups' rewards
mean. Pure: metrics in, sentences out.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Window = Mapping[str, float]

# A wait of less than a tenth of the time: without it a run would be at most that much faster.
HIGH_WAIT = 0.1
# Above it, new groups wait for the cap although a few rollouts have just ended.
AT_LIMIT = 0.9
# The server's cache counts as hardly used below what lets the cap grow (`slipstream.rollout.concurrency`).
LOW_CACHE = 0.6
# Most groups teach nothing.
HIGH_ZERO_STD = 0.5
# Near an end of the reward's range; the rest is the middle.
BOTTOM, MIDDLE, TOP = 0.25, 0.5, 0.75
# A change over the history, as a share of the range: smaller ones are noise of a few groups.
CHANGE = 0.1
# Windows that are needed on either side to speak of a change, and the most that "now" is averaged over.
SIDE, NOW = 2, 10
# Nearly all rollouts of each group are copies.
COPIES = 0.9
CLIPPED = 0.25


@dataclass(frozen=True)
class Limits:
    """The settings that a verdict depends on."""

    max_staleness: int
    max_concurrent_rollouts: int
    num_generations: int


@dataclass(frozen=True)
class Verdict:
    """Which side is the bottleneck. `kind` is the verdict in two words, `advice` the knob to turn."""

    kind: Literal["generation-bound", "trainer-bound", "held by max_staleness", "balanced"]
    sentence: str
    advice: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.sentence} {self.advice}".rstrip()


@dataclass(frozen=True)
class Diagnosis:
    """What the rewards of the groups say."""

    kind: str
    sentence: str
    advice: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.sentence} {self.advice}".rstrip()


HEALTHY = "healthy"
SATURATED = "saturated at the top"
STUCK = "stuck at the bottom"
REGRESSION = "regression"
MIXTURE = "mixture"
NOT_RANDOM = "sampling is not random"
COLLAPSE = "collapse"


# ---- the pipeline


def verdict(window: Window, limits: Limits) -> Verdict | None:
    """Which side waits for the other; None where the window does not say (no step, or nothing generates).

    Training waits as `perf/rollout_wait_s` of `perf/step_s`; generation waits as `rollout/backpressure_frac`, or where
    that is missing as `rollout/backpressure_s` of the step.
    """
    wait, step = window.get("perf/rollout_wait_s"), window.get("perf/step_s")
    held_s = window.get("rollout/backpressure_s")
    if wait is None or not step or held_s is None:
        return None
    waiting = min(wait / step, 1.0)
    held = window.get("rollout/backpressure_frac", min(held_s / step, 1.0))
    trains = f"training waits {waiting:.0%} of the time for rollouts"
    generates = f"generation waits {held:.0%} of the time for training"
    if waiting >= HIGH_WAIT and held >= HIGH_WAIT:
        advice = (
            f"The rollouts in flight fill the bound before their samples arrive: raise max_staleness (now "
            f"{limits.max_staleness})."
        )
        return Verdict("held by max_staleness", f"{trains}, and {generates}.", advice)
    if waiting >= HIGH_WAIT:
        queue = window.get("rollout/queue_size", 0.0)
        sentence = f"{trains}; {queue:.0f} samples are queued."
        return Verdict("generation-bound", sentence, _what_holds_generation(window, limits))
    if held >= HIGH_WAIT:
        stale = window.get("sample/staleness_mean")
        sentence = f"{generates}, {limits.max_staleness} steps ahead" + (
            f"; samples are {stale:.1f} updates old." if stale is not None else "."
        )
        advice = (
            "Expected where inference is the faster side: give the learner more of the devices, or raise token_budget "
            "if rows share little (batch/samples_per_row)."
        )
        return Verdict("trainer-bound", sentence, advice)
    return Verdict("balanced", f"{trains}, {generates}.", "")


_DROPPED = (
    ("stale", "samples were too old when they arrived and were dropped: raise max_staleness."),
    ("oversize", "samples did not fit into a row and were dropped: raise token_budget or lower max_completion_length."),
    ("failed", "rollouts failed to be generated: see the rollout process's log and rollout/vllm_retry_count."),
)


def _what_holds_generation(window: Window, limits: Limits) -> str:
    """The knob that makes more samples arrive."""
    dropped = window.get("frac_reward_zero_std", 0.0)
    if dropped >= HIGH_ZERO_STD:
        return f"{dropped:.0%} of the groups are dropped because their rewards have no spread: see the saturation diagnosis."
    trained = window.get("batch/samples_per_step", 0.0)
    for name, advice in _DROPPED:
        count = window.get(f"sample/dropped_{name}_count", 0.0)
        if count > trained:
            return f"{count:.0f} {advice}"
    if window.get("rollout/score_queue_size", 0.0) >= 1 or window.get("rollout/score_block_s", 0.0) >= 1:
        return "Groups wait to be scored (rollout/score_queue_size): make the reward functions faster or async."
    flying, cap = window.get("rollout/concurrency"), window.get("rollout/concurrency_cap")
    if flying is None or cap is None:
        return "See rollout/generated_tokens_per_s and rollout/concurrency."
    # a group starts only where all of its rollouts have room
    at_cap = flying + limits.num_generations > AT_LIMIT * cap
    if at_cap and cap < AT_LIMIT * limits.max_concurrent_rollouts:
        return (
            f"The server's load limits it to {cap:.0f} rollouts (rollout/concurrency_cap): give the server more GPUs or KV "
            "cache, or lower its max_model_len."
        )
    if at_cap and window.get("rollout/vllm_kv_cache_usage_frac", 0.0) < LOW_CACHE:
        return (
            f"It is at max_concurrent_rollouts = {limits.max_concurrent_rollouts} and the server has room: raise it, if "
            "environments and tools allow."
        )
    return (
        f"The server decodes {flying:.0f} rollouts at {window.get('rollout/generated_tokens_per_s', 0.0):.0f} tokens/s: "
        "give it more GPUs, or lower max_completion_length."
    )


# ---- the rewards


def saturation(windows: Sequence[Window], reward_range: tuple[float, float] | None = None) -> Diagnosis | None:
    """What the groups without reward spread mean, over a history of windows (the newest last); None without a group.

    `reward_range`: lowest and highest reward there can be; where it is not given, what was seen, and 0 to 1 where all
    rewards seen were the same.
    """
    share = _series(windows, "frac_reward_zero_std")
    if not share:
        return None
    low, high = reward_range or _seen_range(windows)
    span = max(high - low, 1e-12)
    reward, stuck_at = _series(windows, "reward"), _series(windows, "reward_dropped")
    now, level = _now(share), _now(reward)
    rising = _change(reward) / span
    stuck = (_now(stuck_at) - low) / span if stuck_at else None
    seen = f"{now:.0%} of the groups have no reward spread" + (
        f", stuck at {_now(stuck_at):.3g} of {low:.3g} to {high:.3g}; the mean reward is {level:.3g}"
        if stuck_at
        else ""
    )
    falls = rising <= -CHANGE and _change(stuck_at) / span <= -CHANGE
    if _change(share) >= CHANGE and falls:
        return Diagnosis(
            REGRESSION,
            f"{seen}, and all got worse: groups that used to pass now fail together.",
            "Check completions/duplicate_frac and entropy for a collapse; lower the learning rate.",
        )
    if now < HIGH_ZERO_STD:
        return Diagnosis(HEALTHY, f"{1 - now:.0%} of the groups give a gradient.", "")
    if stuck is None:
        return Diagnosis(
            "unscored", f"{seen}, and none of them has a reward.", "The reward functions return None for most prompts."
        )
    if stuck >= TOP and rising > -CHANGE:
        return Diagnosis(
            SATURATED,
            f"{seen}: the prompts have become too easy for the policy.",
            "Stop the run, or go on with harder prompts.",
        )
    if stuck <= BOTTOM and rising < CHANGE and (level - low) / span <= MIDDLE:
        clipped = _series(windows, "completions/clipped_ratio")
        cut = _now(clipped) if clipped else 0.0
        if cut >= CLIPPED:
            advice = f"{cut:.0%} of the completions are cut off before their end: raise max_completion_length first."
        else:
            advice = "Read some completions, to see whether the reward function parses them right."
        return Diagnosis(STUCK, f"{seen}: the prompts are too hard, or the reward never gives credit.", advice)
    return Diagnosis(
        MIXTURE,
        f"{seen}: some prompts are too easy and others too hard, or groups share the same partial score.",
        "Read the rollouts.",
    )


def duplicates(windows: Sequence[Window], num_generations: int) -> Diagnosis | None:
    """Whether sampling still gives different rollouts for the same prompt; None where nothing was generated."""
    share, entropy = _series(windows, "completions/duplicate_frac"), _series(windows, "entropy")
    if not share:
        return None
    all_copies = (num_generations - 1) / num_generations
    now = _now(share[-SIDE:])
    jumped = any(after - before >= all_copies / 2 for before, after in itertools.pairwise(share))
    falling = len(entropy) >= 2 * SIDE and _change(entropy) <= -CHANGE * abs(_mean(entropy[:SIDE]))
    slowly = _change(share) >= CHANGE and not jumped
    seen = f"{now:.0%} of the rollouts repeat another of their group"
    if slowly and falling:
        return Diagnosis(
            COLLAPSE,
            f"{seen}, ever more while entropy falls ({_now(entropy[-SIDE:]):.3g} nats): one answer per prompt is left.",
            "Stop, or lower the learning rate or raise the temperature from an earlier checkpoint.",
        )
    if now >= COPIES * all_copies:
        return Diagnosis(
            NOT_RANDOM,
            f"{seen}: each group comes back as copies of one rollout.",
            "Look at the temperature, and at data-parallel engines that share a sampling seed.",
        )
    return Diagnosis(HEALTHY, f"{seen}.", "")


def diagnose(windows: Sequence[Window], num_generations: int) -> str:
    """Both diagnoses in one text; the one on duplicates only where it finds something. Empty without a group."""
    found = [saturation(windows), duplicates(windows, num_generations)]
    return " ".join(str(d) for d in found if d and (d.kind != HEALTHY or d is found[0]))


# ---- series


def _series(windows: Sequence[Window], name: str) -> list[float]:
    return [window[name] for window in windows if name in window]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _third(values: Sequence[float]) -> int:
    return min(NOW, max(len(values) // 3, 1))


def _now(values: Sequence[float]) -> float:
    """The mean of the newest third, of at most `NOW` windows."""
    return _mean(values[-_third(values) :])


def _change(values: Sequence[float]) -> float:
    """The newest third's mean less the oldest's; 0 while there are too few to tell."""
    if len(values) < 2 * SIDE:
        return 0.0
    return _now(values) - _mean(values[: _third(values)])


def _seen_range(windows: Sequence[Window]) -> tuple[float, float]:
    names = ("reward", "reward_dropped", "reward_kept")
    means = [value for name in names for value in _series(windows, name)]
    low = min(_series(windows, "reward_seen_min") + means, default=0.0)
    high = max(_series(windows, "reward_seen_max") + means, default=1.0)
    return (low, high) if high > low else (min(low, 0.0), max(high, 1.0))
