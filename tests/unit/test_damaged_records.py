"""A run folder with a damaged file: the command line names the file, or goes on without it; `stop` stops all the same."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cluster.intents import unrecorded_jobs
from cluster.jobs import JobRecord, read_jobs, record_job
from flows.cli.main import main
from slipstream.config_file import dump_config, parse_config
from slipstream.run_folder import DamagedFile, RunFolder, append_jsonl, read_jsonl, read_object, write_json

JOB = JobRecord("r", "learner", 1, "i1", "local", "999999999", "elsewhere", 1.0, 2.0, "start")
INTENT = {
    "role": "server",
    "attempt": 1,
    "incarnation": "i2",
    "executor": "local",
    "host": "h",
    "time": 1.0,
    "why": "start",
}
NAMES = ("attempt", "step", "time", "kind", "incarnation", "cwd", "returncode", "left", "max_steps", "role", "learner")
NESTED = {name: ["x"] for name in NAMES}
GARBAGE = ("", "{", "[1]", '"x"', "7", json.dumps(NESTED), '{"step": 1e400, "time": 1e400}', "[" * 100_000)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path, "r")
    run.run_file.write_text(dump_config(parse_config({"model": {"name": "m"}, "data": {"source": "d"}})))
    run.begin_attempt(None, 0)
    record_job(run, JOB)
    write_json(run.assignment_file, {"attempt": 1, "learner": "i1"})
    write_json(run.path / "origin.json", {"cwd": str(tmp_path), "time": 1.0})
    append_jsonl(run.records(1) / "metrics.jsonl", {"step": 1, "reward": 0.5})
    append_jsonl(run.records(1) / "supervisor.jsonl", {"time": 1.0, "event": "prepared"})
    return run


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize(
    "name",
    [
        "assignment.json", "cancel.json", "endpoints/server-0.json", "exit/learner-i1.json", "fences/1.json",
        "heartbeats/learner.json", "heartbeats/supervisor.json", "intents/1-server-i2.json", "jobs/1.jsonl", "origin.json",
        "outcome.json", "records/a1/metrics.jsonl", "records/a1/supervisor.jsonl", "result.json",
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_or_left_out(run: RunFolder, name: str, garbage: str) -> None:
    path = run.path / name
    path.write_text((path.read_text() if path.suffix == ".jsonl" else "") + garbage + "\n")
    for command in ("status", "stop", "audit"):
        result = CliRunner().invoke(main, [command, str(run.path)])
        assert not re.match(r"error: \w+Error", result.output), result.output
        if result.exit_code == 2:
            assert name in result.output


def test_one_damaged_record_does_not_hide_a_job(run: RunFolder) -> None:
    with run.jobs_file(1).open("a") as file:
        file.write('{"run_id": "r"}\n7\n')
    record_job(run, JOB)
    assert read_jobs(run, 1) == [JOB, JOB]
    (run.path / "intents" / "1-allocation-i0.json").write_text("[")
    write_json(run.path / "intents" / "1-server-i2.json", INTENT)
    assert [job.incarnation for job in unrecorded_jobs(run)] == ["i2"]


@pytest.mark.parametrize("value", [[1], "x", {"step": "many"}, {"step": float("inf")}, {"step": {}}])
def test_an_object_with_numbers(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "a.json"
    assert read_object(path, "step") == {}
    write_json(path, {"step": None, "other": "x"})
    assert read_object(path, "step") == {"step": None, "other": "x"}
    write_json(path, value)
    with pytest.raises(DamagedFile, match=r"a\.json is damaged"):
        read_object(path, "step")


def test_a_line_too_deep_to_read_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[" * 100_000 + '\n{"a": 1}\n')
    assert read_jsonl(tmp_path / "a.jsonl") == [{"a": 1}]
