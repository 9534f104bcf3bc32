"""Reward functions, the limits of their verifiers, and finding a reward by name."""

import asyncio
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import slipstream.rewards as rewards
from slipstream.data import load_dataset_source
from slipstream.rewards import (
    accuracy_reward,
    exact_match_reward,
    format_reward,
    judge,
    reasoning_gym_reward,
)
from slipstream.rewards.resolve import RewardError, resolve_reward, signature_problems


def says(text: str | None) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("gold", "text", "score"),
    [
        (r"$\frac{1}{2}$", r"So it is \boxed{0.5}.", 1.0),
        (r"\frac{1}{2}", "The answer is 1/2", 1.0),
        ("0.5", r"$\frac{2}{4}$", 1.0),
        ("42", "41", 0.0),
        ("42", "no number", 0.0),
        ("42", "", 0.0),
        (r"\left\{1,2\right\}", r"$\{2, 1\}$", 1.0),
        ("(1,2)", r"\boxed{(1,2)}", 1.0),
        (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", 1.0),
        ("12 apples", "12", 1.0),
        ("42", "<think>42</think> it is 7", 0.0),
        ("42", "<think>7</think> it is 42", 1.0),
        ("42", "<think>it is 42 but I go on", 0.0),
        ("no idea at all", "42", None),
        ("", "42", None),
        (None, "42", None),
    ],
)
def test_accuracy(gold: str | None, text: str, score: float | None) -> None:
    assert accuracy_reward(prompts=[[]], completions=[says(text)], completion_ids=[[1]], solution=[gold]) == [score]


@pytest.mark.parametrize("column", ["solution", "answer", "ground_truth"])
def test_accuracy_takes_the_gold_from_each_column(column: str) -> None:
    assert accuracy_reward(completions=[says("7"), says("8")], **{column: ["7", "7"]}) == [1.0, 0.0]


def test_accuracy_without_gold_names_the_columns() -> None:
    with pytest.raises(ValueError, match="needs one of the columns solution, answer, ground_truth; got task"):
        accuracy_reward(completions=[says("7")], task=["x"])


def test_verifiers_work_in_worker_threads_and_side_by_side() -> None:
    assert threading.current_thread() is threading.main_thread()

    def one(number: int) -> list[float | None]:
        return accuracy_reward(completions=[says(str(number)), says("0")], answer=[str(number), str(number)])

    with ThreadPoolExecutor(6) as executor:
        assert list(executor.map(one, range(1, 30))) == [[1.0, 0.0]] * 29


def test_a_pathological_completion_costs_a_reward_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "CPU_LIMIT_S", 1.0)
    monkeypatch.setattr(judge, "_pool", None)  # children made with this limit; stopped with the test's own pool
    bomb = "$" + "^{".join(["9"] * 5) + "}" * 4 + "$"
    completions = [says("5"), says(bomb), says("(" * 50_000), says("5")]
    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(accuracy_reward, completions, answer=["5"] * 4).result() == [1.0, 0.0, 0.0, 1.0]
    judge._stop_all()


@pytest.fixture
def a_judge() -> Iterator[judge._Judge]:
    one = judge._Judge()
    yield one
    one.stop()


def test_a_killed_verifier_is_replaced(a_judge: judge._Judge) -> None:
    request = {"gold": "5", "text": "5"}
    assert a_judge.ask("accuracy", request) == {"score": 1.0}
    assert a_judge._process is not None
    first = a_judge._process.pid
    os.kill(first, signal.SIGKILL)
    a_judge._process.wait()
    assert a_judge.ask("accuracy", request) == {"score": 1.0}
    assert a_judge._process.pid != first


def test_a_verifier_ends_when_its_parent_is_killed() -> None:
    code = (
        "import time; from slipstream.rewards import judge; one = judge._Judge()\n"
        "one._start(); print(one._process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    descriptor = os.pidfd_open(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    with os.fdopen(descriptor):
        import select

        readable, _, _ = select.select([descriptor], [], [], 60)
        assert readable


def test_the_verifier_process_sees_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert "secret" not in judge._environment().values()


def test_format() -> None:
    scores = {
        "<think>2 + 3\nis 5</think><answer>5</answer>": 1.0,
        " <think>a</think>\n<answer>5</answer>\n": 1.0,
        "<think>a</think>": 0.0,
        "<answer>5</answer>": 0.0,
        "<think>a</think> so <answer>5</answer>": 0.0,
        "<think>a</think><answer>5</answer><answer>5</answer>": 0.0,
        "<think>a<think>b</think><answer>5</answer>": 0.0,
        "<think>a</think><answer>5</answer> bye": 0.0,
        "": 0.0,
    }
    assert format_reward(completions=[says(text) for text in scores], answer=["x"] * len(scores)) == list(
        scores.values()
    )


def test_exact_match() -> None:
    completions = [says(" 42\n"), says("42."), says(None), says("7"), []]
    assert exact_match_reward(completions=completions, answer=["42", "42", "42", 7, "x"]) == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert exact_match_reward(completions=[says("x")], answer=[None]) == [None]


def test_the_last_assistant_message_counts() -> None:
    turns = [*says("1"), {"role": "tool", "content": "2"}, *says("3"), {"role": "tool", "content": "4"}]
    assert rewards.completion_text(turns) == "3"
    assert rewards.completion_text([{"content": "no role"}]) == "no role"


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "leg_counting", "rearc", "knights_knaves"])
def test_reasoning_gym_scores_its_own_answers(task: str) -> None:
    rows = load_dataset_source(f"reasoning_gym:{task}?size=3&seed=1")
    columns = {name: rows[name][:] for name in rows.column_names if name != "prompt"}
    answers = columns["answer"]
    texts = [answers[0], f"<think>hm</think> <answer> {answers[1]} </answer>", "zzz"]
    right, tagged, wrong = reasoning_gym_reward(completions=[says(text) for text in texts], **columns)
    assert right == tagged == 1.0
    assert wrong is not None
    assert wrong < 0.5


