"""Rank 0's side of the rollout queue: take groups, drop what is too old, fill the micro-batches of a step."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from slipstream.learner.ledger import Ledger
from slipstream.metrics.window import Window
from slipstream.packing.planner import MicroBatch, oversize
from slipstream.packing.sample import Sample
from slipstream.packing.trie import Row, pack
from slipstream.rollout.allowance import full_step, outstanding_bound
from slipstream.rollout.types import OVERSIZE, STALE, GroupResult


class Source(Protocol):
    """Where groups come from."""

    @property
    def num_samples(self) -> int:
        """Samples that wait."""

    def take(self) -> GroupResult | None:
        """The next group, or None at the end of the data. Blocks."""

    def publish(self, allowance_total: int) -> None:
        """Let generation go on until this running total of tokens."""

    def step_planned(self) -> None:
        """The trainer has all that its step needs, and waits no more."""


@dataclass
class PlannedMicroBatch:
    """Rows of one micro-batch, one per rank, and the trained tokens over all of them."""

    rows: list[Row]
    num_tokens: int
    imbalance: float


@dataclass
class StepPlan:
    """What one optimizer step trains on; `micro_batches` may be fewer than configured at the end of the data."""

    micro_batches: list[PlannedMicroBatch]
    samples: list[Sample] = field(default_factory=list)


class SampleFeed:
    """Makes step plans out of the groups that arrive."""

    def __init__(
        self,
        source: Source,
        ledger: Ledger,
        window: Window,
        *,
        ranks: int,
        accumulation: int,
        token_budget: int,
        max_staleness: int,
        warn: Callable[[str], None],
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """`while_waiting` is called for each group taken for a step: it may be one of many that are dropped."""
        self._source = source
        self._ledger = ledger
        self._window = window
        self._ranks = ranks
        self._accumulation = accumulation
        self._budget = token_budget
        self._max_staleness = max_staleness
        self._warn = warn
        self._while_waiting = while_waiting
        self.waiting_since: float | None = None  # while a step is filled: when that began
        self._held: deque[list[Sample]] = deque()  # groups (or their rest) that did not fit any more
        self._used_total = 0
        self._bound = outstanding_bound(max_staleness, full_step(ranks, accumulation, token_budget))
        self._warned_oversize = False

    def open(self) -> None:
        """Let generation start."""
        self._publish()

    def _publish(self) -> None:
        self._source.publish(self._used_total + self._bound)

    def hold(self, samples: Iterable[Sample]) -> None:
        """Put back the remainder that a checkpoint held; it comes first."""
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.number, []).append(sample)
        self._held.extendleft(reversed(list(groups.values())))

    def held_of(self, numbers: set[int]) -> list[Sample]:
        """The samples of these prompts that wait here, for a checkpoint."""
        return [sample for group in self._held for sample in group if sample.number in numbers]

    def _drop(self, sample: Sample, reason: str) -> None:
        self._used_total += sample.cost
        self._publish()
        self._ledger.dropped(sample, reason)
        self._window.add(f"sample/dropped_{reason}_count", 1)

    def _admit(self, sample: Sample, version: int) -> bool:
        if version - sample.oldest_version > self._max_staleness:
            self._drop(sample, STALE)
            return False
        if oversize(sample, self._budget):
            self._window.add("batch/dropped_oversize_count", 1)
            if not self._warned_oversize:
                self._warned_oversize = True
                self._warn(
                    f"a sample of {len(sample)} tokens does not fit into token_budget = {self._budget} and was dropped; "
                    "raise token_budget or lower max_completion_length (further ones are only counted)"
                )
            self._drop(sample, OVERSIZE)
            return False
        return True

    def _next_group(self, version: int) -> list[Sample] | None:
        """The next samples that may be trained, or None at the end of the data."""
        while True:
            if self._held:
                samples = self._held.popleft()
            else:
                self._window.add("rollout/queue_size", self._source.num_samples)
                result = self._source.take()
                if result is None:
                    return None
                self._window.add_all(result.observations)
                for reason, count in result.dropped.items():
                    self._window.add(f"sample/dropped_{reason}_count", count)
                self._ledger.arrived(result)
                samples = result.samples
            self._while_waiting()
            admitted = [sample for sample in samples if self._admit(sample, version)]
            if admitted:
                return admitted

    def next_step(self, version: int) -> StepPlan | None:
        """Fill the micro-batches of one step at policy `version`; None when the data has ended. Blocks."""
        begun = self.waiting_since = time.monotonic()
        self._publish()
        for name in ("sample/dropped_stale_count", "batch/dropped_oversize_count"):
            self._window.add(name, 0)  # none is a number, too
        batches: list[MicroBatch] = []
        current = MicroBatch(self._ranks, self._budget)
        while len(batches) < self._accumulation:
            group = self._next_group(version)
            if group is None:
                if len(current):
                    batches.append(current)
                break
            rest = current.offer(group)
            if rest:
                self._held.appendleft(rest)
                batches.append(current)
                current = MicroBatch(self._ranks, self._budget)
        self._source.step_planned()
        self.waiting_since = None
        if not batches:
            return None
        self._window.add("perf/rollout_wait_s", time.monotonic() - begun)
        plan = StepPlan([])
        for batch in batches:
            batch.spread()
            rows = [pack(samples) for samples in batch.rows]
            plan.micro_batches.append(PlannedMicroBatch(rows, sum(row.num_terms for row in rows), batch.imbalance()))
            plan.samples += [sample for samples in batch.rows for sample in samples]
        self._ledger.in_step(plan.samples)
        if self._max_staleness > 0:
            self._release(plan)
            self._publish()
        self._observe(plan, version)
        return plan

    def step_finished(self, plan: StepPlan) -> None:
        """Settle the step's prompts. Call it before the new policy is delivered."""
        if self._max_staleness == 0:
            self._release(plan)
        self._ledger.step_finished()

    def _release(self, plan: StepPlan) -> None:
        """What a step trains on is not outstanding any more.

        Counted as the step begins, so that the rollout process generates while it is trained. With `max_staleness = 0`
        whatever is generated then would be dropped: counted after it, and published once the new policy is delivered.
        """
        used = sum(sample.cost for sample in plan.samples)
        self._used_total += used
        if used:
            self._bound = outstanding_bound(self._max_staleness, used)

    def _observe(self, plan: StepPlan, version: int) -> None:
        add, now = self._window.add, time.monotonic()
        rewards = [sample.reward for sample in plan.samples if not math.isnan(sample.reward)]
        if rewards:
            add("reward_kept", sum(rewards) / len(rewards), len(rewards))
        for sample in plan.samples:
            staleness = version - sample.oldest_version
            add("sample/staleness_mean", staleness)
            add("sample/staleness_max", staleness)
            add("sample/forwarded_tokens_mean", len(sample))
            add("sample/forwarded_tokens_max", len(sample))
            add("sample/trained_tokens_mean", sample.num_trained)
            add("reward_group_std", sample.group_std)
            if sample.queued_at:
                add("sample/time_in_queue_s", now - sample.queued_at)
            for name, (value, spread) in sample.rewards_by_name.items():
                add(f"rewards/{name}/mean", value)
                add(f"rewards/{name}/group_std", spread)
        rows = [row for batch in plan.micro_batches for row in batch.rows]
        forwarded = sum(row.num_tokens for row in rows)
        trained = sum(row.num_terms for row in rows)
        add("batch/forwarded_tokens_per_step", forwarded)
        add("batch/trained_tokens_per_step", trained)
        add("batch/samples_per_step", len(plan.samples))
        add("batch/groups_per_step", len({sample.number for sample in plan.samples}))
        add("batch/microbatches_per_step", len(plan.micro_batches))
        add("batch/pad_frac", 0.0)
        # a shared token that several samples train is one token that is forwarded
        predicting = sum(len(np.unique(row.predict)) for row in rows)
        add("batch/masked_token_frac", 1 - predicting / forwarded, forwarded)
        add("batch/packing_ratio", sum(row.raw_tokens for row in rows) / forwarded, forwarded)
        for batch in plan.micro_batches:
            add("batch/row_imbalance", batch.imbalance)
        for row in rows:
            add("batch/samples_per_row", row.num_samples)
            add("batch/row_tokens_mean", row.num_tokens)
            add("batch/row_tokens_max", row.num_tokens)
            add("batch/row_fill_frac", row.num_tokens / self._budget)
