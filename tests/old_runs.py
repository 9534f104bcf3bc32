"""Run folders that ended long ago, and `slipstream clean` on them."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil
from click.testing import CliRunner

from cluster.decide import Kind
from cluster.jobs import JobRecord
from cluster.local_jobs import started
from flows.cli.main import main
from slipstream.config_file import dump_config, parse_config
from slipstream.run_folder import RunFolder, append_jsonl, write_atomic, write_json
from tasks.clean import what_goes
from tasks.origin import Origin, write_origin
from tasks.outcome import Outcome, outcome_record

DAY = 86400.0


def a_run(
    root: Path, run_id: str, days: float | None = 45, held_out: float | None = None, sweep: str = "", name: str = "demo"
) -> RunFolder:
    """A run that ended so many days ago; None: it has not."""
    run = RunFolder.create(root, run_id)
    write_origin(run, Origin(sweep=sweep))
    values: dict[str, Any] = {"model": {"name": "m"}, "data": {"source": "d"}, "recovery": {"lease": 2.0}}
    write_atomic(run.run_file, dump_config(parse_config({**values, "name": name})))
    attempt = run.begin_attempt(None, 0)
    if held_out is not None:
        append_jsonl(run.records(attempt) / "metrics.jsonl", {"step": 1, "eval/reward": held_out, "reward": 0.1})
    if days is not None:
        record = outcome_record(Outcome(Kind.FINISH, "done"), attempt, time.time() - days * DAY)
        write_json(run.path / "outcome.json", record)
    return run


def job(run: RunFolder, **more: Any) -> JobRecord:
    me = {"host": socket.gethostname(), "job_id": str(os.getpid()), "start_time": started(psutil.Process())}
    values = {"run_id": run.run_id, "role": "learner", "attempt": 1, "incarnation": "i1", "executor": "local", **me}
    return JobRecord(**{**values, "submitted": 0.0, "why": "start", **more})


def goes(root: Path, days: float = 30, keep_best: bool = False) -> dict[str, str]:
    return {row.found.id: row.why for row in what_goes(root, days * DAY, keep_best, time.time()) if row.goes}


def stays(root: Path, days: float = 30, keep_best: bool = False) -> dict[str, str]:
    return {row.found.id: row.why for row in what_goes(root, days * DAY, keep_best, time.time()) if not row.goes}


def clean(root: Path, *argv: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["clean", "--root", str(root), *argv])
    return done.exit_code, done.output
