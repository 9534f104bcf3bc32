"""Rewards of a group."""

import asyncio
import functools
import logging
import math
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from slipstream.rollout import scoring
from slipstream.rollout.scoring import RewardError, reward_arguments, score, total_rewards, unique_names
from tests.groups import make_group


def run(functions, arguments=None, count=2):
    with ThreadPoolExecutor(4) as executor:
        found = score(functions, unique_names(functions), executor, arguments or {}, count)
        return asyncio.run(found)


def by_length(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


async def awaited(completion_ids, **kwargs):
    await asyncio.sleep(0)
    return [None if not ids else 1 for ids in completion_ids]


class Callable_:
    def __init__(self, value):
        self.value = value

    def __call__(self, completion_ids, **kwargs):
        return [self.value] * len(completion_ids)


class AsyncCallable:
    async def __call__(self, completion_ids, **kwargs):
        return [2.0] * len(completion_ids)


def scaled(completion_ids, factor, **kwargs):
    return [factor * len(ids) for ids in completion_ids]


def returns_coroutine(**kwargs):
    return awaited(**kwargs)


class Unwritable(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (StopIteration("none fits"), "StopIteration: none fits"),  # next() of nothing; a future would not take it
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (asyncio.CancelledError(), "CancelledError"),
        (TimeoutError("of its own"), "TimeoutError: of its own"),
        (Unwritable(), "Unwritable: <Unwritable>"),
    ],
)
def test_a_reward_that_raises_what_others_cannot_is_an_error_with_its_name(raised, said):
    def my_reward(**kwargs):
        raise raised

    async def my_async_reward(**kwargs):
        raise raised

    for function in (my_reward, my_async_reward):
        with pytest.raises(RewardError, match=f"reward {function.__name__} raised {said}"):
            run([function], {"completion_ids": [[1], [2]]})


def test_what_a_reward_does_to_its_arguments_reaches_no_other():
    def takes_away(completion_ids, **kwargs):
        while completion_ids:
            completion_ids.pop()
        return [0, 0]

    given = {"completion_ids": [[1], [2, 3]]}
    assert run([takes_away, by_length], given).tolist() == [[0, 0], [1, 2]]
    assert given == {"completion_ids": [[1], [2, 3]]}


def test_a_reward_that_hangs_is_named_in_the_log(monkeypatch, caplog):
    monkeypatch.setattr(scoring, "SLOW_S", 0.01)
    said = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record):
            said.set()

    def hangs(completion_ids, **kwargs):
        assert said.wait(30)
        return [1.0] * len(completion_ids)

    async def hangs_too(completion_ids, **kwargs):
        while not said.is_set():
            await asyncio.sleep(0.001)
        return [1.0] * len(completion_ids)

    listener = Listener()
    monkeypatch.setattr(scoring.logger, "handlers", [listener])
    for function in (hangs, hangs_too):
        said.clear()
        caplog.clear()
        assert run([function], {"completion_ids": [[1], [2]]}).tolist() == [[1.0, 1.0]]
        assert f"reward {function.__name__} has not returned" in caplog.text


def test_what_was_generated_wins_over_a_column_of_its_name():
    columns = {"completions": ["of the data"], "prompts": [0], "completion_ids": [0], "gold": ["x"]}
    arguments = reward_arguments(["p"], ["c"], [[1]], columns)
    assert arguments == {"prompts": ["p"], "completions": ["c"], "completion_ids": [[1]], "gold": ["x"]}


def test_every_kind_of_function_at_once():
    functions = [
        by_length,
        awaited,
        Callable_(3),
        AsyncCallable(),
        functools.partial(scaled, factor=0.5),
        functools.partial(awaited),
        returns_coroutine,
    ]
    rewards = run(functions, {"completion_ids": [[1, 2], []]})
    expected = [[2, 0], [1, math.nan], [3, 3], [2, 2], [1, 0], [1, math.nan], [1, math.nan]]
    assert np.array_equal(rewards, np.array(expected, dtype=float), equal_nan=True)


