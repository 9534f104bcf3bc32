"""The audit of a run folder, and the command that prints it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flows.cli.main import main
from slipstream.learner.checkpoint import MARKER, STATE_FILE, seal
from slipstream.metrics.audit import audit
from slipstream.metrics.audit_records import audit_run
from slipstream.process import write_exit
from slipstream.run_folder import LEDGER, RunFolder, append_jsonl, write_json
from tests.audit_runs import interrupted_run, write_run


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "r")


def written(folder: RunFolder, attempts: int, split: bool = False) -> Any:
    """The first finished made-up run of so many attempts, on storage."""
    for seed in range(10_000):
        run = interrupted_run(random.Random(seed))
        held = any(checkpoint.held for checkpoint in run.checkpoints)
        if len(run.attempts) == attempts and run.result is not None and (held or not split):
            write_run(run, folder)
            return run
    raise AssertionError("no such run")


def invoke(*argv: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["audit", *argv])
    return result.exit_code, result.output


def test_what_is_read_is_what_was_written(folder: RunFolder) -> None:
    run = written(folder, 3, split=True)
    found, made = audit_run(folder), audit(run)
    assert found.clean
    assert (found.settled, found.expected, found.void) == (made.settled, made.expected, made.void)
    assert [(a.began_from, a.reached, a.redone) for a in found.attempts] == [
        (a.began_from, a.reached, a.redone) for a in made.attempts
    ]
    code, text = invoke(str(folder.path))
    assert code == 0
    assert "clean: every prompt was settled exactly once" in text


def test_findings_make_the_exit_code_1(folder: RunFolder) -> None:
    run = written(folder, 2)
    line = dict(run.attempts[-1].ledger[-1])
    append_jsonl(folder.records(2) / LEDGER, line)
    code, text = invoke(str(folder.path))
    assert code == 1
    assert f"settled twice: epoch {line['epoch']}, prompt {line['prompt']}, by attempt 2 at step" in text
    code, text = invoke(str(folder.path), "--json")
    assert code == 1
    value = json.loads(text)
    assert not value["clean"]
    assert [finding["fault"] for finding in value["findings"]] == ["settled twice"]
    assert value["attempts"][1]["began_from"] == run.attempts[1].fence["step"]


def test_a_damaged_line_is_a_finding_and_a_torn_last_one_is_none(folder: RunFolder) -> None:
    written(folder, 1)
    path = folder.records(1) / LEDGER
    whole = path.read_text()
    path.write_text(whole + '{"number": 3, "ep')
    assert audit_run(folder).clean
    path.write_text("{}\n" + whole)
    assert [str(finding) for finding in audit_run(folder).findings] == [
        "unreadable record: records/a1/ledger.jsonl, line 1"
    ]


def test_a_checkpoint_without_its_marker_is_none(folder: RunFolder) -> None:
    run = written(folder, 1)
    path = folder.path / run.checkpoints[0].path
    write_json(path / STATE_FILE, {})
    seal(path)
    assert not audit_run(folder).clean
    (path / MARKER).unlink()
    assert audit_run(folder).clean


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("faults", "learner on n3 at step 7: node failed → new attempt"),
        ("cancel", "stopped by ada: lunch"),
        ("resumed", "resumed by a person after: stopped by ada: lunch"),
        ("exit", "learner: rank 1 was killed"),
        ("left", "learner: its time was up"),
        ("event", "the learner has not written a heartbeat for 9 s"),
        ("none", "it left no record of its end"),
    ],
)
def test_why_an_attempt_was_begun_is_told_by_the_best_record(folder: RunFolder, source: str, why: str) -> None:
    written(folder, 2)
    if source == "faults":
        known = {"time": 1.0, "attempt": 1, "role": "server", "kind": "died", "step": 3, "nodes": [], "reason": ""}
        append_jsonl(folder.path / "records" / "faults.jsonl", {**known, "action": "started again"})
        known |= {"role": "learner", "kind": "node failed", "step": 7, "nodes": ["n3"], "reason": "node failed"}
        append_jsonl(folder.path / "records" / "faults.jsonl", {**known, "action": "new attempt"})
    if source == "resumed":
        append_jsonl(folder.path / "records" / "faults.jsonl", {"time": 1.0, "attempt": 2, "kind": "resumed"})
    if source in ("cancel", "resumed"):
        write_json(folder.path / "cancel-1.json", {"who": "ada", "why": "lunch"})
    if source == "exit":
        write_exit(folder, "server-0", "x", 1, 0, "stopped by SIGTERM", folder.logs / "l")
        write_exit(folder, "learner", "y", 1, 1, "rank 1 was killed", folder.logs / "l")
    if source == "left":
        write_exit(folder, "learner", "y", 1, 0, "its time was up", folder.logs / "l", left=1)
    if source == "event":
        append_jsonl(folder.records(1) / "supervisor.jsonl", {"event": "training"})
        append_jsonl(folder.records(1) / "supervisor.jsonl", {"event": why})
    rows = audit_run(folder).attempts
    assert [row.why for row in rows] == ["start", why]
    assert rows[0].faults == (("server at step 3: died → started again",) if source == "faults" else ())
    code, text = invoke(str(folder.path))
    assert code == 0
    assert why in text
