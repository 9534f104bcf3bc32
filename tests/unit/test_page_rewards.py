"""The kinds of reward function that the specification's page shows, through the scoring of a group."""

import asyncio
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from slipstream.rollout.scoring import RewardError, score, total_rewards, unique_names
from tests.groups import make_group

PROMPTS = [[{"role": "user", "content": "What is 1 + 2?"}]] * 2
ANSWERS = ["<think>1 + 2 is 3</think><answer>3</answer>", r"It is \boxed{3}"]
COMPLETIONS = [[{"role": "assistant", "content": text}] for text in ANSWERS]


def longer(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def well_formed(completions: list[Any], **_: Any) -> list[float]:
    pattern = re.compile(r"<think>.*?</think><answer>.*?</answer>", re.DOTALL)
    return [1.0 if pattern.fullmatch(messages[0]["content"]) else 0.0 for messages in completions]


def boxed(completions: list[Any], ground_truth: list[str], **_: Any) -> list[float]:
    found = [re.search(r"\\boxed\{(.*?)\}", messages[0]["content"]) for messages in completions]
    return [float(match is not None and match[1] == truth) for match, truth in zip(found, ground_truth, strict=True)]


def only_math(prompts: list[Any], task: list[str], **_: Any) -> list[float | None]:
    return [1.0 if name == "math" else None for name in task]


def only_code(prompts: list[Any], task: list[str], **_: Any) -> list[float | None]:
    return [-1.0 if name == "code" else None for name in task]


async def not_empty(completions: list[Any], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return [1.0 if messages else 0.0 for messages in completions]


def rewards_of(functions: list[Any], timeout_s: float | None = 30.0, **columns: Any) -> np.ndarray:
    arguments = {"prompts": PROMPTS, "completions": COMPLETIONS, "completion_ids": [[1, 2], [1, 2, 3, 4]], **columns}
    executor = ThreadPoolExecutor(4)
    try:
        return asyncio.run(score(functions, unique_names(functions), executor, arguments, 2, timeout_s))
    finally:
        executor.shutdown(wait=False)


def test_a_reward_of_the_length() -> None:
    assert rewards_of([longer]).tolist() == [[2.0, 4.0]]


def test_a_reward_of_the_format() -> None:
    assert rewards_of([well_formed]).tolist() == [[1.0, 0.0]]


def test_a_reward_against_a_column_of_the_data_set() -> None:
    assert rewards_of([boxed], ground_truth=["3", "3"]).tolist() == [[0.0, 1.0]]


def test_functions_for_different_tasks_leave_the_others_out() -> None:
    by_function = rewards_of([only_math, only_code], task=["math", "code"])
    assert np.isnan(by_function[0, 1])
    assert np.isnan(by_function[1, 0])
    group = make_group(2)
    assert total_rewards(by_function, group).tolist() == [1.0, -1.0]


def test_an_async_reward_beside_a_sync_one() -> None:
    assert rewards_of([not_empty, longer]).tolist() == [[1.0, 1.0], [2.0, 4.0]]


def test_a_reward_that_hangs_ends_with_its_name_and_the_prompt() -> None:
    release = threading.Event()

    def hangs(**_: Any) -> list[float]:
        release.wait()
        return [0.0, 0.0]

    try:
        with pytest.raises(
            RewardError, match=r"reward hangs did not return within reward_timeout = 0.2 s.*What is 1 \+ 2"
        ):
            rewards_of([longer, hangs], timeout_s=0.2)
    finally:
        release.set()


def test_its_own_time_out_is_not_taken_for_ours() -> None:
    async def gives_up(**_: Any) -> list[float]:
        raise TimeoutError("the judge did not answer")

    with pytest.raises(RewardError, match="reward gives_up raised TimeoutError: the judge did not answer"):
        rewards_of([gives_up])


@pytest.mark.parametrize("values", [[math.inf, 0.0], [1.0], ["a", "b"], 3.0, None])
def test_what_is_no_list_of_numbers_names_the_function_and_the_prompt(values: Any) -> None:
    def broken(**_: Any) -> Any:
        return values

    with pytest.raises(RewardError, match=r"(?s)reward broken .*What is 1 \+ 2"):
        rewards_of([broken])
