"""Reward functions: called with keyword arguments, they return one number per completion, or None for no verdict.

Arguments of every reward function: `prompts` and `completions` (lists of conversations, each a list of message dicts),
`completion_ids` (lists of token ids), and every other column of the dataset (lists of one value per completion). The
functions here are cheap to import; verifiers run in child processes with a time limit (`slipstream.rewards.judge`).
"""

import re
from collections.abc import Sequence
from typing import Any

__all__ = ["accuracy_reward", "completion_text", "exact_match_reward", "format_reward", "reasoning_gym_reward"]

Conversation = Sequence[dict[str, Any]]
FORMAT = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
GOLD_COLUMNS = ("solution", "answer", "ground_truth")


def completion_text(completion: Conversation | str) -> str:
    """Text of the last assistant message of a completion; empty where there is none."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            return message.get("content") or ""
    return ""


def _after_thinking(text: str) -> str:
    """What stands behind the thinking block; empty where the block never ends: there is no answer then."""
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    return "" if "<think>" in text else text


def accuracy_reward(
    completions: Sequence[Conversation],
    solution: Sequence[str | None] | None = None,
    answer: Sequence[str | None] | None = None,
    ground_truth: Sequence[str | None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """1.0 where the completion's answer equals the gold mathematically, else 0.0; None where the gold cannot be parsed.

    The gold is column `solution`, else `answer`, else `ground_truth`: LaTeX or a plain expression. A completion on
    which the comparison exceeds its limits of time or memory gets 0.0. Raises ValueError where no such column is.
    """
    from slipstream.rewards.judge import judge

    golds = next((column for column in (solution, answer, ground_truth) if column is not None), None)
    if golds is None:
        raise ValueError(f"accuracy_reward needs one of the columns {', '.join(GOLD_COLUMNS)}; got {', '.join(kwargs)}")
    texts = [_after_thinking(completion_text(completion)) for completion in completions]
    requests = [
        {"gold": None if gold is None else str(gold), "text": text} for gold, text in zip(golds, texts, strict=True)
    ]
    return judge("accuracy", requests)


accuracy_reward.needs_one_of = GOLD_COLUMNS  # type: ignore[attr-defined]


def format_reward(completions: Sequence[Conversation], **kwargs: Any) -> list[float | None]:
    """1.0 where the whole completion is `<think>…</think><answer>…</answer>` (white space around is free), else 0.0."""
    return [1.0 if FORMAT.fullmatch(completion_text(completion)) else 0.0 for completion in completions]


def exact_match_reward(completions: Sequence[Conversation], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """1.0 where the completion's text equals column `answer`, both without white space around them, else 0.0."""
    pairs = zip(completions, answer, strict=True)
    return [None if gold is None else float(completion_text(c).strip() == str(gold).strip()) for c, gold in pairs]


def reasoning_gym_reward(
    completions: Sequence[Conversation],
    task: Sequence[str],
    question: Sequence[str],
    answer: Sequence[str | None],
    metadata: Sequence[str],
    **kwargs: Any,
) -> list[float | None]:
    """Score of reasoning-gym's verifier, for rows of a `reasoning_gym:` source, in general from 0 to 1.

    The answer is what stands in the last `<answer>…</answer>`, else the whole completion without its thinking. A
    completion on which the verifier fails or exceeds its limits gets 0.0.
    """
    from slipstream.rewards.judge import judge

    requests = []
    for completion, name, asked, gold, data in zip(completions, task, question, answer, metadata, strict=True):
        text = _after_thinking(completion_text(completion))
        tagged = ANSWER.findall(text)
        given = (tagged[-1] if tagged else text).strip()
        requests.append({"task": name, "question": asked, "answer": gold, "metadata": data, "given": given})
    return judge("reasoning_gym", requests)
