"""How far generation runs ahead: the rule by tables, and the whole pipeline in simulation.

The simulation is of the rollout process and of when the planning thread gets to work: the real feed, drafts, ledger,
packing and allowance stand on the trainer's side, and the real `may_start` decides in the simulated process. Events
happen in random order, the planner's moves among them.
"""

import copy
import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.learner.draft import Draft
from slipstream.learner.feed import SampleFeed
from slipstream.learner.ledger import Ledger, NothingTrained
from slipstream.metrics.audit import check_lines
from slipstream.metrics.window import Window
from slipstream.rollout.allowance import Outstanding, full_step, may_start, outstanding_bound
from slipstream.rollout.sequences import assign_costs
from slipstream.rollout.setup import Position
from slipstream.rollout.types import FAILED, FILTERED, OVERSIZE_PROMPT, STALE, TRAINED, ZERO_STD, GroupResult
from tests.samples import make_result, make_sample


@pytest.mark.parametrize(("staleness", "bound"), [(0, 100), (1, 100), (2, 200), (4, 400)])
def test_the_bound_is_of_at_least_one_step(staleness, bound):
    assert outstanding_bound(staleness, 100) == bound


def test_a_full_step_is_every_row_of_every_micro_batch():
    assert full_step(ranks=2, accumulation=3, token_budget=100) == 600


@pytest.mark.parametrize(
    ("finished", "in_flight", "scoring", "mean", "allowance", "waits", "expected"),
    [
        (0, 0, 0, None, 0, True, False),  # the trainer has published nothing: its weights are not on the server yet
        (0, 0, 0, None, 100, False, True),  # the first group
        (0, 1, 0, None, 100, False, False),  # one at a time until its size is known
        (0, 0, 1, None, 100, True, False),
        (50, 0, 0, None, 100, False, True),
        (10, 0, 0, 10.0, 20, False, True),  # exactly fits
        (11, 0, 0, 10.0, 20, False, False),
        (0, 3, 1, 10.0, 50, False, True),
        (1, 3, 1, 10.0, 50, False, False),
        (99, 0, 0, 10.0, 50, True, True),  # liveness: the trainer waits and nothing is under way
        (99, 1, 0, 10.0, 50, True, False),
        (99, 0, 1, 10.0, 50, True, False),
        (99, 0, 0, 10.0, 50, False, False),
    ],
)
def test_when_a_group_may_start(finished, in_flight, scoring, mean, allowance, waits, expected):
    assert may_start(Outstanding(finished, in_flight, scoring, mean), allowance, waits) is expected


class Stuck(AssertionError):
    """The trainer waits, and neither the planner nor the rollout process can do anything."""


@dataclass(frozen=True)
class Mix:
    """What the groups are like: lengths and how often each reason drops them."""

    generations: int
    shortest: int
    longest: int
    dropped: float = 0.0
    oversize: float = 0.0