def test_reasoning_gym_with_rows_that_are_not_its_own() -> None:
    row = {"task": ["nope"], "question": ["q"], "answer": ["a"], "metadata": ["{}"]}
    with pytest.raises(judge.JudgeError, match="nope"):
        reasoning_gym_reward(completions=[says("x")], **row)


@pytest.mark.parametrize("name", ["accuracy_reward", "exact_match_reward", "format_reward", "reasoning_gym_reward"])
def test_ours_resolve_and_pickle(name: str) -> None:
    function = resolve_reward(f"slipstream.rewards:{name}")
    assert function is getattr(rewards, name)
    assert pickle.loads(pickle.dumps(function)) is function


# --- resolve

USER_MODULE = """
import functools

def good(completions, gold, **kwargs): return [1.0]
def plain(prompts, completions, completion_ids): return [1.0]
def full(prompts, completions, completion_ids, gold, source=None): return [1.0]
def by_position(completions, /, **kwargs): return [1.0]
async def later(completions, **kwargs): return [2.0]
def scaled(completions, factor, **kwargs): return [factor]
half = functools.partial(scaled, factor=0.5)
class Judge:
    def __call__(self, completions, **kwargs): return [3.0]
judge = Judge()
nothing = lambda completions, **kwargs: [1.0]
def make():
    def inner(completions, **kwargs): return [1.0]
    return inner
inner = make()
number = 5
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """resolve(attribute, columns) in a module of the user's own."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = f"user_rewards_{os.getpid()}_{abs(hash(tmp_path))}"
    (tmp_path / f"{module}.py").write_text(USER_MODULE)
    (tmp_path / f"{module}_broken.py").write_text("import a_package_that_is_not_there\n")
    yield lambda attribute, columns=None, tail="": resolve_reward(
        f"{module}{tail}:{attribute}", [str(tmp_path)], columns
    )
    sys.modules.pop(module, None)


def test_rewards_of_every_kind(user: Callable[..., Any]) -> None:
    assert user("good", ["prompt", "gold"])(completions=[], gold=[]) == [1.0]
    assert user("plain", ["prompt"])(prompts=[], completions=[], completion_ids=[]) == [1.0]
    assert user("full", ["prompt", "gold"])
    assert user("half")(completions=[]) == [0.5]
    assert user("judge")(completions=[]) == [3.0]
    assert asyncio.run(user("later")(completions=[])) == [2.0]


@pytest.mark.parametrize(
    ("attribute", "columns", "words"),
    [
        ("goood", None, "no 'goood'; did you mean good?"),
        ("number", None, "number is not a function but int"),
        ("Judge", None, "Judge is a class: name an instance"),
        (
            "nothing",
            None,
            "does not pickle, and rewards run in another process: write a function at the top of a module",
        ),
        ("inner", None, "does not pickle"),
        ("by_position", None, "takes completions by position only"),
        (
            "scaled",
            ["prompt", "gold"],
            "needs the column factor, which the dataset does not have (columns: prompt, gold)",
        ),
        ("good", ["prompt", "answer"], "needs the column gold"),
        ("plain", ["prompt", "gold", "task"], "does not take the arguments gold, task: add **kwargs"),
        ("full", ["prompt", "gold", "task"], "does not take the argument task: add **kwargs"),
    ],
)
def test_unusable_rewards(user: Callable[..., Any], attribute: str, columns: list[str] | None, words: str) -> None:
    with pytest.raises(RewardError) as caught:
        user(attribute, columns)
    assert words in str(caught.value)


def test_modules_that_do_not_import(user: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"No module named 'a_package_that_is_not_there'"):
        user("f", tail="_broken")
    with pytest.raises(RewardError, match=r"no module 'not_a_module'.*reward\.paths"):
        resolve_reward("not_a_module.at_all:f")
    with pytest.raises(RewardError, match="module:function"):
        resolve_reward("slipstream.rewards.accuracy_reward")
    (tmp_path / "a_script_that_exits.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(RewardError, match="importing a_script_that_exits failed: SystemExit: 3"):
        resolve_reward("a_script_that_exits:f", [str(tmp_path)])
    with pytest.raises(RewardError, match="is no folder"):
        resolve_reward("a:b", [str(tmp_path / "none")])


def test_accuracy_needs_one_of_its_columns() -> None:
    assert signature_problems(accuracy_reward, ["prompt", "ground_truth"]) == []
    (problem,) = signature_problems(accuracy_reward, ["prompt", "reply"])
    assert "needs one of the columns solution, answer, ground_truth" in problem
    assert signature_problems(math.hypot) == []  # no signature to look at