def test_functions_run_side_by_side():
    """Two that wait for each other, one in a thread and one on the loop: one after the other they would never end."""
    arrived = threading.Event()

    def threaded(**kwargs):
        assert arrived.wait(30)
        return [0.0, 0.0]

    async def on_loop(**kwargs):
        arrived.set()
        return [1.0, 1.0]

    assert run([threaded, on_loop]).tolist() == [[0, 0], [1, 1]]


def test_the_arguments_reach_the_function_by_name():
    seen = {}

    def keep(**kwargs):
        seen.update(kwargs)
        return [0, 0]

    arguments = {"prompts": [1, 2], "completions": [3, 4], "completion_ids": [5, 6], "gold": ["a", "b"]}
    run([keep], arguments)
    assert seen == arguments


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0], "returned 1 values for 2 completions"),
        ([1.0, 2.0, 3.0], "returned 3 values for 2"),
        (None, "must return a list of numbers or None"),
        (1.0, "must return a list"),
        (["x", 1], "must return a list"),
        (["1", "2"], "must return a list"),
        ("12", "must return a list"),
        ({0: 1.0, 1: 2.0}, "must return a list"),
        ({1.0, 2.0}, "must return a list"),
        ([[1], [2]], "must return a list"),
        ([math.inf, 0], "returned an infinite value"),
        ([1e200, 0], "returned a value beyond"),
        ([10**400, 0], "must return a list"),
        ([10**5000, 0], "must return a list"),  # Python refuses to write it
        ((1 / count for count in (1, 0)), "must return a list"),
    ],
)
def test_a_wrong_return_value_names_the_function(values, said):
    def my_reward(**kwargs):
        return values

    with pytest.raises(RewardError, match=f"reward my_reward {said}"):
        run([my_reward])


@pytest.mark.parametrize("nothing", [None, math.nan, np.float32("nan")])
def test_none_and_nan_are_unscored(nothing):
    def my_reward(**kwargs):
        return [nothing, 1]

    assert np.array_equal(run([my_reward]), [[math.nan, 1.0]], equal_nan=True)


def test_an_array_is_a_list():
    assert run([lambda **kwargs: np.array([1, 2])]).tolist() == [[1.0, 2.0]]


def test_an_exception_arrives_with_the_function_s_own_traceback_and_the_prompt():
    def my_reward(**kwargs):
        return kwargs["gold"]

    with pytest.raises(RewardError, match=r"raised KeyError: 'gold' \(first prompt: 'What is 1 \+ 2\?'\)") as caught:
        run([my_reward], {"prompts": ["What is 1 + 2?"] * 2})
    text = "".join(traceback.format_exception(caught.value))
    assert 'return kwargs["gold"]' in text


def test_an_exception_names_the_function_and_is_the_cause():
    def my_reward(**kwargs):
        raise KeyError("gold")

    async def my_async_reward(**kwargs):
        raise ZeroDivisionError

    with pytest.raises(RewardError, match="reward my_reward raised KeyError: 'gold'") as caught:
        run([by_length, my_reward], {"completion_ids": [[], []]})
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RewardError, match="reward my_async_reward raised ZeroDivisionError"):
        run([my_async_reward])


def test_names_are_told_apart():
    assert unique_names([by_length, functools.partial(by_length), Callable_(1), by_length, AsyncCallable()]) == [
        "by_length",
        "by_length_2",
        "Callable_",
        "by_length_3",
        "AsyncCallable",
    ]


def test_no_function_is_no_row():
    assert run([], count=3).shape == (0, 3)


def test_the_total_is_over_all_sources_and_nan_where_none_scored():
    group = make_group(4, rollout_rewards=[None, 0.5, None, None], env_rewards=[None, None, (object, 2.0), None])
    by_function = np.array([[1.0, math.nan, 0.25, math.nan], [10.0, math.nan, math.nan, math.nan]])
    total = total_rewards(by_function, group)
    assert np.array_equal(total, [11.0, 0.5, 2.25, math.nan], equal_nan=True)
    assert np.array_equal(total_rewards(np.zeros((0, 4)), group), [math.nan, 0.5, 2.0, math.nan], equal_nan=True)
