"""Every metric that a run may log: its name, unit, reduction over a logging window, and what it says.

`docs/metrics.md` is made from this table (`python -m slipstream.metrics.reference`), and a test compares it with what runs
log. A name may hold `{placeholders}`: names of reward functions, tools, or reasons.
"""

import re
from dataclasses import dataclass
from typing import Literal

from slipstream.metrics.window import kind_of

Reduction = Literal["sum", "max", "min", "mean", "rate", "latest"]
Needs = Literal["", "tools", "environment", "moe", "peak FLOPs", "score centering", "several turns", "/metrics", "eval"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: as it is logged; `{…}` stands for a name of the run.
        unit: of the value.
        meaning: one sentence.
        needs: what a run must have for the metric to be logged; empty: every run logs it.
        seldom: logged only in windows in which the thing happened.
        own: ours, not one of the specification's page.
        latest: a running total or a setting, not reduced over the window.
    """

    name: str
    unit: str
    meaning: str
    needs: Needs = ""
    seldom: bool = False
    own: bool = False
    latest: bool = False

    @property
    def reduction(self) -> Reduction:
        """How the observations of a window become one value (`slipstream.metrics.window`)."""
        if self.latest:
            return "latest"
        if self.name.endswith("tokens_per_s") or self.name.endswith("_mfu"):
            return "rate"
        return kind_of(self.name)

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the names that this entry stands for."""
        parts = re.split(r"\{\w+\}", self.name)
        return re.compile(".+?".join(re.escape(part) for part in parts))


@dataclass(frozen=True)
class Section:
    """Metrics that belong together."""

    title: str
    metrics: tuple[Metric, ...]


M = Metric
TOKENS, SECONDS, SHARE, TOKENS_PER_S = "tokens", "s", "0 to 1", "tokens/s"
GROUP_WHEN = "Measured when a group is scored, so slightly ahead of training and with groups that are dropped later."

SECTIONS: tuple[Section, ...] = (
    Section(
        "Progress and loss",
        (
            M("num_tokens", TOKENS, "Tokens forwarded since the start of training, a shared prefix once.", latest=True),
            M("loss", "", "The loss, averaged over the window's steps.", own=True),
            M("grad_norm", "", "Norm of the last step's gradient, before clipping.", own=True, latest=True),
            M("learning_rate", "", "Learning rate of the last step.", own=True, latest=True),
            M(
                "epoch",
                "epochs",
                "Prompts settled (trained or dropped) by prompts in the dataset.",
                own=True,
                latest=True,
            ),
            M("entropy", "nats", "Entropy of the policy at the positions that predict a trained token."),
            M("aux_loss", "", "Load-balancing loss of the router, before `router_aux_loss_coef`.", "moe"),
        ),
    ),
    Section(
        "Completions",
        (
            M("completions/mean_length", TOKENS, "Mean length of a completion, without tokens of tools."),
            M("completions/min_length", TOKENS, "Shortest completion."),
            M("completions/max_length", TOKENS, "Longest completion."),
            M("completions/mean_terminated_length", TOKENS, "Mean length of those that end with EOS.", seldom=True),
            M("completions/min_terminated_length", TOKENS, "Shortest of those that end with EOS.", seldom=True),
            M("completions/max_terminated_length", TOKENS, "Longest of those that end with EOS.", seldom=True),
            M("completions/clipped_ratio", SHARE, "Share of completions whose last turn does not end with EOS."),
            M(
                "completions/duplicate_frac",
                SHARE,
                "Share of rollouts that repeat an earlier one of their group exactly.",
            ),
        ),
    ),
    Section(
        "Rewards",
        (
            M("reward", "reward", f"Mean summed reward of all scored rollouts: the policy's own. {GROUP_WHEN}"),
            M("reward_kept", "reward", "Mean reward of the trained samples, so without dropped groups."),
            M("reward_dropped", "reward", "Mean reward of the groups without reward spread.", seldom=True),
            M("reward_group_std", "reward", "Standard deviation within a group, averaged over the trained samples."),
            M(
                "frac_reward_zero_std",
                SHARE,
                "Share of groups that are dropped: equal rewards, or fewer than two scored.",
            ),
            M("rewards/{reward_func_name}/mean", "reward", "Mean of one function's reward over the trained samples."),
            M(
                "rewards/{reward_func_name}/group_std",
                "reward",
                "Its standard deviation within a group, likewise averaged.",
            ),
            M("reward_seen_min", "reward", "Lowest reward of any rollout.", own=True),
            M("reward_seen_max", "reward", "Highest reward of any rollout.", own=True),
        ),
    ),
    Section(
        "Trainer against sampler",
        (
            M("sampling/sampling_logp_difference/mean", "nats", "Mean |log p − log q| over the trained tokens."),
            M("sampling/sampling_logp_difference/max", "nats", "Largest of them."),
            M("sampling/importance_sampling_ratio/min", "", "Smallest ratio p/q of a trained token, before masking."),
            M("sampling/importance_sampling_ratio/mean", "", "Mean ratio."),
            M("sampling/importance_sampling_ratio/max", "", "Largest ratio."),
            M("sampling/masked_mean", SHARE, "Share of trained tokens masked because their ratio is out of bounds."),
            M("sampling/sampler_mass", SHARE, "Probability that the sampler's reported head holds.", "score centering"),
            M("clip_ratio/region_mean", SHARE, "Share of trained tokens outside the trust region, either side."),
            M("clip_ratio/low_mean", SHARE, "Share of trained tokens below it."),
            M("clip_ratio/low_min", SHARE, "Smallest such share of one completion."),
            M("clip_ratio/high_mean", SHARE, "Share of trained tokens above it."),
            M("clip_ratio/high_max", SHARE, "Largest such share of one completion."),
        ),
    ),
    Section(
        "Rollouts",
        (
            M("rollout/duration_s", SECONDS, "Time of a rollout, from its start until the loop has it back."),
            M("rollout/generated_tokens_per_s", TOKENS_PER_S, "Generated tokens by time."),
            M("rollout/concurrency", "rollouts", "Rollouts in flight."),
            M("rollout/concurrency_cap", "rollouts", "Limit of rollouts in flight, which follows the server's load."),
            M("rollout/turns_mean", "turns", "Mean turns of a rollout."),
            M("rollout/turns_max", "turns", "Most turns of a rollout."),
            M("rollout/samples_per_rollout", "samples", "Training samples that a rollout became."),
            M("rollout/fork_frac", SHARE, "Share of turn changes whose prompt left the held tokens.", "several turns"),
            M("rollout/drift_tokens_mean", TOKENS, "Held tokens rendered anew, per turn change.", "several turns"),
            M(
                "rollout/drift_tokens_max",
                TOKENS,
                "Most held tokens that one turn change rendered anew.",
                "several turns",
            ),
            M("rollout/score_queue_size", "groups", "Finished groups that wait to be scored."),
            M(
                "rollout/queue_size",
                "samples",
                "Scored samples that wait, those drafted for the next step among them; seen where the trainer asks for a step, "
                "and where a group is taken while it waits.",
            ),
            M("rollout/score_s", SECONDS, "Time to score a group."),
            M("rollout/score_wait_s", SECONDS, "Time that a finished group waited to be scored."),
            M("rollout/score_block_s", SECONDS, "Time that a finished group waited for room in the scoring queue."),
            M("rollout/backpressure_s", SECONDS, "Mean wait of generation for the staleness bound; 0 without a wait."),
            M("rollout/backpressure_frac", SHARE, "Share of the time in which that bound held generation.", own=True),
            M("rollout/vllm_retry_count", "requests", "Requests to the server that were tried again."),
            M("rollout/vllm_kv_cache_usage_frac", SHARE, "Use of the fullest engine's KV cache.", "/metrics"),
            M("rollout/vllm_running_requests", "requests", "Requests that the engines decode, summed.", "/metrics"),
            M("rollout/vllm_queued_requests", "requests", "Requests accepted but not scheduled, summed.", "/metrics"),
            M(
                "rollout/vllm_preemption_count",
                "requests",
                "Requests interrupted by the engines; each delivery of weights interrupts all that run.",
                "/metrics",
            ),
        ),
    ),
    Section(
        "Tools",
        (
            M("tools/call_frequency", "calls", "Tool calls per completion, dropped groups included.", "tools"),
            M("tools/failure_frequency", SHARE, "Share of calls that failed; absent without a call.", "tools"),
            M("tools/latency_s", SECONDS, "Time of a tool call.", "tools"),
            M("tools/{tool_name}/latency_s", SECONDS, "Time of a call of one tool.", "tools"),
            M("tools/{tool_name}/call_count", "calls", "Calls of one tool.", "tools"),
            M("tools/{tool_name}/failure_count", "calls", "Failed calls of one tool.", "tools"),
            M("tools/unknown_name_count", "calls", "Calls of a tool that does not exist.", "tools"),
            M("tools/parallel_calls_mean", "calls", "Calls in one message that calls tools.", "tools"),
            M("tools/loop_exhausted_frac", SHARE, "Share of rollouts cut at `max_tool_calling_iterations`.", "tools"),
        ),
    ),
    Section(
        "Environments",
        (
            M("env/reset_s", SECONDS, "Time of an environment's `reset()`.", "environment"),
            M("env/reward_s", SECONDS, "Time of an environment's `get_reward()`.", "environment"),
        ),
    ),
    Section(
        "Samples",
        (
            M("sample/forwarded_tokens_mean", TOKENS, "Mean tokens of a sample, prompt included."),
            M("sample/forwarded_tokens_max", TOKENS, "Most tokens of a sample."),
            M("sample/trained_tokens_mean", TOKENS, "Mean trained tokens of a sample."),
            M("sample/time_in_queue_s", SECONDS, "Time between a sample's arrival in the queue and its step."),
            M("sample/staleness_mean", "weight updates", "Updates between the oldest trained token and the step."),
            M("sample/staleness_max", "weight updates", "Most of them."),
            M("sample/dropped_stale_count", "samples", "Samples dropped for being older than `max_staleness`."),
            M(
                "sample/dropped_{reason}_count",
                "samples",
                "Samples (or prompts that have none) dropped for another reason: zero_std, unscored, oversize, "
                "oversize_prompt, failed, filtered, empty, foreign_version.",
                seldom=True,
                own=True,
            ),
        ),
    ),
    Section(
        "Batches",
        (
            M("batch/forwarded_tokens_per_step", TOKENS, "Tokens forwarded in a step, over all processes."),
            M("batch/trained_tokens_per_step", TOKENS, "Tokens trained in a step, over all processes."),
            M("batch/samples_per_step", "samples", "Samples of a step."),
            M("batch/groups_per_step", "groups", "Different groups in a step."),
            M("batch/microbatches_per_step", "micro-batches", "Micro-batches of a step."),
            M("batch/masked_token_frac", SHARE, "Share of forwarded tokens that are not trained."),
            M("batch/samples_per_row", "samples", "Samples in a row."),
            M("batch/row_tokens_mean", TOKENS, "Mean forwarded tokens of a row."),
            M("batch/row_tokens_max", TOKENS, "Most forwarded tokens of a row."),
            M("batch/row_fill_frac", SHARE, "Share of `token_budget` that a row uses."),
            M("batch/row_imbalance", "", "Attention cost of the costliest row over the mean; 1 is perfect balance."),
            M("batch/packing_ratio", "", "Tokens before packing per forwarded token; 1: nothing is shared."),
            M("batch/pad_frac", SHARE, "Share of padding in what is sent to the processes; rows travel unpadded: 0."),
            M("batch/dropped_oversize_count", "samples", "Samples dropped for being longer than `token_budget`."),
        ),
    ),
    Section(
        "Performance",
        (
            M("perf/step_s", SECONDS, "Time of a step with everything: waiting, optimizer, weight delivery."),
            M("perf/fwd_bwd_s", SECONDS, "Time of a step's forward and backward passes."),
            M("perf/fwd_s", SECONDS, "Time of its forward passes, with the loss."),
            M("perf/optimizer_s", SECONDS, "Time of the optimizer's step."),
            M("perf/rollout_wait_s", SECONDS, "Time that a step waited for samples."),
            M("perf/weight_sync_s", SECONDS, "Time of a weight delivery."),
            M("perf/weight_sync_pause_s", SECONDS, "Part of it: until the server has paused."),
            M("perf/weight_sync_barrier_s", SECONDS, "Part of it: waiting for the other processes."),
            M("perf/weight_sync_transfer_s", SECONDS, "Part of it: sending."),
            M("perf/fwd_bwd_forwarded_tokens_per_s", TOKENS_PER_S, "Forwarded tokens by forward and backward time."),
            M("perf/wall_clock_forwarded_tokens_per_s", TOKENS_PER_S, "Forwarded tokens by step time."),
            M("perf/wall_clock_trained_tokens_per_s", TOKENS_PER_S, "Trained tokens by step time."),
            M("perf/fwd_bwd_mfu", SHARE, "Share of the devices' peak during forward and backward.", "peak FLOPs"),
            M("perf/wall_clock_mfu", SHARE, "Share of the devices' peak over the whole step.", "peak FLOPs"),
        ),
    ),
    Section(
        "Evaluation",
        (
            M("eval/reward", "reward", "Mean reward on the held-out prompts, one rollout each.", "eval", own=True),
            M("eval/reward_std", "reward", "Standard deviation of that reward over prompts.", "eval", own=True),
            M("eval/rewards/{reward_func_name}", "reward", "Mean of one function's reward.", "eval", own=True),
            M("eval/mean_length", TOKENS, "Mean length of a completion.", "eval", own=True),
            M("eval/clipped_ratio", SHARE, "Share of completions that do not end with EOS.", "eval", own=True),
            M("eval/prompts", "prompts", "Held-out prompts that were answered.", "eval", own=True),
        ),
    ),
)

METRICS: tuple[Metric, ...] = tuple(metric for section in SECTIONS for metric in section.metrics)


def find(name: str) -> Metric | None:
    """The entry of a logged name; an exact one before a pattern; None where there is none."""
    exact = next((metric for metric in METRICS if metric.name == name), None)
    return exact or next((metric for metric in METRICS if "{" in metric.name and metric.pattern.fullmatch(name)), None)


def applicable(missing: set[str]) -> list[Metric]:
    """The metrics that a run logs which has everything but what is in `missing`; without those of rare events."""
    return [metric for metric in METRICS if metric.needs not in missing and not metric.seldom]
