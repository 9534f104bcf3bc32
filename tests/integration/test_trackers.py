"""wandb (offline) and trackio (local), each in a process of its own: what they keep is what metrics.jsonl has."""

import json
import math
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.run_folder import RunFolder

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
KEY = "0123456789abcdef0123456789abcdef01234567"


def train(run: RunFolder, name: str, attempt: int, *checkpoint: str) -> str:
    """One attempt; its output."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": KEY,
        "HOME": str(run.path.parent),
    }
    command = [sys.executable, str(ROOT / "tests/standins/tracked_learner.py"), str(run.path), str(attempt), name]
    done = subprocess.run([*command, *checkpoint], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def two_attempts(root: Path, name: str) -> tuple[RunFolder, str]:
    """A run whose second attempt resumes from the first one's second step."""
    run = RunFolder.create(root, f"run-{name}")
    run.begin_attempt(None, 0)
    output = train(run, name, 1)
    checkpoint = run.output(1) / "checkpoint-2"
    attempt = run.begin_attempt(str(checkpoint.relative_to(run.path)), 2)
    output += train(run, name, attempt, str(checkpoint))
    return run, output


def assert_logged(entries: list[dict[str, Any]], run: RunFolder) -> None:
    """The newest entry of each step holds the numbers of metrics.jsonl, under their names with transformers' prefix."""
    by_step = {int(entry["train/global_step"]): entry for entry in entries if "train/loss" in entry}
    lines = list(run.merged_records("metrics.jsonl"))
    assert [(line["attempt"], line["step"]) for line in lines] == [(1, 2), (2, 4), (2, 5)]
    for line in lines:
        for name, value in line.items():
            if isinstance(value, int | float) and name not in ("step", "time", "attempt"):
                found = by_step[line["step"]][f"train/{name}"]
                assert math.isclose(found, value, rel_tol=1e-9, abs_tol=1e-12), name


def assert_no_secret(run: RunFolder, output: str) -> None:
    assert KEY not in output
    for path in run.path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path


def wandb_records(path: Path) -> Iterator[bytes]:
    """Records of a .wandb file: a header of 7 bytes, then LevelDB's log format."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        room = -at % 32_768
        if room < 7:  # too little for a header: the block's rest is padding
            at += room
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb_offline(tmp_path: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    run, output = two_attempts(tmp_path, "wandb")
    files = sorted(run.trackers.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    entries, ids, ends = [], set(), []
    for file in files:
        for data in wandb_records(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add((record.run.run_id, record.run.project, record.run.display_name))
            elif kind == "exit":
                ends.append(record.exit.exit_code)
            elif kind == "history":
                items = record.history.item
                entries.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items})
    assert ids == {(run.run_id, "slipstream", run.run_id)}, "both attempts are one run"
    assert ends == [0, 0]
    assert_logged(entries, run)
    assert_no_secret(run, output)


def test_trackio(tmp_path: Path) -> None:
    run, output = two_attempts(tmp_path, "trackio")
    with sqlite3.connect(run.trackers / "trackio" / "slipstream.db") as database:
        rows = database.execute("select run_name, run_id, metrics from metrics order by id").fetchall()
    assert {name for name, _, _ in rows} == {run.run_id}
    assert len({run_id for _, run_id, _ in rows}) == 1, "both attempts are one run"
    assert_logged([json.loads(metrics) for _, _, metrics in rows], run)
    assert_no_secret(run, output)
