"""Failures that users of systems like this one report, each with what happens here. Those that need no process.

`docs/async_grpo.md` has the table of all of them.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from slipstream.learner.feed import SampleFeed
from slipstream.learner.ledger import Ledger
from slipstream.metrics.window import Window
from slipstream.rollout.allowance import Outstanding, may_start, outstanding_bound
from slipstream.rollout.loop import AsyncRolloutLoop
from slipstream.rollout.setup import Position
from slipstream.rollout.types import FAILED, STALE, TRAINED, GroupResult, TurnRecord
from tests.generation_server import Answer, GenerationServer
from tests.rollout_double import DEADLINE_S, EOS, Double
from tests.samples import make_result, make_sample

LABEL = "run/a1/0"
BROKEN_ANSWERS: dict[str, str] = {
    "no choices": "{}",
    "an error as an answer": '{"error": {"message": "engine dead"}}',
    "a list": "[]",
    "no tokens": '{"choices": [{"index": 0}, {"index": 1}, {"index": 2}]}',
    "token ids that are none": '{"choices": [{"index": 0, "token_ids": 7}, {"index": 1}, {"index": 2}]}',
}


def counting(body: dict[str, Any], index: int) -> Answer:
    """Answer k of a group is k+1 letters and EOS: the rewards of a group differ."""
    ids = [ord("a")] * (index + 1) + [EOS]
    return Answer(ids, [(LABEL, 0, len(ids))])


def prompt_of(body: dict[str, Any]) -> str:
    return "".join(chr(i) for i in body["token_ids"])[1:]


def held(prompt: str, release: asyncio.Event) -> Callable[[web.Request], Awaitable[None]]:
    """A fault that lets requests for one prompt wait."""

    async def hold(request: web.Request) -> None:
        if prompt_of(await request.json()) == prompt:
            await release.wait()

    return hold


def drive(make: Callable[[], Double], steps: Callable[[Double], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with make() as double:
            return await asyncio.wait_for(steps(double), DEADLINE_S)

    return asyncio.run(run())


def numbers(double: Double) -> list[int]:
    return sorted(group.number for group in double.groups)


# ---- one failed generation killed the worker


@pytest.mark.parametrize("answer", BROKEN_ANSWERS.values(), ids=BROKEN_ANSWERS)
def test_one_senseless_answer_costs_its_group_and_the_worker_goes_on(answer: str) -> None:
    async def break_b(request: web.Request) -> web.Response | None:
        is_b = prompt_of(await request.json()) == "b"
        return web.Response(text=answer, content_type="application/json") if is_b else None

    async def steps(double: Double) -> dict[int, dict[str, int]]:
        await double.until(lambda: double.ended, "the end of the data")
        return {group.number: group.dropped for group in double.groups}

    found = drive(lambda: Double(GenerationServer(counting, break_b), 4, AsyncRolloutLoop), steps)
    assert found == {0: {}, 1: {FAILED: 3}, 2: {}, 3: {}}


class ContradictsItself(AsyncRolloutLoop):
    """The second rollout of each group has fewer log-probabilities than tokens."""

    calls = 0

    async def generate_one_turn(self, prompt_ids: list[int]) -> TurnRecord:
        turn = await super().generate_one_turn(prompt_ids)
        type(self).calls += 1
        if self.calls % 3 == 2:
            turn.output_log_probs = turn.output_log_probs[:-1]
        return turn


def test_a_rollout_that_contradicts_itself_costs_itself_only() -> None:
    lengths = iter([0, 1, 2] * 2)

    async def steps(double: Double) -> list[tuple[int, dict[str, int]]]:
        await double.until(lambda: double.ended, "the end of the data")
        return [(len(group.samples), group.dropped) for group in double.groups]

    server = GenerationServer(lambda body, index: counting(body, next(lengths)))
    found = drive(lambda: Double(server, 2, ContradictsItself, allowance=1), steps_waiting(steps))
    assert found == [(2, {FAILED: 1})] * 2


def steps_waiting(steps: Callable[[Double], Awaitable[Any]]) -> Callable[[Double], Awaitable[Any]]:
    """With a trainer that waits for samples all the time."""

    async def run(double: Double) -> Any:
        double.loop._trainer_waits.value = 1
        return await steps(double)

    return run


# ---- a straggler blocked its group, and again after every resume


def test_a_straggler_does_not_use_up_the_allowance_while_the_trainer_waits() -> None:
    """The bound is one group. Everything behind the straggler is generated all the same, one group at a time."""
    release = None

    async def steps(double: Double) -> None:
        await double.until(lambda: numbers(double) == [0, 2, 3, 4], "every group but the straggler's")
        assert double.server.peak <= 6, "the straggler and one more"
        release.set()
        await double.until(lambda: double.ended, "the end of the data")
        assert numbers(double) == [0, 1, 2, 3, 4]

    def make() -> Double:
        nonlocal release
        release = asyncio.Event()
        # a first group has to be generated before anything can be overtaken; b is the second, and is not waited for
        return Double(GenerationServer(counting, held("b", release)), 5, AsyncRolloutLoop, allowance=30)

    drive(make, steps_waiting(steps))


@pytest.mark.parametrize(
    ("in_flight", "overtaken", "scoring", "waits", "expected"),
    [
        (1, 1, 0, True, True),
        (1, 0, 0, True, False),  # nobody has overtaken it: it is no straggler
        (2, 1, 0, True, False),  # one more is on its way to the trainer
        (1, 1, 1, True, False),
        (1, 1, 0, False, False),  # the trainer has work: the bound holds
    ],
)
def test_when_stragglers_count_as_nothing(
    in_flight: int, overtaken: int, scoring: int, waits: bool, expected: bool
) -> None:
    assert may_start(Outstanding(99, in_flight, scoring, 10.0, overtaken), 50, waits) is expected


@pytest.mark.parametrize("group_tokens", [8.0, None])
def test_after_a_resume_the_first_prompt_may_be_the_straggler(group_tokens: float | None) -> None:
    """Without the size of groups from before it would be waited for alone, as at the start of a run."""
    release = None

    async def steps(double: Double) -> None:
        if group_tokens is None:
            await double.until(lambda: double.server.bodies, "the first request")
            beats = double.loop._heartbeat
            for _ in range(4):
                last = beats.value
                await double.until(lambda last=last: beats.value != last, "a heartbeat")
            assert {prompt_of(body) for body in double.server.bodies} == {"b"}
        else:
            await double.until(lambda: numbers(double) == [3, 5], "what is neither settled nor the straggler's")
        release.set()
        await double.until(lambda: double.ended, "the end of the data")
        assert numbers(double) == [1, 3, 5]

    def make() -> Double:
        nonlocal release
        release = asyncio.Event()
        setup = {"position": Position(1, frozenset({2, 4})), "group_tokens": group_tokens}
        return Double(GenerationServer(counting, held("b", release)), 6, AsyncRolloutLoop, setup)

    drive(make, steps)


# ---- one stale-dropped group pinned the resume cursor, later work was retrained


class Listed:
    """Groups from a list, given out while the published allowance and the trainer's waiting let them start."""

    num_samples = 0

    def __init__(self, groups: list[GroupResult]) -> None:
        self.groups = groups
        self.started = self.allowance = 0

    def take(self) -> GroupResult | None:
        if not self.groups:
            return None
        mean = 8.0 if self.started else None
        assert may_start(Outstanding(self.started, 0, 0, mean), self.allowance, True), "stuck"
        group = self.groups.pop(0)
        self.started += group.cost
        return group

    def publish(self, allowance_total: int) -> None:
        self.allowance = allowance_total

    def step_awaited(self):
        """A list waits for nothing."""

    def step_planned(self) -> None:
        """Nothing."""


