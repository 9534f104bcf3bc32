"""The rollout loop against a scripted generation server."""

import asyncio

import numpy as np
import pytest
from aiohttp import web

from slipstream.packing.trie import pack
from slipstream.rollout import types as t
from slipstream.rollout.loop import AsyncRolloutLoop
from slipstream.rollout.setup import Position
from slipstream.rollout.types import EndOfData, EvalResult, Rollout
from tests.generation_server import Answer
from tests.loop_harness import (
    EOS,
    LABEL,
    Harness,
    Lifecycle,
    all_results,
    by_seed,
    counting,
    drive,
    equal,
    fails,
    length_reward,
    rows,
    text_of,
)

# ---- what arrives


def test_a_group_arrives_as_it_must_be_trained():
    seen = []

    def reward(prompts, completions, completion_ids, gold):
        seen.append((prompts, completions, gold))
        return length_reward(completion_ids)

    result = all_results(Harness(rows("xy"), rewards=[reward]))[0]
    assert (result.number, result.epoch, result.position, result.row_index, result.dropped) == (0, 0, 0, 0, {})
    assert [s.input_ids.tolist() for s in result.samples] == [[62, 120, 121, *[97] * k, EOS] for k in (1, 2, 3)]
    assert [s.trained.tolist() for s in result.samples] == [[False] * 3 + [True] * (k + 1) for k in (1, 2, 3)]
    advantages = np.array([s.advantage for s in result.samples])
    assert advantages == pytest.approx([-(1.5**0.5), 0, 1.5**0.5], abs=1e-6)
    assert {s.oldest_version for s in result.samples} == {0}
    assert all(s.head_ids.shape == (s.num_trained, 8) for s in result.samples)
    assert result.cost == sum(s.cost for s in result.samples) == pack(result.samples).num_tokens
    assert all(s.queued_at > 0 for s in result.samples)
    prompts, completions, gold = seen[0]
    assert prompts == [rows("xy")[0]["prompt"]] * 3
    assert completions == [[{"role": "assistant", "content": "a" * k}] for k in (1, 2, 3)]
    assert gold == ["XY"] * 3
    assert ("reward", 3.0, 3) in result.observations


def test_every_prompt_of_every_epoch_once_then_the_end():
    found = all_results(Harness(rows(*"abcde"), setup={"end": 13}))
    assert sorted(found) == list(range(13))
    assert [(found[n].epoch, found[n].position) for n in (0, 4, 5, 12)] == [(0, 0), (0, 4), (1, 0), (2, 2)]


def test_the_order_is_another_in_each_epoch_and_the_seed_s():
    found = all_results(Harness(rows(*"abcdefgh"), setup={"end": 16, "shuffle": True, "seed": 5}))
    epochs = [[found[n].row_index for n in range(e * 8, e * 8 + 8)] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(8))
    assert epochs[0] != epochs[1]
    again = all_results(Harness(rows(*"abcdefgh"), setup={"shuffle": True, "seed": 5}))
    assert [again[n].row_index for n in range(8)] == epochs[0]


def test_a_resume_begins_where_it_was_told():
    harness = Harness(rows(*"abcdef"), setup={"position": Position(2, frozenset({3, 5}))})
    assert sorted(all_results(harness)) == [2, 4]
    assert sorted({text_of(body) for body in harness.server.bodies}) == ["c", "e"]


def test_equal_rewards_drop_the_group():
    found = all_results(Harness(rows("a", "b"), lambda b, i: equal(b, i) if text_of(b) == "a" else counting(b, i)))
    assert (found[0].samples, found[0].dropped, found[0].cost) == ([], {t.ZERO_STD: 3}, 0)
    assert len(found[1].samples) == 3


@pytest.mark.parametrize("label", ["default", "run/a2/0", "other/a1/0", "run/a1/torn"])
def test_tokens_of_weights_that_are_not_this_attempt_s_are_refused(label):
    def script(body, index):
        return counting(body, index, label if index == 1 else LABEL)

    result = all_results(Harness(rows("a"), script))[0]
    assert result.dropped == {t.FOREIGN: 1}
    assert len(result.samples) == 2