@dataclass
class Process:
    """The simulated rollout process, and the trainer's view of it (a `Source`)."""

    draw: random.Random
    mix: Mix
    length: int
    end: int
    budget: int
    max_staleness: int
    position: Position
    version: int = 0
    max_groups: int = 10**9
    allowance: int = 0
    awaited: bool = False
    finished_total: int = 0
    sizes: list[int] = field(default_factory=list)
    in_flight: list[tuple[int, int, list]] = field(default_factory=list)
    scoring: list[GroupResult] = field(default_factory=list)
    queue: deque = field(default_factory=deque)
    starts: list[tuple[int, int, bool]] = field(default_factory=list)
    in_order: bool = False

    def __post_init__(self):
        self.to_come = list(self.position.numbers(self.end))[::-1]
        self.planner = SimulatedPlanner(self)

    # what the trainer sees

    @property
    def num_samples(self):
        return sum(len(result.samples) for result in self.queue)

    def publish(self, total):
        self.allowance = total

    def step_awaited(self):
        self.awaited = True

    def step_planned(self):
        self.awaited = False

    def take(self):
        raise AssertionError("the simulated planner looks into the queue itself")

    # what goes on in it

    @property
    def waits(self):
        """Whether the trainer waits for a group that is not here yet."""
        return self.awaited and self.planner.taking and not self.queue

    @property
    def over(self):
        return not (self.to_come or self.in_flight or self.scoring or self.queue)

    def outstanding(self):
        mean = sum(self.sizes) / len(self.sizes) if self.sizes else None
        return Outstanding(self.finished_total, len(self.in_flight), len(self.scoring), mean)

    def happen(self, events):
        for _ in range(events):
            self.event()

    def event(self) -> bool:
        """One thing that can happen now, at random; False where nothing can."""
        can_start = (
            bool(self.to_come)
            and len(self.in_flight) < self.max_groups
            and may_start(self.outstanding(), self.allowance, self.waits)
        )
        choices = (
            [self.start] * can_start
            + [self.finish] * bool(self.in_flight)
            + [self.hand_over] * bool(self.scoring)
            + [self.planner.move] * self.planner.can_move
        )
        if not choices:
            return False
        self.draw.choice(choices)()
        return True

    def start(self):
        idle = not (self.in_flight or self.scoring)
        number = self.to_come.pop()
        if self.draw.random() < self.mix.dropped / 4:
            self.put(make_result(number, [], self.length, {self.draw.choice([FILTERED, OVERSIZE_PROMPT]): 1}))
            return
        samples = []
        prompt = [1000 + number] * self.draw.randint(1, 2)
        for _ in range(self.mix.generations):
            length = self.draw.randint(self.mix.shortest, self.mix.longest)
            if self.draw.random() < self.mix.oversize:
                length = self.budget + 1
            answer = [self.draw.randint(1, 9) for _ in range(max(length - len(prompt), 1))]
            samples.append(make_sample(prompt, answer, number=number, version=self.version))
        self.in_flight.append((number, self.version, samples))
        under_way = sum(assign_costs(group) for _, _, group in self.in_flight)
        waiting = sum(result.cost for result in self.scoring)
        self.starts.append((self.finished_total + waiting + under_way, self.allowance, idle and self.waits))

    def finish(self):
        number, _, samples = self.in_flight.pop(0 if self.in_order else self.draw.randrange(len(self.in_flight)))
        self.sizes.append(assign_costs(samples))
        for sample in samples[
            : self.draw.randint(0, len(samples))
        ]:  # a switch of weights in flight: some tokens are newer
            sample.versions[-1] = self.version
        result = make_result(number, samples, self.length)
        if self.draw.random() < self.mix.dropped:
            reason = self.draw.choice([ZERO_STD, FAILED])
            result = make_result(number, [], self.length, {reason: len(samples)})
        self.scoring.append(result)

    def hand_over(self):
        self.put(self.scoring.pop(0 if self.in_order else self.draw.randrange(len(self.scoring))))

    def put(self, result):
        self.finished_total += result.cost
        self.queue.append(result)

    def set_version(self, version):
        self.version = version
        for entry in [e for e in self.in_flight if e[1] < version - self.max_staleness]:
            self.in_flight.remove(entry)
            self.put(make_result(entry[0], [], self.length, {STALE: len(entry[2])}))


@dataclass
class SimulatedPlanner:
    """The planning thread: what it does next happens when the simulation lets it."""

    process: Process
    draft: Draft | None = None
    following: Draft | None = None  # takes the place of one that is blocked in `take`
    begun: bool = False

    def begin(self, draft):
        if self.taking:
            self.following = draft
        else:
            self.draft, self.begun = draft, False

    @property
    def taking(self):
        return self.draft is not None and self.begun and not self.draft.done and self.draft.needs_group

    @property
    def can_move(self):
        if self.taking:
            return bool(self.process.queue) or self.process.over
        return self.draft is not None and not self.draft.done

    def move(self):
        if not self.begun:
            self.begun = True
            self.draft.begin()
        elif self.taking:
            self.draft.add(self.process.queue.popleft() if self.process.queue else None)
            if self.following is not None:
                self.draft, self.following, self.begun = self.following, None, False
        else:
            self.draft.finish()

    def wait(self, draft):
        if not (draft.done or draft.has_events or self.process.event()):
            process = self.process
            raise Stuck(f"at version {process.version}: {process.outstanding()}, allowance {process.allowance}")

    def close(self):
        """Nothing runs."""