def group(number: int, version: int = 0) -> GroupResult:
    samples = [make_sample([1], [2 + number] * 3, number=number, version=version) for _ in range(2)]
    for sample in samples:
        sample.cost = 4
    return make_result(number, samples, 100)


def feed_of(groups: list[GroupResult], position: Position, **options: Any) -> tuple[SampleFeed, Ledger, list[Any]]:
    lines: list[dict[str, Any]] = []
    ledger = Ledger(100, position, lines.append)
    settings = {"ranks": 1, "accumulation": 1, "token_budget": 8, "max_staleness": 2, "warn": print, **options}
    feed = SampleFeed(Listed(groups), ledger, Window(), **settings)
    feed.open()
    return feed, ledger, lines


def train(feed: SampleFeed, version: int, steps: int = 10**6) -> int:
    """Train up to so many steps from a policy version on; the version at the end."""
    for _ in range(steps):
        plan = feed.next_step(version)
        if plan is None:
            break
        feed.step_finished(plan)
        version += 1
    return version


def test_a_group_dropped_as_stale_does_not_pin_the_resume_point() -> None:
    feed, ledger, lines = feed_of([group(0, 40), group(1, 30), group(2, 41), group(3, 41)], Position())
    train(feed, 40)
    assert [line["outcomes"] for line in sorted(lines, key=lambda line: line["number"])] == [
        {TRAINED: 2},
        {STALE: 2},
        {TRAINED: 2},
        {TRAINED: 2},
    ]
    assert ledger.position == Position(4, frozenset())