def test_a_token_without_a_label_is_refused():
    def script(body, index):
        answer = counting(body, index)
        answer.versions = [(LABEL, 0, len(answer.token_ids) - (index == 0))]
        return answer

    assert all_results(Harness(rows("a"), script))[0].dropped == {t.FOREIGN: 1}


def test_versions_come_from_the_spans():
    def script(body, index):
        return Answer([*[97] * (index + 1), EOS], [("run/a1/3", 0, 1), ("run/a1/4", 1, 9)])

    async def steps(h):
        h.version.value = 4
        return await h.results()

    result = drive(Harness(rows("a"), script), steps)[0]
    assert [s.versions.tolist() for s in result.samples] == [[-1, -1, 3, *[4] * (k)] for k in (1, 2, 3)]
    assert {s.oldest_version for s in result.samples} == {3}


def test_without_the_generate_route_the_version_is_the_one_at_the_start():
    async def steps(h):
        h.version.value = 6
        h.allowance.value = 10**9
        return await h.results()

    harness = Harness(rows("a"), counting, setup={"use_generate_route": False}, allowance=0)
    result = drive(harness, steps)[0]
    assert {s.oldest_version for s in result.samples} == {6}
    assert "prompt" in harness.server.bodies[0]


# ---- prompts that are not generated for, or not to the end


def test_a_prompt_without_room_is_settled_and_a_long_one_is_clamped():
    harness = Harness(rows("x" * 63, "y" * 60, "z"), setup={"max_model_len": 64}, max_completion_length=20)
    found = all_results(harness)
    assert found[0].dropped == {t.OVERSIZE_PROMPT: 1}
    limits = {text_of(body)[0]: body["sampling_params"]["max_tokens"] for body in harness.server.bodies}
    assert limits == {"y": 3, "z": 20}


class OnlyVowels(AsyncRolloutLoop):
    def filter_prompt(self, row_index, row, epoch):
        return row["prompt"][0]["content"] in "aeiou"


def test_a_filtered_prompt_is_settled_without_a_request():
    harness = Harness(rows(*"abce"), loop_cls=OnlyVowels)
    found = all_results(harness)
    assert {n: r.dropped for n, r in found.items() if r.dropped} == {1: {t.FILTERED: 1}, 2: {t.FILTERED: 1}}
    assert {text_of(body) for body in harness.server.bodies} == {"a", "e"}


def test_a_filter_that_rejects_everything_stops_the_run():
    fails(
        Harness(rows(*"bcd"), loop_cls=OnlyVowels, setup={"end": None}),
        RuntimeError,
        "rejected every prompt of epoch 0",
    )


