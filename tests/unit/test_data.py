"""Loading datasets from each kind of source, their identity and order."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data import DataError, fingerprint, load_dataset_source, prompt_order
from slipstream.data import identity as identity_module
from slipstream.data.reasoning import dump_metadata, load_metadata

PINNED = [0, 1, 4, 2, 6, 5, 7, 3]  # a run resumed with a newer version must visit the same prompts


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"{i}+1"}], "answer": str(i + 1)} for i in range(count)]


def write_jsonl(path: Path, values: list[Any]) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


def refused(source: Any, split: str = "train") -> str:
    with pytest.raises(DataError) as caught:
        load_dataset_source(str(source), split)
    return str(caught.value)


def test_the_same_rows_from_every_kind_of_source_have_one_fingerprint(tmp_path: Path) -> None:
    made = Dataset.from_list(rows(5))
    made.to_parquet(tmp_path / "rows.parquet")
    made.save_to_disk(tmp_path / "plain")
    DatasetDict({"train": made, "test": made.select([0])}).save_to_disk(tmp_path / "splits")
    write_jsonl(tmp_path / "rows.jsonl", rows(5))
    (tmp_path / "rows.json").write_text(json.dumps(rows(5)))
    prints = set()
    for name in ("rows.parquet", "plain", "splits", "rows.jsonl", "rows.json"):
        loaded = load_dataset_source(str(tmp_path / name))
        assert loaded[3] == rows(5)[3], name
        prints.add(fingerprint(loaded))
    assert len(prints) == 1
    assert len(load_dataset_source(str(tmp_path / "splits"), "test")) == 1


def test_fingerprint_is_the_same_in_another_process_and_sees_every_change(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", rows(4))
    code = f"from slipstream.data import *; print(fingerprint(load_dataset_source({source!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = fingerprint(load_dataset_source(source))
    assert done.stdout.strip() == here
    changed = rows(4)
    changed[2]["answer"] = "x"
    others = [rows(3), [*rows(4)[1:], rows(4)[0]], changed, [{**row, "more": 1} for row in rows(4)]]
    prints = {fingerprint(Dataset.from_list(other)) for other in others}
    assert len(prints) == 4
    assert here not in prints
    assert fingerprint(Dataset.from_list(rows(5)).select(range(4))) == here
    assert fingerprint(Dataset.from_list(rows(4)).select_columns(["answer", "prompt"])) == here


def test_fingerprint_of_a_long_dataset_reads_spaced_rows_and_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_module, "ROWS_HASHED", 3)
    base = fingerprint(Dataset.from_list(rows(9)))
    assert fingerprint(Dataset.from_list(rows(10))) != base
    for index, seen in ((0, True), (4, True), (8, True), (1, False)):
        changed = rows(9)
        changed[index]["answer"] = "x"
        assert (fingerprint(Dataset.from_list(changed)) != base) == seen


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "What is 2 + 3?"}, ["plain text", 'dataset.map(lambda row: {"prompt": [{"role": "user"']),
        ({"question": "2 + 3?"}, ["no column `prompt` (columns: question)", 'row["question"]']),
        (
            {"messages": [{"role": "user", "content": "x"}]},
            ["no column `prompt`", 'rename_column("messages", "prompt")'],
        ),
        ({"conversations": [{"from": "human", "value": "x"}]}, ["no column `prompt`", "from and value"]),
        ({"a": 1}, ["no column `prompt` (columns: a)", "A row must look like"]),
        ({"prompt": []}, ["row 0 is an empty list"]),
        (
            [{"prompt": [{"role": "user", "content": "x"}]}, {"prompt": "x"}],
            ["row 1 is plain text", '{"prompt": [{"role"'],
        ),
        ({"prompt": 5}, ["row 0 is a int, not a list"]),
        ({"prompt": ["hello"]}, ["has text as message 0"]),
        ({"prompt": [{"content": "x"}]}, ["no text `role` in message 0"]),
        ({"prompt": [{"role": "user"}]}, ["no text `content` in message 0"]),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, ["no images"]),
    ],
)
def test_rows_that_are_not_conversational(tmp_path: Path, row: Any, words: list[str]) -> None:
    message = refused(write_jsonl(tmp_path / "a.jsonl", row if isinstance(row, list) else [row]))
    for word in words:
        assert word in message


def test_a_wrong_row_far_down_is_found(tmp_path: Path) -> None:
    values = rows(1500)
    values[1234]["prompt"] = []
    assert "row 1234 is an empty list" in refused(write_jsonl(tmp_path / "a.jsonl", values))


def test_sources_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no file or folder" in refused(tmp_path / "none.jsonl")
    assert "there is no file or folder" in refused("./none")
    (tmp_path / "empty.jsonl").touch()
    assert "empty" in refused(tmp_path / "empty.jsonl")
    (tmp_path / "rows.csv").write_text("a\n")
    assert "must be .jsonl, .json or .parquet, not .csv" in refused(tmp_path / "rows.csv")
    (tmp_path / "bad.jsonl").write_text("{oh no\n")
    assert "cannot be read as .jsonl" in refused(tmp_path / "bad.jsonl")
    (tmp_path / "folder").mkdir()
    assert "not written by save_to_disk" in refused(tmp_path / "folder")
    DatasetDict({"a": Dataset.from_list(rows(1)), "b": Dataset.from_list(rows(1))}).save_to_disk(tmp_path / "splits")
    assert "no split 'train'; its splits: a, b" in refused(tmp_path / "splits")
    Dataset.from_list(rows(1)).select([]).save_to_disk(tmp_path / "norows")
    assert "no rows" in refused(tmp_path / "norows")


def test_an_unreachable_hub_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    message = refused("nobody/nothing")
    assert "no file or folder 'nobody/nothing'" in message
    assert "HF_HUB_OFFLINE is set" in message


def test_reasoning_gym_rows() -> None:
    loaded = load_dataset_source("reasoning_gym:chain_sum?size=3&seed=5&min_terms=2&max_terms=2")
    assert loaded.column_names == ["prompt", "answer", "task", "question", "metadata"]
    assert len(loaded) == 3
    row = loaded[0]
    assert row["prompt"] == [{"role": "user", "content": row["question"]}]
    assert row["task"] == "chain_sum"
    assert len(load_metadata(row["metadata"])["difficulty"]) >= 2
    again = load_dataset_source("reasoning_gym:chain_sum?seed=5&size=3&max_terms=2&min_terms=2")
    assert fingerprint(again) == fingerprint(loaded)
    assert fingerprint(load_dataset_source("reasoning_gym:chain_sum?size=3&seed=50")) != fingerprint(loaded)
    assert fingerprint(load_dataset_source("reasoning_gym:leg_counting?size=3")) == fingerprint(
        load_dataset_source("reasoning_gym:leg_counting?size=3")
    )


def test_reasoning_gym_parameters_of_other_types() -> None:
    for text in ("operators=+,-", "operators=%2B&operators=-", 'operators=["+","-"]'):
        loaded = load_dataset_source(f"reasoning_gym:basic_arithmetic?size=20&allow_parentheses=false&{text}")
        assert all("*" not in row["question"] and "(" not in row["question"] for row in loaded)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("reasoning_gym:", "names no task"),
        ("reasoning_gym:chain_sm", "did you mean chain_sum"),
        ("reasoning_gym:chain_sum?min_term=1", "no parameter 'min_term'; did you mean min_terms?"),
        ("reasoning_gym:chain_sum?size=many", "size=many is no int"),
        ("reasoning_gym:chain_sum?size", "'size' is no parameter"),
        ("reasoning_gym:chain_sum?min_terms=9&max_terms=2", "refuses these parameters: max_terms"),
        ("reasoning_gym:chain_sum?size=0", "refuses these parameters"),
    ],
)
def test_reasoning_gym_refusals(source: str, words: str) -> None:
    assert words in refused(source)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(json_like)
def test_metadata_keeps_tuples_and_lists_apart(value: Any) -> None:
    back = load_metadata(dump_metadata(value))
    assert back == value
    assert repr(back) == repr(value)


@given(st.integers(0, 300), st.integers(0, 5), st.integers(0, 2**32))
def test_prompt_order_is_a_permutation_and_the_same_for_all(n: int, epoch: int, seed: int) -> None:
    order = prompt_order(n, epoch, seed, True)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))
    assert (order == prompt_order(n, epoch, seed, True)).all()
    assert prompt_order(n, epoch, seed, False).tolist() == list(range(n))


def test_prompt_order_differs_by_epoch_and_seed_and_never_changes() -> None:
    assert prompt_order(8, 0, 42).tolist() == PINNED
    orders = {tuple(prompt_order(50, epoch, seed).tolist()) for epoch in range(5) for seed in range(5)}
    assert len(orders) == 25
    assert all(order != tuple(range(50)) for order in orders)
