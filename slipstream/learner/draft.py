"""A step while it is put together: which samples, in which rows. It changes nothing but itself and the token account.

A draft may be thrown away: what it found is in its events, which the training thread applies when it asks for the step,
and the samples that wait are as they were until it takes the plan over. So whatever is written about a step that is
trained (ledger, checkpoint, metrics) knows nothing of the one that is drafted beside it.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.learner.account import TokenAccount
from slipstream.learner.plan import StepPlan
from slipstream.metrics.window import Window
from slipstream.packing.planner import MicroBatch, oversize
from slipstream.packing.sample import Sample
from slipstream.rollout.types import OVERSIZE, STALE, GroupResult

MakePlan = Callable[[Sequence[MicroBatch]], StepPlan]


@dataclass(frozen=True)
class StepShape:
    """How large a step is, and how old its samples may be."""

    ranks: int
    accumulation: int
    token_budget: int
    max_staleness: int


@dataclass(frozen=True)
class Dropped:
    """A sample that will not be trained."""

    sample: Sample
    reason: str


Event = GroupResult | Dropped


class Draft:
    """One step to be trained at policy `version`.

    All but `collect` is called on one thread, the planner's. `done` is set last.

    Attributes:
        held: groups, or their rest, that wait for the next step; the training thread's once the draft is done.
        again: groups that were taken and put back, which come before the source's; likewise.
        plan: None where the data has ended.
        error: what ended the draft instead.
        filled_at: `time.monotonic()` when no more samples were needed.
        awaited: set by the training thread while it waits for the draft.
        abandoned: set by the training thread where another takes the draft's place.
    """

    def __init__(
        self,
        version: int,
        held: Iterable[list[Sample]],
        again: Iterable[GroupResult],
        shape: StepShape,
        account: TokenAccount,
        make_plan: MakePlan,
        instead_of: "Draft | None" = None,
    ) -> None:
        """`instead_of`: a draft of the same step that was judged for another version."""
        self.version = version
        self.held = deque(held)
        self.again = deque(again)
        self.plan: StepPlan | None = None
        self.error: BaseException | None = None
        self.filled_at = 0.0
        self.done = self.awaited = self.abandoned = False
        self._shape = shape
        self._account = account
        self._make_plan = make_plan
        self._instead_of = instead_of
        self._taken: list[GroupResult] = []
        self._given_back = 0
        self._ended = False
        self._batches: list[MicroBatch] = []
        self._current = self._new_batch()
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._window = Window()

    def _new_batch(self) -> MicroBatch:
        return MicroBatch(self._shape.ranks, self._shape.token_budget)

    # ---- the planner's

    def begin(self) -> None:
        """Place what is here already. The abandoned draft is not worked on any more."""
        if self._instead_of is not None:
            old, self._instead_of = self._instead_of, None
            self._account.dropped(-old._given_back)
            self.again = deque([*old._taken, *old.again])
        self._go_on()

    @property
    def needs_group(self) -> bool:
        return not self._ended and len(self._batches) < self._shape.accumulation

    def add(self, result: GroupResult | None) -> None:
        """The next group of the source, or None at the end of the data."""
        if result is None:
            self._ended = True
            return
        self._arrived(result)
        self._go_on()

    def saw_queue(self, num_samples: int) -> None:
        """`num_samples` waited when the next group was taken for a trainer that waits."""
        with self._lock:
            self._window.add("rollout/queue_size", num_samples)

    def finish(self) -> None:
        """No more groups are needed: make the rows."""
        self.filled_at = time.monotonic()
        if len(self._current):
            self._batches.append(self._current)
        if self._batches:
            plan = self._make_plan(self._batches)
            plan.prepare(self._shape.ranks, self._shape.accumulation)
            with self._lock:
                observe(plan, self.version, self._shape.token_budget, self._window)
            self.plan = plan
        self.done = True

    def fail(self, error: BaseException) -> None:
        self.filled_at = time.monotonic()
        self.error = error
        self.done = True

    def _go_on(self) -> None:
        while self.needs_group:
            if self.held:
                self._place(self.held.popleft())
            elif self.again:
                self._arrived(self.again.popleft())
            else:
                return

    def _arrived(self, result: GroupResult) -> None:
        self._taken.append(result)
        with self._lock:
            self._events.append(result)
            self._window.add_all(result.observations)
            for reason, count in result.dropped.items():
                self._window.add(f"sample/dropped_{reason}_count", count)
        self._place(result.samples)

    def _place(self, group: list[Sample]) -> None:
        samples = [sample for sample in group if self._admit(sample)]
        if not samples:
            return
        rest = self._current.offer(samples)
        if rest:
            self.held.appendleft(rest)
            self._batches.append(self._current)
            self._current = self._new_batch()

    def _admit(self, sample: Sample) -> bool:
        if self.version - sample.oldest_version > self._shape.max_staleness:
            self._drop(sample, STALE)
        elif oversize(sample, self._shape.token_budget):
            self._drop(sample, OVERSIZE)
        else:
            return True
        return False

    def _drop(self, sample: Sample, reason: str) -> None:
        self._given_back += sample.cost
        self._account.dropped(sample.cost)
        with self._lock:
            self._events.append(Dropped(sample, reason))
            self._window.add(f"sample/dropped_{reason}_count", 1)
            if reason == OVERSIZE:
                self._window.add("batch/dropped_oversize_count", 1)

    # ---- the training thread's

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    @property
    def num_taken(self) -> int:
        """Samples of the groups taken by now."""
        return sum(len(result.samples) for result in list(self._taken))

    def collect(self) -> tuple[list[Event], Window]:
        """What happened since the last call, in order, and what was measured."""
        with self._lock:
            events, self._events = self._events, []
            window, self._window = self._window, Window()
        return events, window


def observe(plan: StepPlan, version: int, token_budget: int, window: Window) -> None:
    """The `sample/*`, `batch/*` and reward metrics of a step."""
    add = window.add
    rewards = [sample.reward for sample in plan.samples if not math.isnan(sample.reward)]
    if rewards:
        add("reward_kept", sum(rewards) / len(rewards), len(rewards))
    for versions in plan.oldest_versions.values():
        for oldest in versions:
            add("sample/staleness_mean", version - oldest)
            add("sample/staleness_max", version - oldest)
    for sample in plan.samples:
        add("sample/forwarded_tokens_mean", len(sample))
        add("sample/forwarded_tokens_max", len(sample))
        add("sample/trained_tokens_mean", sample.num_trained)
        add("reward_group_std", sample.group_std)
        for name, (value, spread) in sample.rewards_by_name.items():
            add(f"rewards/{name}/mean", value)
            add(f"rewards/{name}/group_std", spread)
    add("batch/forwarded_tokens_per_step", plan.num_forwarded)
    add("batch/trained_tokens_per_step", plan.num_trained)
    add("batch/samples_per_step", len(plan.samples))
    add("batch/groups_per_step", len(plan.oldest_versions))
    add("batch/microbatches_per_step", len(plan.micro_batches))
    add("batch/pad_frac", 0.0)
    # a shared token that several samples train is one token that is forwarded
    predicting = sum(len(np.unique(row.predict)) for row in plan.rows)
    add("batch/masked_token_frac", 1 - predicting / plan.num_forwarded, plan.num_forwarded)
    add("batch/packing_ratio", sum(row.raw_tokens for row in plan.rows) / plan.num_forwarded, plan.num_forwarded)
    for batch in plan.micro_batches:
        add("batch/row_imbalance", batch.imbalance)
    for row in plan.rows:
        add("batch/samples_per_row", row.num_samples)
        add("batch/row_tokens_mean", row.num_tokens)
        add("batch/row_tokens_max", row.num_tokens)
        add("batch/row_fill_frac", row.num_tokens / token_budget)
