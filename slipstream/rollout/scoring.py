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


def check_rewards(name: str, values: Any, count: int) -> NDArray[np.float64]:
    """The returned rewards as an array, NaN for None. Raises RewardError naming the function."""
    try:
        if isinstance(values, (str, bytes, Mapping, Set)):  # may be gone through, but are no list
            raise TypeError
        rewards = np.array([math.nan if v is None else _number(v) for v in values], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {name} must return a list of numbers or None, not {values!r:.200}") from error
    if len(rewards) != count:
        raise RewardError(f"reward {name} returned {len(rewards)} values for {count} completions")
    if np.isinf(rewards).any():
        raise RewardError(f"reward {name} returned an infinite value: {values!r:.200}")
    return rewards


def reward_arguments(
    prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], columns: dict[str, list[Any]]
) -> dict[str, Any]:
    """The keyword arguments of a reward; `columns` are the dataset's, one entry a completion."""
    return {**columns, **dict(zip(GENERATED, (prompts, completions, completion_ids), strict=True))}


def _about(arguments: dict[str, Any]) -> str:
    prompts = arguments.get("prompts")
    return f" (first prompt: {prompts[0]!r:.300})" if prompts else ""


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
    loop = asyncio.get_running_loop()

    async def call(name: str, function: RewardFunction) -> Any:
        try:
            if is_async(function):
                return await function(**arguments)
            values = await loop.run_in_executor(executor, lambda: function(**arguments))
            return await values if inspect.isawaitable(values) else values
        except SystemExit as error:  # a task that ends with it would end the whole loop
            raise RewardError(f"reward {name} raised SystemExit: {error}") from error

    async def one(name: str, function: RewardFunction) -> NDArray[np.float64]:
        try:
            async with asyncio.timeout(timeout_s) as bound:
                values = await _watched(name, call(name, function))
        except RewardError as error:
            raise RewardError(str(error) + _about(arguments)) from error.__cause__
        except Exception as error:
            if isinstance(error, TimeoutError) and bound.expired():
                message = f"reward {name} did not return within reward_timeout = {timeout_s:g} s"
            else:
                message = f"reward {name} raised {type(error).__name__}: {error}"
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