@dataclass
class Run:
    """A run of the pipeline, with stops and resumes; `lines` are its ledger without what is void."""

    mix: Mix
    seed: int
    prompts: int = 20
    epochs: int = 1
    ranks: int = 1
    accumulation: int = 1
    budget: int = 20
    max_staleness: int = 1
    sync_steps: int = 1
    max_groups: int = 10**9
    checkpoint_every: int = 10**9
    crash_after: tuple[int, ...] = ()
    in_order: bool = False
    busy: int = 0  # events while a step is trained, if not random
    wrong: float = 0.0  # how often the version of the step after is foretold wrongly
    ahead: bool = True  # whether a step is drafted while the one before is trained

    def __post_init__(self):
        self.draw = random.Random(self.seed)
        self.lines: list[dict] = []
        self.trained: list[tuple[int, int]] = []  # (step, prompt number) of each sample, without what is void
        self.steps = 0
        self.started_while_training = self.started_while_delivering = 0
        self.plans: list = []
        self.processes: list[Process] = []
        self.saved = (0, 0, Position(), [])  # step, version, position, remainder

    def attempt(self, crash_at: int | None) -> bool:
        """Run from the last checkpoint; whether the end of the data was reached."""
        step, version, position, remainder = self.saved
        remainder = copy.deepcopy(remainder)
        held = {sample.number for sample in remainder}
        self.lines = [line for line in self.lines if line["step"] <= step]
        self.trained = [entry for entry in self.trained if entry[0] <= step]
        process = Process(
            self.draw,
            self.mix,
            self.prompts,
            self.prompts * self.epochs,
            self.budget,
            self.max_staleness,
            Position(position.first_unsettled, position.settled_beyond | held),
            version,
            self.max_groups,
            in_order=self.in_order,
        )
        self.processes.append(process)
        ledger = Ledger(self.prompts, position, self.lines.append)
        feed = SampleFeed(
            process,
            ledger,
            Window(),
            ranks=self.ranks,
            accumulation=self.accumulation,
            token_budget=self.budget,
            max_staleness=self.max_staleness,
            warn=lambda message: None,
            planner=process.planner,
        )
        ledger.restore(remainder)
        feed.hold(remainder)
        ledger.start_at(step)
        feed.open()
        while (plan := feed.next_step(version, self.following(step + 1, version))) is not None:
            self.plans.append(plan)
            assert not process.awaited
            before = len(process.starts)
            process.happen(self.busy or self.draw.randint(0, 10))
            self.started_while_training += len(process.starts) - before
            feed.step_finished(plan)
            before = len(process.starts)
            process.happen(self.busy or self.draw.randint(0, 3))
            self.started_while_delivering += len(process.starts) - before
            step += 1
            self.steps += 1
            self.trained += [(step, sample.number) for sample in plan.samples]
            if step % self.sync_steps == 0:
                version += 1
                process.set_version(version)
            process.happen(self.draw.randint(0, 3))
            if step % self.checkpoint_every == 0:
                rest = copy.deepcopy(feed.held_of(ledger.partly_trained()))
                for sample in rest:
                    sample.cost = 0
                self.saved = (step, version, ledger.position, rest)
            if step == crash_at:
                return False
        return True

    def following(self, step: int, version: int) -> int | None:
        """The version at which the step after `step` will be trained, as the trainer foretells it."""
        if not self.ahead:
            return None
        if self.draw.random() < self.wrong:
            return version + self.draw.randint(0, 3)
        return version + (step % self.sync_steps == 0)

    def go(self) -> "Run":
        """Through all crashes to the end. An epoch in which everything is dropped may end it early."""
        try:
            for crash_at in (*self.crash_after, None):
                if self.attempt(crash_at):
                    break
        except NothingTrained:
            assert self.mix.dropped or self.mix.oversize or self.max_staleness == 0
            return self
        assert check_lines(self.lines, self.prompts, self.epochs) == []
        often = Counter(number for _, number in self.trained)
        assert max(often.values(), default=0) <= self.mix.generations, "a group that was split is trained twice"
        return self

    def beyond_allowance(self) -> float:
        """The part of the groups that started only because the trainer waited and nothing was under way."""
        starts = [start for process in self.processes for start in process.starts]
        return sum(total > allowance for total, allowance, _ in starts) / len(starts)

    def outcome(self, reason: str) -> int:
        return sum(line["outcomes"].get(reason, 0) for line in self.lines)


@st.composite
def runs(draw):
    budget = draw(st.integers(4, 30))
    shortest = draw(st.integers(2, budget))
    mix = Mix(
        generations=draw(st.integers(1, 6)),
        shortest=shortest,
        longest=draw(st.integers(shortest, budget)),
        dropped=draw(st.sampled_from([0.0, 0.3, 0.9])),
        oversize=draw(st.sampled_from([0.0, 0.2])),
    )
    every = draw(st.integers(1, 4))
    return Run(
        mix=mix,
        seed=draw(st.integers(0, 10**6)),
        prompts=draw(st.integers(1, 14)),
        epochs=draw(st.integers(1, 2)),
        ranks=draw(st.integers(1, 3)),
        accumulation=draw(st.integers(1, 3)),
        budget=budget,
        max_staleness=draw(st.integers(0, 3)),
        sync_steps=draw(st.integers(1, 3)),
        max_groups=draw(st.sampled_from([1, 2, 10**9])),
        checkpoint_every=every,
        crash_after=tuple(draw(st.lists(st.integers(1, 8), max_size=3))),
        wrong=draw(st.sampled_from([0.0, 0.0, 0.5])),
        ahead=draw(st.sampled_from([True, True, False])),
    )


