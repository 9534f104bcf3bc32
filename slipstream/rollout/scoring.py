"""Rewards of a group: all functions at once, async ones awaited, the others in threads."""

import asyncio
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from concurrent.futures import Executor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.rollout.types import RolloutGroup

logger = logging.getLogger(__name__)

LARGEST = 1e100  # beyond it sums and squares are not finite
SLOW_S = 30.0  # a reward that hangs must be in the log before the run counts as stuck

RewardFunction = Callable[..., Any]
# What a reward is always called with; a column of the dataset by one of these names does not reach it.
GENERATED = ("prompts", "completions", "completion_ids")


class RewardError(Exception):
    """A reward function raised, or returned something that is no list of numbers."""


def reward_name(function: RewardFunction) -> str:
    """The name under which a reward is logged."""
    inner = getattr(function, "func", function)  # functools.partial
    return getattr(inner, "__name__", type(inner).__name__)


def unique_names(functions: Sequence[RewardFunction]) -> list[str]:
    """Their names; a second function of one name gets a number."""
    names: list[str] = []
    for function in functions:
        base = name = reward_name(function)
        number = 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.append(name)
    return names


def is_async(function: RewardFunction) -> bool:
    inner = getattr(function, "func", function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)):  # float() would read "1"
        raise TypeError
    return float(value)


def _shown(value: Any, text: Callable[[Any], str] = repr, most: int = 200) -> str:
    """Its start; of an object that cannot be written (a broken `__repr__`, an int of very many digits) its type."""
    try:
        return text(value)[:most]
    except Exception:
        return f"<{type(value).__name__}>"


def check_rewards(name: str, values: Any, count: int) -> NDArray[np.float64]:
    """The returned rewards as an array, NaN for None. Raises RewardError naming the function."""
    try:
        if isinstance(values, (str, bytes, Mapping, Set)):  # may be gone through, but are no list
            raise TypeError
        rewards = np.array([math.nan if v is None else _number(v) for v in values], dtype=np.float64)
    except Exception as error:  # the values may be any objects, and a generator may raise anything
        raise RewardError(f"reward {name} must return a list of numbers or None, not {_shown(values)}") from error
    if len(rewards) != count:
        raise RewardError(f"reward {name} returned {len(rewards)} values for {count} completions")
    if np.isinf(rewards).any():
        raise RewardError(f"reward {name} returned an infinite value: {_shown(values)}")
    if (np.abs(rewards) > LARGEST).any():
        raise RewardError(f"reward {name} returned a value beyond ±{LARGEST:g}, too large for a mean: {_shown(values)}")
    return rewards


def reward_arguments(
    prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], columns: dict[str, list[Any]]
) -> dict[str, Any]:
    """The keyword arguments of a reward; `columns` are the dataset's, one entry a completion."""
    return {**columns, **dict(zip(GENERATED, (prompts, completions, completion_ids), strict=True))}


def _about(arguments: dict[str, Any]) -> str:
    prompts = arguments.get("prompts")
    return f" (first prompt: {_shown(prompts[0], most=300)})" if prompts else ""


def _called(function: RewardFunction, arguments: dict[str, Any]) -> tuple[Any, BaseException | None]:
    """What it returned or raised. A future would not take every exception: with StopIteration it never gets done."""
    try:
        return function(**arguments), None
    except BaseException as error:
        return None, error


async def _call(function: RewardFunction, executor: Executor, arguments: dict[str, Any]) -> Any:
    if is_async(function):
        return await function(**arguments)
    values, error = await asyncio.get_running_loop().run_in_executor(executor, _called, function, arguments)
    if error is not None:
        raise error
    return await values if inspect.isawaitable(values) else values


async def _values(name: str, function: RewardFunction, executor: Executor, arguments: dict[str, Any]) -> Any:
    """What it returns. Whatever it raises, be it SystemExit or CancelledError, is a RewardError, and so ends the run."""
    try:
        return await _call(function, executor, arguments)
    except GeneratorExit:  # the coroutine is being closed
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # ours: the time is up, or the loop ends
        cause = error.__cause__ if isinstance(error.__cause__, StopIteration) else error  # as a coroutine raises it
        raise RewardError(f"reward {name} raised {type(cause).__name__}: {_shown(cause, str, 2000)}") from cause


async def _watched(name: str, values: Awaitable[Any]) -> Any:
    """The awaited values; says every `SLOW_S` that they have not come yet."""
    begun = time.monotonic()
    future = asyncio.ensure_future(values)
    try:
        while not (await asyncio.wait([future], timeout=SLOW_S))[0]:
            logger.warning("reward %s has not returned for %.0f s", name, time.monotonic() - begun)
        return future.result()
    finally:
        future.cancel()


async def score(
    functions: Sequence[RewardFunction],
    names: Sequence[str],
    executor: Executor,
    arguments: dict[str, Any],
    count: int,
    timeout_s: float | None = None,
) -> NDArray[np.float64]:
    """Call every function with `arguments`, all at once; `(functions, count)`, NaN where it did not score.

    Args:
        functions, names: sync ones run in threads of `executor`, async ones on this loop.
        timeout_s: bound of each call in seconds; None: no bound. A thread that hangs cannot be ended, so the run is.

    Raises:
        RewardError: with the function's name and the prompt; its own exception is the cause.
    """

    async def one(name: str, function: RewardFunction) -> NDArray[np.float64]:
        own = {key: list(v) if isinstance(v, list) else v for key, v in arguments.items()}  # others see no change of it
        try:
            async with asyncio.timeout(timeout_s):
                values = await _watched(name, _values(name, function, executor, own))
        except RewardError as error:
            raise RewardError(str(error) + _about(arguments)) from error.__cause__
        except TimeoutError as error:
            message = f"reward {name} did not return within reward_timeout = {timeout_s:g} s"
            raise RewardError(message + _about(arguments)) from error
        try:
            return check_rewards(name, values, count)
        except RewardError as error:
            raise RewardError(str(error) + _about(arguments)) from error.__cause__

    if not functions:
        return np.zeros((0, count))
    return np.stack(await asyncio.gather(*(one(n, f) for n, f in zip(names, functions, strict=True))))


def total_rewards(by_function: NDArray[np.float64], group: RolloutGroup) -> NDArray[np.float64]:
    """The sum over all sources of each rollout, NaN where none scored it; `(num_generations,)`."""
    rows = [*by_function]
    rows.append(np.array([math.nan if v is None else v for v in group.rollout_rewards], dtype=np.float64))
    rows.append(np.array([math.nan if v is None else v[1] for v in group.env_rewards], dtype=np.float64))
    stacked = np.stack(rows)
    total = np.nansum(stacked, axis=0)
    total[np.isnan(stacked).all(axis=0)] = math.nan
    return total
