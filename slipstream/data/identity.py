"""What makes two datasets the same, and the order in which an epoch visits the prompts. Deterministic everywhere."""

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from datasets import Dataset

ROWS_HASHED = 200_000
BATCH_ROWS = 1_000


def fingerprint(dataset: "Dataset") -> str:
    """Hash of a dataset's columns, length and rows: 32 hexadecimal digits.

    Depends on the content only, so it is the same in every process and with every version of the libraries, however the
    rows were loaded. Of more than 200,000 rows, so many evenly spaced ones are read.
    """
    length = len(dataset)
    digest = hashlib.sha256(json.dumps([length, sorted(dataset.column_names)]).encode())
    if length > ROWS_HASHED:
        dataset = dataset.select(np.linspace(0, length - 1, ROWS_HASHED).astype(np.int64))
    columns = sorted(dataset.column_names)
    for batch in dataset.with_format(None).iter(batch_size=BATCH_ROWS):
        for row in zip(*(batch[name] for name in columns), strict=True):
            line = json.dumps(dict(zip(columns, map(_without_nulls, row), strict=True)), sort_keys=True, default=str)
            digest.update(line.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()[:32]


def _without_nulls(value: Any) -> Any:
    """`value` without keys that are None: whether a struct keeps them depends on how the rows were loaded."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def prompt_order(n: int, epoch: int, seed: int, shuffle: bool = True) -> NDArray[np.int64]:
    """Row numbers in the order in which `epoch` (from 0) visits them: int64, shape (n,), a permutation of 0 … n-1.

    A pure function: the same for every process that asks. Its random numbers come straight from Philox's counter, so
    that it does not change with numpy's version as the shuffling methods of a Generator may.
    """
    if not shuffle:
        return np.arange(n, dtype=np.int64)
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(keys, kind="stable").astype(np.int64)
