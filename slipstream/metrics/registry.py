"""Every metric that a run may log: its name, unit, reduction over a logging window, and what it says.

`docs/metrics.md` is made from this table (`python -m slipstream.metrics.reference`), and a test compares it with what runs
log. A name may hold `{placeholders}`: names of reward functions, tools, or reasons.
"""

import re
from dataclasses import dataclass, replace
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
        latest: a running total, a setting, or a value of one moment: not reduced over the window.
        over: of a mean: what it averages over, each of them with the same weight.
    """

    name: str
    unit: str
    meaning: str
    needs: Needs = ""
    seldom: bool = False
    own: bool = False
    latest: bool = False
    over: str = ""

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


def _section(title: str, over: str, *metrics: Metric) -> Section:
    """`over`: what its means are over, where a metric does not say."""
    return Section(title, tuple(replace(m, over=over) if m.reduction == "mean" and not m.over else m for m in metrics))


M = Metric
TOKENS, SECONDS, SHARE, TOKENS_PER_S = "tokens", "s", "0 to 1", "tokens/s"
GROUP_WHEN = "Measured when a group is scored, so slightly ahead of training and with groups that are dropped later."

SECTIONS: tuple[Section, ...] = (
    _section(
        "Progress and loss",
        "steps",
        M("num_tokens", TOKENS, "Tokens forwarded since the start of training, a shared prefix once.", latest=True),
        M("loss", "", "The loss, averaged over the window's steps.", own=True),
        M("grad_norm", "", "Norm of the last step's gradient, before clipping.", own=True, latest=True),
        M("learning_rate", "", "Learning rate of the last step.", own=True, latest=True),
        M("epoch", "epochs", "Prompts settled (trained or dropped) by prompts in the dataset.", own=True, latest=True),
        M(
            "entropy",
            "nats",
            "Entropy of the policy at the positions that predict a trained token.",
            over="trained tokens",
        ),
        M("aux_loss", "", "Load-balancing loss of the router, before `router_aux_loss_coef`.", "moe", over="rows"),
    ),
    _section(
        "Completions",
        "rollouts",
        M("completions/mean_length", TOKENS, "Mean length of a completion, without tokens of tools."),
        M("completions/min_length", TOKENS, "Shortest completion."),
        M("completions/max_length", TOKENS, "Longest completion."),
        M("completions/mean_terminated_length", TOKENS, "Mean length of those that end with EOS.", seldom=True),
        M("completions/min_terminated_length", TOKENS, "Shortest of those that end with EOS.", seldom=True),
        M("completions/max_terminated_length", TOKENS, "Longest of those that end with EOS.", seldom=True),
        M("completions/clipped_ratio", SHARE, "Share of completions whose last turn does not end with EOS."),
        M("completions/duplicate_frac", SHARE, "Share of rollouts that repeat an earlier one of their group exactly."),
    ),
    _section(
        "Rewards",
        "samples",
        M(
            "reward",
            "reward",
            f"Mean summed reward of all scored rollouts: the policy's own. {GROUP_WHEN}",
            over="scored rollouts",
        ),
        M("reward_kept", "reward", "Mean reward of the trained samples, so without dropped groups."),
        M("reward_dropped", "reward", "Mean reward of the groups without reward spread.", seldom=True, over="groups"),
        M("reward_group_std", "reward", "Standard deviation within a group, averaged over the trained samples."),
        M(
            "frac_reward_zero_std",
            SHARE,
            "Share of groups that are dropped: equal rewards, or fewer than two scored.",
            over="groups",
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
    _section(
        "Trainer against sampler",
        "trained tokens",
        M("sampling/sampling_logp_difference/mean", "nats", "Mean |log p − log q| over the trained tokens."),
        M("sampling/sampling_logp_difference/max", "nats", "Largest of them."),
        M("sampling/importance_sampling_ratio/min", "", "Smallest ratio p/q of a trained token, before masking."),
        M("sampling/importance_sampling_ratio/mean", "", "Mean ratio."),
        M("sampling/importance_sampling_ratio/max", "", "Largest ratio."),
        M("sampling/masked_mean", SHARE, "Share of trained tokens masked because their ratio is out of bounds."),
        M("sampling/sampler_mass", SHARE, "Probability that the sampler's reported head holds.", "score centering"),
        M("clip_ratio/region_mean", SHARE, "Share of trained tokens outside the trust region, either side."),
        M("clip_ratio/low_mean", SHARE, "Share of trained tokens below it."),
        M(
            "clip_ratio/low_min",
            SHARE,
            "Smallest such share of one completion; of a rollout that forked, of one of its samples.",
        ),
        M("clip_ratio/high_mean", SHARE, "Share of trained tokens above it."),
        M(
            "clip_ratio/high_max",
            SHARE,
            "Largest such share of one completion; of a rollout that forked, of one of its samples.",
        ),
    ),
    _section(
        "Rollouts",
        "rollouts",
        M("rollout/duration_s", SECONDS, "Time of a rollout, from its start until the loop has it back."),
        M("rollout/generated_tokens_per_s", TOKENS_PER_S, "Generated tokens by time."),
        M("rollout/concurrency", "rollouts", "Rollouts in flight.", over="reports"),
        M(
            "rollout/concurrency_cap",
            "rollouts",
            "Limit of rollouts in flight, which follows the server's load.",
            over="reports",
        ),
        M("rollout/turns_mean", "turns", "Mean turns of a rollout."),
        M("rollout/turns_max", "turns", "Most turns of a rollout."),
        M("rollout/samples_per_rollout", "samples", "Training samples that a rollout became."),
        M(
            "rollout/fork_frac",
            SHARE,
            "Share of turn changes whose prompt left the held tokens.",
            "several turns",
            over="turn changes",
        ),
        M(
            "rollout/drift_tokens_mean",
            TOKENS,
            "Held tokens rendered anew, per turn change.",
            "several turns",
            over="turn changes",
        ),
        M("rollout/drift_tokens_max", TOKENS, "Most held tokens that one turn change rendered anew.", "several turns"),
        M("rollout/score_queue_size", "groups", "Finished groups that wait to be scored.", over="reports"),
        M(
            "rollout/queue_size",
            "samples",
            "Scored samples that wait, those drafted for the next step among them; seen where the trainer asks for a step, "
            "and where a group is taken while it waits.",
            over="sightings",
        ),
        M("rollout/score_s", SECONDS, "Time to score a group.", over="groups"),
        M("rollout/score_wait_s", SECONDS, "Time that a finished group waited to be scored.", over="groups"),
        M(
            "rollout/score_block_s",
            SECONDS,
            "Time that a finished group waited for room in the scoring queue.",
            over="groups",
        ),
        M(
            "rollout/backpressure_s",
            SECONDS,
            "Mean wait of generation for the staleness bound; 0 without a wait.",
            over="waits",
        ),
        M(
            "rollout/backpressure_frac",
            SHARE,
            "Share of the time in which that bound held generation.",
            own=True,
            over="time",
        ),
        M("rollout/vllm_retry_count", "requests", "Requests to the server that were tried again."),
        M("rollout/vllm_kv_cache_usage_frac", SHARE, "Use of the fullest engine's KV cache.", "/metrics", over="polls"),
        M(
            "rollout/vllm_running_requests",
            "requests",
            "Requests that the engines decode, summed.",
            "/metrics",
            over="polls",
        ),
        M(
            "rollout/vllm_queued_requests",
            "requests",
            "Requests accepted but not scheduled, summed.",
            "/metrics",
            over="polls",
        ),
        M(
            "rollout/vllm_preemption_count",
            "requests",
            "Requests interrupted by the engines; each delivery of weights interrupts all that run.",
            "/metrics",
        ),
    ),
    _section(
        "Tools",
        "calls",
        M(
            "tools/call_frequency",
            "calls",
            "Tool calls per completion, dropped groups included.",
            "tools",
            over="rollouts",
        ),
        M("tools/failure_frequency", SHARE, "Share of calls that failed; absent without a call.", "tools"),
        M("tools/latency_s", SECONDS, "Time of a tool call.", "tools"),
        M("tools/{tool_name}/latency_s", SECONDS, "Time of a call of one tool.", "tools"),
        M("tools/{tool_name}/call_count", "calls", "Calls of one tool.", "tools"),
        M("tools/{tool_name}/failure_count", "calls", "Failed calls of one tool.", "tools"),
        M("tools/unknown_name_count", "calls", "Calls of a tool that does not exist.", "tools"),
        M("tools/parallel_calls_mean", "calls", "Calls in one message that calls tools.", "tools", over="messages"),
        M(
            "tools/loop_exhausted_frac",
            SHARE,
            "Share of rollouts cut at `max_tool_calling_iterations`.",
            "tools",
            over="rollouts",
        ),
    ),
    _section(
        "Environments",
        "rollouts",
        M("env/reset_s", SECONDS, "Time of an environment's `reset()`.", "environment"),
        M("env/reward_s", SECONDS, "Time of an environment's `get_reward()`.", "environment"),
    ),
    _section(
        "Samples",
        "samples",
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
    _section(
        "Batches",
        "steps",
        M("batch/forwarded_tokens_per_step", TOKENS, "Tokens forwarded in a step, over all processes."),
        M("batch/trained_tokens_per_step", TOKENS, "Tokens trained in a step, over all processes."),
        M("batch/samples_per_step", "samples", "Samples of a step."),
        M("batch/groups_per_step", "groups", "Different groups in a step."),
        M("batch/microbatches_per_step", "micro-batches", "Micro-batches of a step."),
        M(
            "batch/masked_token_frac",
            SHARE,
            "Share of forwarded tokens after which no token is trained; one that several samples train counts once.",
            over="forwarded tokens",
        ),
        M("batch/samples_per_row", "samples", "Samples in a row.", over="rows"),
        M("batch/row_tokens_mean", TOKENS, "Mean forwarded tokens of a row.", over="rows"),
        M("batch/row_tokens_max", TOKENS, "Most forwarded tokens of a row."),
        M("batch/row_fill_frac", SHARE, "Share of `token_budget` that a row uses.", over="rows"),
        M(
            "batch/row_imbalance",
            "",
            "Attention cost of the costliest row over the mean; 1 is perfect balance.",
            over="micro-batches",
        ),
        M(
            "batch/packing_ratio",
            "",
            "Tokens before packing per forwarded token; 1: nothing is shared.",
            over="forwarded tokens",
        ),
        M("batch/pad_frac", SHARE, "Share of padding in what is sent to the processes; rows travel unpadded: 0."),
        M("batch/dropped_oversize_count", "samples", "Samples dropped for being longer than `token_budget`."),
    ),
    _section(
        "Performance",
        "steps",
        M("perf/step_s", SECONDS, "Time of a step with everything: waiting, optimizer, weight delivery."),
        M("perf/fwd_bwd_s", SECONDS, "Time of a step's forward and backward passes."),
        M("perf/fwd_s", SECONDS, "Time of its forward passes, with the loss."),
        M("perf/optimizer_s", SECONDS, "Time of the optimizer's step."),
        M("perf/rollout_wait_s", SECONDS, "Time that a step waited for samples."),
        M("perf/weight_sync_s", SECONDS, "Time of a weight delivery.", over="deliveries"),
        M("perf/weight_sync_pause_s", SECONDS, "Part of it: until the server has paused.", over="deliveries"),
        M("perf/weight_sync_barrier_s", SECONDS, "Part of it: waiting for the other processes.", over="deliveries"),
        M("perf/weight_sync_transfer_s", SECONDS, "Part of it: sending.", over="deliveries"),
        M("perf/save_s", SECONDS, "Time to write a checkpoint.", seldom=True, own=True, over="checkpoints"),
        M("perf/fwd_bwd_forwarded_tokens_per_s", TOKENS_PER_S, "Forwarded tokens by forward and backward time."),
        M("perf/wall_clock_forwarded_tokens_per_s", TOKENS_PER_S, "Forwarded tokens by step time."),
        M("perf/wall_clock_trained_tokens_per_s", TOKENS_PER_S, "Trained tokens by step time."),
        M("perf/fwd_bwd_mfu", SHARE, "Share of the devices' peak during forward and backward.", "peak FLOPs"),
        M("perf/wall_clock_mfu", SHARE, "Share of the devices' peak over the whole step.", "peak FLOPs"),
    ),
    _section(
        "Evaluation",
        "",
        M(
            "eval/reward",
            "reward",
            "Mean reward on the held-out prompts, one rollout each.",
            "eval",
            own=True,
            latest=True,
        ),
        M(
            "eval/reward_std",
            "reward",
            "Standard deviation of that reward over prompts.",
            "eval",
            own=True,
            latest=True,
        ),
        M("eval/rewards/{reward_func_name}", "reward", "Mean of one function's reward.", "eval", own=True, latest=True),
        M("eval/mean_length", TOKENS, "Mean length of a completion.", "eval", own=True, latest=True),
        M("eval/clipped_ratio", SHARE, "Share of completions that do not end with EOS.", "eval", own=True, latest=True),
        M("eval/prompts", "prompts", "Held-out prompts that were answered.", "eval", own=True, latest=True),
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