@settings(max_examples=120, deadline=None)
@given(runs())
def test_the_pipeline_reaches_the_end_of_the_data(run):
    """Every prompt of every epoch is settled exactly once, whatever is dropped and wherever the run is cut off."""
    run.go()
    if not (run.mix.dropped or run.mix.oversize):
        assert run.outcome(TRAINED) > 0, "with nothing dropped by the rollout process, something is trained"


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("wrong", [0.0, 0.5])
def test_no_sample_is_trained_beyond_the_staleness_bound(seed, max_staleness, wrong):
    """Nor is one dropped within it, even if a draft was judged for another version than the one it is trained at."""
    run = Run(Mix(3, 4, 8), seed, prompts=30, max_staleness=max_staleness, wrong=wrong).go()
    assert run.plans
    for version, plan in enumerate(run.plans):  # one sync a step: the policy's version is the number of the step
        assert all(version - sample.oldest_version <= max_staleness for sample in plan.samples)


@pytest.mark.parametrize("seed", range(5))
def test_without_staleness_it_still_trains(seed):
    """Only what did not fit into a step is dropped, since nothing starts before the new policy is there: of each step's
    groups one, and those that were under way when it closed."""
    run = Run(Mix(2, 5, 5), seed, prompts=60, max_staleness=0, budget=20, busy=50).go()
    assert run.started_while_training + run.started_while_delivering == 0
    assert run.outcome(TRAINED) + run.outcome(STALE) == 120
    assert run.outcome(TRAINED) >= 60
    assert run.beyond_allowance() < 0.5, "what a step used is given back"


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_with_staleness_most_is_generated_while_a_step_is_trained_and_hardly_any_is_wasted(seed, max_staleness):
    """About ten groups a step, in order: the step after next is on its way while one is trained."""
    run = Run(Mix(2, 5, 5), seed, prompts=200, max_staleness=max_staleness, budget=100, in_order=True, busy=100).go()
    assert run.started_while_training > 100
    assert run.outcome(STALE) <= 12, "of 400"


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("ranks", "accumulation", "max_staleness"), [(1, 1, 1), (2, 1, 2), (1, 3, 4), (2, 2, 0)])
def test_generation_stays_within_the_bound(seed, ranks, accumulation, max_staleness):
    """With groups of one size: nobody starts a group beyond the published total, except one at a time for a trainer that
    waits, and then no more is outstanding than fills the trainer's rows, and one group."""
    size = 10
    run = Run(
        Mix(1, size, size),
        seed,
        prompts=60,
        ranks=ranks,
        accumulation=accumulation,
        max_staleness=max_staleness,
        budget=25,
    ).go()
    (process,) = run.processes
    excess = 0
    for started_total, allowance, liveness in process.starts:
        assert liveness or started_total <= allowance
        excess = max(excess, started_total - allowance)
    assert excess <= full_step(ranks, accumulation, 25) + size
    assert len(process.starts) == 60


@pytest.mark.parametrize("seed", range(3))
def test_tokens_of_dropped_samples_are_given_back(seed):
    """Half of the samples fit no row: were they counted as outstanding for ever, generation would soon crawl."""
    run = Run(Mix(2, 5, 5, oversize=0.5), seed, prompts=100, max_staleness=4, budget=60, busy=50).go()
    assert run.beyond_allowance() < 0.5


def test_a_bound_smaller_than_what_a_step_needs_is_no_deadlock():
    """One rank, one row of 20, groups of 11: a step trains 11 tokens, so the bound is 11, and closing a micro-batch needs
    a second group that does not fit."""
    run = Run(Mix(1, 11, 11), seed=0, prompts=10, budget=20, max_staleness=1).go()
    assert run.steps == 10
    assert run.outcome(TRAINED) == 10


def test_the_simulation_can_get_stuck(monkeypatch):
    """Without the rule for a waiting trainer, the simulation does find the deadlock."""
    monkeypatch.setattr(
        __name__ + ".may_start",
        lambda outstanding, allowance, waits: may_start_without_liveness(outstanding, allowance),
    )
    with pytest.raises(Stuck):
        Run(Mix(1, 11, 11), seed=0, prompts=10, budget=20, max_staleness=1).go()


_real_may_start = may_start


def may_start_without_liveness(outstanding, allowance):
    return _real_may_start(outstanding, allowance, False)
