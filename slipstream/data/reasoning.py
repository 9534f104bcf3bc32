"""Datasets of reasoning-gym as conversational rows, and their metadata as JSON that its verifiers can read back."""

import dataclasses
import datetime
import difflib
import enum
import json
import types
import typing
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from slipstream.data.source import REASONING_GYM, DataError

if TYPE_CHECKING:
    from datasets import Dataset

DEFAULT_SIZE = 500
DEFAULT_SEED = 0  # never a random one: a resume must find the same rows


def parse_source(source: str) -> tuple[str, dict[str, list[str]]]:
    """Task and parameters of `reasoning_gym:TASK?name=value&…`; a name may repeat. Raises DataError."""
    task, _, query = source.removeprefix(REASONING_GYM).partition("?")
    parameters: dict[str, list[str]] = {}
    for part in query.split("&") if query else []:
        name, equals, value = part.partition("=")
        if not name or not equals:
            raise DataError(f"{part!r} is no parameter: write {REASONING_GYM}{task or 'TASK'}?size=1000&seed=1")
        parameters.setdefault(unquote(name), []).append(unquote(value))
    if not task:
        raise DataError(f"names no task: write for example {REASONING_GYM}chain_sum?size=1000&seed=1")
    return task, parameters


def load_reasoning_gym(source: str) -> "Dataset":
    """Rows of a reasoning-gym task.

    Columns: `prompt` (one user message), `answer` (text or None), `task`, `question`, `metadata` (JSON text): what
    `slipstream.rewards:reasoning_gym_reward` needs. Without `size` and `seed`: 500 rows of seed 0. Note that many tasks
    make row i from seed + i, so data for evaluation should have a seed beyond the training data's seed + size.

    Raises DataError on an unknown task or parameter, or a value that the task refuses.
    """
    task, parameters = parse_source(source)
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(f"needs the package reasoning-gym (pip install reasoning-gym): {error}") from error
    from datasets import Dataset

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.4)
        raise DataError(f"unknown task {task!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    dataset_class, config_class = DATASETS[task]
    arguments = {"size": DEFAULT_SIZE, "seed": DEFAULT_SEED, **_arguments(task, config_class, parameters)}
    try:
        config = config_class(**arguments)
        if hasattr(config, "validate"):
            config.validate()
        entries = list(dataset_class(config=config))
    except Exception as error:
        raise DataError(f"the task {task} refuses these parameters: {error or type(error).__name__}") from error
    if not entries:
        raise DataError("there are no rows: size must be at least 1")
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": entry["question"]}],
                "answer": entry["answer"],
                "task": task,
                "question": entry["question"],
                "metadata": dump_metadata(entry["metadata"]),
            }
            for entry in entries
        ]
    )


def _arguments(task: str, config_class: Any, parameters: dict[str, list[str]]) -> dict[str, Any]:
    hints = typing.get_type_hints(config_class)
    known = [field.name for field in dataclasses.fields(config_class) if field.init]
    arguments = {}
    for name, values in parameters.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(known)}"
            raise DataError(f"the task {task} has no parameter {name!r}{hint}")
        try:
            arguments[name] = _convert(values, hints[name])
        except (ValueError, TypeError, KeyError):
            wanted = getattr(hints[name], "__name__", str(hints[name]))
            wanted = wanted if not typing.get_args(hints[name]) else str(hints[name]).replace("typing.", "")
            raise DataError(f"{name}={'&'.join(values)} is no {wanted}") from None
    return arguments


def _convert(values: list[str], hint: Any) -> Any:
    """The value of a parameter from its text; a list may be JSON, comma separated, or a repeated name."""
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if values == ["none"]:
            return None
        return _convert(values, next(option for option in inner if option is not type(None)))
    text = values[-1]
    if origin in (list, tuple) or origin is typing.get_origin(typing.Sequence[str]):
        items = json.loads(text) if text.startswith("[") else [v for value in values for v in value.split(",")]
        element = inner[0] if inner else str
        converted = [_convert([item], element) if isinstance(item, str) else _listed(item, element) for item in items]
        return tuple(converted) if origin is tuple else converted
    if origin is typing.Literal:
        return {str(choice): choice for choice in inner}[text]
    if origin is bool:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return origin[text] if text in origin.__members__ else origin(text)
    if origin in (datetime.date, datetime.time):
        return origin.fromisoformat(text)
    if origin in (int, float, str):
        return origin(text)
    raise TypeError(hint)


def _listed(item: Any, hint: Any) -> Any:
    return tuple(item) if (typing.get_origin(hint) or hint) is tuple else item


def dump_metadata(metadata: Any) -> str:
    """JSON that keeps apart tuples and lists: the verifiers compare by equality."""
    return json.dumps(_tag(metadata), default=str)


def load_metadata(text: str) -> Any:
    """The inverse of `dump_metadata`."""
    return json.loads(
        text, object_hook=lambda value: tuple(value["__tuple__"]) if value.keys() == {"__tuple__"} else value
    )


def _tag(value: Any) -> Any:
    if isinstance(value, tuple):
        return {"__tuple__": [_tag(item) for item in value]}
    if isinstance(value, dict):
        return {key: _tag(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_tag(item) for item in value]
    return value


@cache
def verifier(task: str) -> Any:
    """The function (answer, entry) -> score of a task; an entry has question, answer, metadata. Raises ValueError."""
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)