class SecondFails(AsyncRolloutLoop):
    """The second rollout of each group raises."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.calls = 0

    async def generate_one(self, prompt, tools, group_id=0):
        self.calls += 1
        if self.calls % 3 == 2:
            raise OSError("a tool broke")
        return await super().generate_one(prompt, tools, group_id)


def test_a_failing_rollout_costs_itself_only():
    lengths = iter([1, 2, 1, 2])
    found = all_results(Harness(rows("a", "b"), lambda b, i: counting(b, next(lengths)), loop_cls=SecondFails))
    for result in found.values():
        assert result.dropped == {t.FAILED: 1}
        assert len(result.samples) == 2


def test_a_refused_request_costs_its_group_only():
    async def refuse_b(request):
        return web.Response(status=400, text="not b") if text_of(await request.json()) == "b" else None

    found = all_results(Harness(rows(*"abc"), fault=refuse_b))
    assert {n: r.dropped for n, r in found.items()} == {0: {}, 1: {t.FAILED: 3}, 2: {}}


def test_where_the_first_prompts_all_fail_the_run_stops_with_the_server_s_words():
    async def refuse(request):
        return web.Response(status=400, text="max_tokens must be at least 1")

    harness = Harness(rows(*"abcdef"), fault=refuse)
    fails(harness, RuntimeError, "first 6 rollouts all failed.*max_tokens must be at least 1")
    assert harness.server.bodies
    assert not any(isinstance(m, EndOfData) for m in harness.buffer.queue)


def test_a_group_that_became_too_old_in_flight_is_aborted_and_counted():
    released = None

    async def hold_b(request):
        if text_of(await request.json()) == "b":
            await released.wait()

    async def steps(h):
        nonlocal released
        released = asyncio.Event()
        first = await h.results(1)
        await h.until(lambda: any(text_of(body) == "b" for body in h.server.bodies), "the request for b")
        h.version.value = 2
        await h.beats()
        assert h.buffer.empty(), "two versions behind is not too old yet"
        h.version.value = 3
        second = await h.results(1)
        await h.until(lambda: h.server.running == 0, "the server sees that nobody waits for b")
        return {**first, **second}

    found = drive(Harness(rows(*"ab"), fault=hold_b, max_staleness=2), steps)
    assert found[1].dropped == {t.STALE: 3}
    assert found[1].samples == []


def test_a_straggler_does_not_hold_up_other_groups():
    async def hold_b(request):
        if text_of(await request.json()) == "b":
            await released.wait()

    async def steps(h):
        nonlocal released
        released = asyncio.Event()
        found = await h.results(4)
        assert sorted(found) == [0, 2, 3, 4]
        released.set()
        return (await h.message()).number, await h.message()

    released = None
    number, end = drive(Harness(rows(*"abcde"), fault=hold_b), steps)
    assert number == 1
    assert end == EndOfData(5)


# ---- requests


def test_a_group_is_one_request_where_nothing_asks_for_more():
    harness = Harness(rows("a", "b"))
    all_results(harness)
    assert [body["sampling_params"]["n"] for body in harness.server.bodies] == [3, 3]


class OwnTurn(AsyncRolloutLoop):
    async def generate_one_turn(self, prompt_ids):
        return await super().generate_one_turn(prompt_ids)


class OwnRollout(AsyncRolloutLoop):
    async def generate_one(self, prompt, tools, group_id=0):
        return await super().generate_one(prompt, tools, group_id)


class TwoTurns(AsyncRolloutLoop):
    async def generate_one(self, prompt, tools, group_id=0):
        first = await self.generate_one_turn(self.render(prompt))
        second = await self.generate_one_turn([*first.prompt_ids, *first.output_ids, ord("?")])
        return Rollout([], [*first.output_ids, *second.output_ids], [first, second])


@pytest.mark.parametrize("loop_cls", [OwnTurn, OwnRollout])
def test_a_hook_of_its_own_gets_a_request_per_rollout(loop_cls):
    harness = Harness(rows(*"abcd"), by_seed, loop_cls=loop_cls)
    all_results(harness)
    assert [body["sampling_params"]["n"] for body in harness.server.bodies] == [1] * 12


def seeds_of(harness):
    all_results(harness)
    return [body["sampling_params"]["seed"] for body in harness.server.bodies]


def test_every_request_has_a_seed_of_its_own_and_the_same_again():
    """Over prompts, generations, turns, epochs; another attempt samples anew."""
    data = rows(*"abcd")
    seeds = seeds_of(Harness(data, by_seed, loop_cls=TwoTurns, setup={"end": 8}))
    assert len(seeds) == 4 * 2 * 3 * 2
    assert len(set(seeds)) == len(seeds)
    assert sorted(seeds_of(Harness(data, by_seed, loop_cls=TwoTurns, setup={"end": 8}))) == sorted(seeds)
    label = "run/a2/0"
    other = Harness(data, lambda b, i: counting(b, 0, label), loop_cls=TwoTurns, setup={"end": 8, "attempt": 2})
    assert not set(seeds_of(other)) & set(seeds)


def test_two_turns_make_one_sequence():
    found = all_results(Harness(rows("a"), by_seed, loop_cls=TwoTurns))
    samples = found[0].samples
    assert len(samples) + found[0].dropped.get(t.ZERO_STD, 0) == 3
    for sample in samples:
        question = sample.input_ids.tolist().index(ord("?"))
        assert not sample.trained[question]
        assert sample.trained[2:question].all()
        assert sample.trained[question + 1 :].all()


# ---- bounds


def test_nothing_is_generated_before_the_trainer_allows_it():
    async def steps(h):
        await h.beats(4)
        assert h.server.bodies == []
        h.allowance.value = 10**9
        return await h.results()

    assert len(drive(Harness(rows("a", "b"), allowance=0), steps)) == 2


def test_rollouts_in_flight_stay_below_the_cap():
    async def hold(request):
        await released.wait()

    async def steps(h):
        nonlocal released
        released = asyncio.Event()
        first = asyncio.create_task(h.results(10))
        await h.until(lambda: h.server.running >= 3, "the first group in flight")
        released.set()
        await first

    released = None
    harness = Harness(rows(*"abcdefghij"), by_seed, loop_cls=OwnTurn, max_concurrent_rollouts=7, fault=hold)
    drive(harness, steps)
    assert 3 <= harness.server.peak <= 7, "never more than two groups of three"


@pytest.mark.parametrize("script", [counting, equal])
def test_groups_in_flight_stay_within_the_allowance_dropped_ones_too(script):
    """A prompt of 10 + 1 tokens: groups of 14 to 20. Nothing is consumed, so after the first few none may start."""
    data = rows(*[chr(97 + i) * 10 for i in range(12)])
    size = pack(all_results(Harness(data[:1]))[0].samples).num_tokens if script is counting else 11 + 2 + 2 * 2

    async def hold_all_but_first(request):
        if text_of(await request.json())[0] != "a":
            await released.wait()

    async def steps(h):
        nonlocal released
        released = asyncio.Event()
        h.trainer_waits.value = 0
        await h.results(1)
        await h.until(lambda: h.server.running >= 6, "two groups in flight")
        await h.beats(4)
        peak = h.server.peak
        h.allowance.value = 10**9
        released.set()
        return peak

    released = None
    used = size if script is counting else 0
    peak = drive(Harness(data, script, fault=hold_all_but_first, allowance=used + 2 * size), steps)
    assert peak == 6, "two groups of three, not all eleven"


# ---- commands


def test_the_loop_s_state_is_answered():
    async def steps(h):
        await h.results(1)
        assert await h.message() == EndOfData(1)
        h.commands.put(("state", 7))
        return await h.message()

    assert drive(Harness(rows("a"), loop_cls=Lifecycle), steps) == ("state", 7, {"seen": 5})


def contains_a(completions, **kwargs):
    return [float(len(c[0]["content"])) if c[0]["content"] else None for c in completions]


def test_evaluation_is_one_rollout_per_held_out_prompt():
    async def refuse_c(request):
        return web.Response(status=400, text="no") if text_of(await request.json()) == "!c" else None

    def script(body, index):
        text = text_of(body)
        if not text.startswith("!"):
            return counting(body, index)
        ids = {"!a": [97, EOS], "!b": [97, 97, 97], "!d": [EOS]}[text]
        return Answer(ids, [(LABEL, 0, len(ids))])

    async def steps(h):
        await h.results(1)
        assert await h.message() == EndOfData(1)
        h.commands.put(("evaluate", 4))
        return await h.message()

    data = rows("!a", "!b", "!c", "!d")
    found = drive(Harness(rows("a"), script, fault=refuse_c, rewards=[contains_a], setup={"eval_dataset": data}), steps)
    assert isinstance(found, EvalResult)
    assert found.request == 4
    assert found.metrics == pytest.approx(
        {
            "reward": 2.0,  # of 1 and 3; one is unscored and one failed
            "reward_std": 1.0,
            "mean_length": 2.0,
            "clipped_ratio": 1 / 3,
            "prompts": 3,
            "rewards/contains_a": 2.0,
        }
    )
    assert [row["reward"] for row in found.table] == [1, 3, None]


def test_completions_are_logged_where_asked():
    harness = Harness(rows("a"), log_completions=True)
    table = all_results(harness)[0].table
    assert [(row["reward"], row["completion"][0]["content"]) for row in table] == [(2, "a"), (3, "aa"), (4, "aaa")]
    assert all_results(Harness(rows("a")))[0].table == []