def test_a_straggler_pins_the_point_and_not_what_was_trained_behind_it() -> None:
    feed, ledger, _ = feed_of([group(0), group(2), group(3)], Position(), max_staleness=10)
    train(feed, 0)
    assert ledger.position == Position(1, frozenset({2, 3}))
    assert list(ledger.position.numbers(6)) == [1, 4, 5], "a resume generates the straggler again, and not 2 and 3"


# ---- after a resume, staleness capacity counted from version 0


def test_staleness_after_a_resume_counts_from_the_resumed_version() -> None:
    feed, _, lines = feed_of([group(0, 40), group(1, 37), group(2, 41)], Position())
    train(feed, 40)
    outcomes = {line["number"]: line["outcomes"] for line in lines}
    assert outcomes == {0: {TRAINED: 2}, 1: {STALE: 2}, 2: {TRAINED: 2}}


def test_the_allowance_after_a_resume_is_that_of_a_fresh_run() -> None:
    """Both sides count tokens from their own start, not versions: no version makes the bound larger."""
    feed, _, _ = feed_of([group(n, 40) for n in range(60, 64)], Position(60))
    assert feed._source.allowance == outstanding_bound(2, 8)  # type: ignore[attr-defined]


# ---- resume with a full buffer: silent deadlock


def test_more_held_back_than_may_be_outstanding_is_trained_first_and_then_the_rest() -> None:
    before = [sample for number in range(20) for sample in group(number).samples]
    assert sum(sample.cost for sample in before) > 5 * outstanding_bound(2, 8)
    feed, ledger, lines = feed_of([group(number) for number in range(20, 30)], Position(), max_staleness=1_000)
    ledger.restore(before)
    feed.hold(before)
    train(feed, 0)
    assert [line["number"] for line in lines] == list(range(30))
    assert ledger.position == Position(30, frozenset())


# ---- the HTTP client was capped at 100 connections


class ARequestEach(AsyncRolloutLoop):
    async def generate_one_turn(self, prompt_ids: list[int]) -> TurnRecord:
        return await super().generate_one_turn(prompt_ids)


def test_more_than_100_rollouts_are_in_flight_at_once() -> None:
    """No request but the first group's is answered before 180 have arrived."""

    async def wait_for_180(request: web.Request) -> None:
        if prompt_of(await request.json()) != "a":
            while server.peak < 180:
                await asyncio.sleep(0.01)

    async def steps(double: Double) -> int:
        await double.until(lambda: double.ended, "the end of the data")
        return double.server.peak

    lengths = iter(range(10**6))
    server = GenerationServer(lambda body, index: counting(body, next(lengths) % 3), wait_for_180)
    assert drive(lambda: Double(server, 80, ARequestEach), steps) >= 180


# ---- retokenising a turn changed its ids


def test_tokens_are_trained_as_they_were_sampled_not_as_their_text_is_tokenised() -> None:
    """Decoding drops EOS, so no tokenisation of the text gives these tokens back; the second turn goes on from them."""

    class TwoTurns(AsyncRolloutLoop):
        async def generate_one(self, prompt: Any, tools: Any, group_id: int = 0) -> Any:
            first = await self.generate_one_turn(self.render(prompt))
            second = await self.generate_one_turn([*first.prompt_ids, *first.output_ids, ord("?")])
            return type(self._single_turn(first))([], [*first.output_ids, *second.output_ids], [first, second])

    ids = iter(range(10**6))

    def odd(body: dict[str, Any], index: int) -> Answer:
        tokens = [EOS, ord("x"), EOS, *[ord("y")] * (next(ids) % 5), EOS]
        return Answer(tokens, [(LABEL, 0, len(tokens))])

    async def steps(double: Double) -> tuple[list[dict[str, Any]], list[GroupResult]]:
        await double.until(lambda: double.ended, "the end of the data")
        return double.server.bodies, double.groups

    bodies, groups = drive(lambda: Double(GenerationServer(odd), 3, TwoTurns), steps)
    asked = [body["token_ids"] for body in bodies]
    second = [prompt for prompt in asked if ord("?") in prompt]
    assert len(second) == 9
    samples = [sample.input_ids.tolist() for group in groups for sample in group.samples]
    assert samples
    for ids_of_sample in samples:
        assert any(ids_of_sample[: len(prompt)] == prompt for prompt in second), (
            "one sequence: the past is kept as it is"
        )
        assert ids_of_sample[2:5] == [EOS, ord("x"), EOS]
