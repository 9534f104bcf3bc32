"""Loading a dataset from the hub, a file, a folder or reasoning-gym, and checking that it is conversational."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

FILE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
REASONING_GYM = "reasoning_gym:"
EXAMPLE_ROW = '{"prompt": [{"role": "user", "content": "What is 2 + 3?"}], "answer": "5"}'
PROMPT_LIKE = (
    "messages",
    "conversations",
    "conversation",
    "question",
    "problem",
    "instruction",
    "query",
    "input",
    "text",
)


class DataError(ValueError):
    """A dataset cannot be loaded or is not conversational; the message says what was found and what to do."""


def load_dataset_source(source: str, split: str = "train") -> "Dataset":
    """Load prompts; every row has a conversational `prompt`.

    Args:
        source: a hub id; the path of a .jsonl, .json or .parquet file; the path of a folder written by `save_to_disk`;
            or `reasoning_gym:TASK?size=N&seed=N&…` with parameters of the task.
        split: of a hub dataset or of a folder with several splits; a file and reasoning-gym have none.

    Raises DataError where the source is not there, has no such split, is empty, or is not conversational.
    """
    if source.startswith(REASONING_GYM):
        from slipstream.data.reasoning import load_reasoning_gym

        return load_reasoning_gym(source)
    path = Path(source).expanduser()
    if path.is_file():
        dataset = _from_file(path)
    elif path.is_dir():
        dataset = _from_folder(path, split)
    elif path.suffix.lower() in FILE_BUILDERS or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise DataError(f"there is no file or folder {path.absolute()}")
    else:
        dataset = _from_hub(source, split)
    check_conversational(dataset)
    return dataset


def _from_file(path: Path) -> "Dataset":
    from datasets import load_dataset

    builder = FILE_BUILDERS.get(path.suffix.lower())
    if builder is None:
        raise DataError(f"a file must be .jsonl, .json or .parquet, not {path.suffix or 'without an ending'}")
    if path.stat().st_size == 0:
        raise DataError("the file is empty")
    try:
        with _quietly():
            return load_dataset(builder, data_files=str(path), split="train")
    except Exception as error:
        raise DataError(f"cannot be read as {path.suffix.lower()}: {_reason(error)}") from error


def _from_folder(path: Path, split: str) -> "Dataset":
    from datasets import Dataset, DatasetDict, load_from_disk

    if not any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        found = ", ".join(sorted(child.name for child in path.iterdir())[:5]) or "nothing"
        raise DataError(
            f"the folder was not written by save_to_disk (it holds {found}): name a file in it, or convert it"
        )
    if _saved_without_rows(path / "state.json"):
        raise DataError("there are no rows")
    try:
        loaded = load_from_disk(str(path))
    except Exception as error:
        raise DataError(f"cannot be read as a datasets folder: {_reason(error)}") from error
    if isinstance(loaded, DatasetDict):
        if split not in loaded:
            raise DataError(f"has no split {split!r}; its splits: {', '.join(loaded)}")
        loaded = loaded[split]
    assert isinstance(loaded, Dataset)
    return loaded


def _saved_without_rows(state: Path) -> bool:
    try:
        return json.loads(state.read_text(encoding="utf-8")).get("_data_files") == []
    except (OSError, ValueError, AttributeError):
        return False


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the library's progress bars and log lines: a local file is read at once, and errors are ours to tell."""
    import datasets

    bars, level = datasets.are_progress_bars_disabled(), datasets.utils.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.utils.logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()


def _from_hub(source: str, split: str) -> "Dataset":
    from datasets import load_dataset

    try:
        return load_dataset(source, split=split)
    except Exception as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        where = f"there is no file or folder {source!r} here, and as a hub dataset it cannot be loaded"
        way_out = (
            " (HF_HUB_OFFLINE is set and it is not in the local cache: unset it, or give a path)" if offline else ""
        )
        raise DataError(f"{where}{way_out}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The innermost cause's first line: the libraries wrap what went wrong several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def check_conversational(dataset: "Dataset") -> None:
    """Raise DataError unless there are rows, and the `prompt` of each is a list of messages with role and text."""
    columns = ", ".join(dataset.column_names) or "none"
    if "prompt" not in dataset.column_names:
        like = next((name for name in PROMPT_LIKE if name in dataset.column_names), None)
        raise DataError(f"there is no column `prompt` (columns: {columns}). {_conversion(dataset, like)}")
    if len(dataset) == 0:
        raise DataError("there are no rows")
    number = 0
    for prompts in _prompt_batches(dataset):
        for prompt in prompts:
            wrong = _wrong(prompt)
            if wrong:
                hint = (
                    _conversion(dataset, "prompt") if isinstance(prompt, str) else f"A row must look like {EXAMPLE_ROW}"
                )
                raise DataError(f"`prompt` of row {number} {wrong}. {hint}")
            number += 1


def _prompt_batches(dataset: "Dataset") -> Iterator[list[Any]]:
    for batch in dataset.select_columns(["prompt"]).with_format(None).iter(batch_size=1_000):
        yield batch["prompt"]


def _wrong(prompt: Any) -> str:
    """What is wrong with a prompt, or nothing."""
    if isinstance(prompt, str):
        return "is plain text, not a list of messages"
    if not isinstance(prompt, list):
        return f"is {_kind(prompt)}, not a list of messages"
    if not prompt:
        return "is an empty list"
    for number, message in enumerate(prompt):
        if not isinstance(message, dict):
            return f"has {_kind(message)} as message {number}, not an object with role and content"
        if not isinstance(message.get("role"), str):
            return f"has no text `role` in message {number} (keys: {', '.join(map(str, message)) or 'none'})"
        content = message.get("content")
        if isinstance(content, list):
            return f"has a list as `content` of message {number}; only text is supported, no images"
        if not isinstance(content, str) and not message.get("tool_calls"):
            return f"has no text `content` in message {number}"
    return ""


def _kind(value: Any) -> str:
    names = {"NoneType": "nothing", "dict": "an object", "list": "a list", "str": "text", "bool": "true or false"}
    return names.get(type(value).__name__, f"a {type(value).__name__}")


def _conversion(dataset: "Dataset", column: str | None) -> str:
    """How to make `prompt` out of `column`."""
    if column is None:
        return f"A row must look like {EXAMPLE_ROW}"
    first = dataset[0][column] if len(dataset) else ""
    if column != "prompt" and isinstance(first, list) and first and not _wrong(first):
        rename = f'dataset.rename_column("{column}", "prompt")'
        return f"Column `{column}` looks right: {rename}, without the message that holds the answer"
    if isinstance(first, list) and first and isinstance(first[0], dict) and {"from", "value"} <= set(first[0]):
        return f"Column `{column}` has messages with from and value: rename them to role and content. {EXAMPLE_ROW}"
    return (
        "To convert: dataset.map(lambda row: "
        f'{{"prompt": [{{"role": "user", "content": row["{column}"]}}]}}).to_json("data.jsonl")'
    )
