"""Rank 0's side of the rollout queue, as the training thread sees it: ask for a step, settle it, and what waits."""

import time
from collections import deque
from collections.abc import Callable, Iterable

from slipstream.learner.account import TokenAccount
from slipstream.learner.draft import Draft, Dropped, StepShape
from slipstream.learner.ledger import Ledger
from slipstream.learner.plan import StepPlan, make_plan
from slipstream.learner.planner import Planner, PlannerThread, Source
from slipstream.metrics.window import Window
from slipstream.packing.sample import Sample
from slipstream.rollout.allowance import full_step
from slipstream.rollout.types import OVERSIZE, GroupResult


class SampleFeed:
    """Hands out step plans. A planner drafts each, the next one already while one is trained.

    Ledger and window are touched on the training thread alone, and for a step only once it is asked for: a checkpoint in
    between knows nothing of the draft, and the samples that it took from those held are still among them.

    Attributes:
        make_plan: makes rows of the micro-batches that are filled; a test may exchange it before the first step.
        waiting_since: while the training thread waits for a step, when that began.
    """

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
        planner: Planner | None = None,
    ) -> None:
        """`while_waiting` is called now and then while a step is waited for; `planner`: by default a thread."""
        self._source = source
        self._ledger = ledger
        self._window = window
        self._shape = StepShape(ranks, accumulation, token_budget, max_staleness)
        self._account = TokenAccount(source.publish, max_staleness, full_step(ranks, accumulation, token_budget))
        self._warn = warn
        self._while_waiting = while_waiting
        self._planner = planner or PlannerThread(source)
        self._held: deque[list[Sample]] = deque()  # groups (or their rest) that did not fit any more
        self._again: deque[GroupResult] = (
            deque()
        )  # groups that a draft of another version took and the next did not need
        self._draft: Draft | None = None
        self._gone: set[int] = set()  # ids of held samples that the draft has dropped, until its step is taken over
        self._warned_oversize = False
        self.make_plan = make_plan
        self.waiting_since: float | None = None

    def open(self) -> None:
        """Let generation start."""
        self._account.publish()

    def hold(self, samples: Iterable[Sample]) -> None:
        """Put back the remainder that a checkpoint held; it comes first."""
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.number, []).append(sample)
        self._held.extendleft(reversed(list(groups.values())))

    def held_of(self, numbers: set[int]) -> list[Sample]:
        """The samples of these prompts that wait here, for a checkpoint."""
        found = [sample for group in self._held for sample in group if sample.number in numbers]
        return [sample for sample in found if id(sample) not in self._gone]

    def next_step(self, version: int, following: int | None = None) -> StepPlan | None:
        """The next step, to be trained at policy `version`; None when the data has ended. Blocks.

        `following`: the version at which the step after it will be trained, which is drafted from now on; None: there is
        none. Without staleness nothing of it can be there before that version, so that nothing is drafted either.
        What `while_waiting` raises ends the waiting: the draft is thrown away, but what it dropped by then stays dropped.
        """
        begun = self.waiting_since = time.monotonic()
        self._account.publish()
        for name in ("sample/dropped_stale_count", "batch/dropped_oversize_count"):
            self._window.add(name, 0)  # none is a number, too
        draft = self._ask(version)
        self._window.add("rollout/queue_size", self._source.num_samples + draft.num_taken)
        try:
            self._wait(draft)
        except BaseException:
            draft.abandoned = True
            raise
        finally:
            self._source.step_planned()
            self.waiting_since = None
        if draft.error is not None:
            raise draft.error
        self._held, self._again = draft.held, draft.again
        self._gone.clear()
        plan = draft.plan
        if plan is None:
            return None
        self._window.add("perf/rollout_wait_s", max(draft.filled_at - begun, 0.0))
        self._ledger.in_step(plan.oldest_versions)
        if self._shape.max_staleness > 0:
            self._account.used(plan.cost)
            self._account.publish()
            if following is not None:
                self._draft = self._begin(following)
        queued_at, count = plan.queued
        self._window.add("sample/time_in_queue_s", time.monotonic() - queued_at, count)
        return plan

    def _begin(self, version: int, instead_of: Draft | None = None) -> Draft:
        draft = Draft(version, self._held, self._again, self._shape, self._account, self.make_plan, instead_of)
        self._planner.begin(draft)
        return draft

    def _ask(self, version: int) -> Draft:
        """The draft of the step, with the training thread waiting for it from now on."""
        draft, self._draft = self._draft, None
        if draft is not None and draft.version == version:
            return draft
        if draft is not None:
            draft.abandoned = True
        return self._begin(version, draft)

    def _wait(self, draft: Draft) -> None:
        if not draft.done:
            draft.awaited = True
            self._source.step_awaited()
        while True:
            done = draft.done
            self._apply(draft)
            if done:
                return
            self._while_waiting()
            self._planner.wait(draft)

    def _apply(self, draft: Draft) -> None:
        """Let ledger and window know what the draft has found."""
        events, window = draft.collect()
        self._window.merge(window.state())
        for event in events:
            if not isinstance(event, Dropped):
                self._ledger.arrived(event)
                continue
            self._ledger.dropped(event.sample, event.reason)
            self._gone.add(id(event.sample))
            if event.reason == OVERSIZE and not self._warned_oversize:
                self._warned_oversize = True
                self._warn(
                    f"a sample of {len(event.sample)} tokens does not fit into token_budget = "
                    f"{self._shape.token_budget} and was dropped; raise token_budget or lower max_completion_length "
                    "(further ones are only counted)"
                )

    @property
    def drafting(self) -> bool:
        """Whether the planner works on the step after the one that is trained."""
        return self._draft is not None and not self._draft.done

    def step_finished(self, plan: StepPlan) -> None:
        """Settle the step's prompts. Call it before the new policy is delivered.

        Its tokens are not outstanding any more since it began, so that the rollout process generates while it is trained.
        With `max_staleness = 0` whatever is generated then would be dropped: they count until now, and that is published
        once the new policy is delivered.
        """
        if self._shape.max_staleness == 0:
            self._account.used(plan.cost)
        self._ledger.step_finished()

    def close(self) -> None:
        """End the planner. The source does not block any more."""
        self._planner.close()
