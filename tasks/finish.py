"""After a run: how it ended, on storage, and its report."""

import contextlib
import time
from pathlib import Path

from slipstream.run_folder import RunFolder, write_json
from tasks.claim import superseded
from tasks.outcome import Outcome, outcome_record
from tasks.prepare import log_event


def finish(run: RunFolder, attempt: int, outcome: Outcome) -> Path:
    """Record the outcome and write the report; returns the report's path."""
    from slipstream.metrics.report import write_report

    write_json(run.path / "outcome.json", outcome_record(outcome, attempt, time.time()))
    log_event(run, attempt, f"{outcome.kind}: {outcome.reason}")
    return write_report(run)


def finish_failed(run: RunFolder, attempt: int, outcome: Outcome) -> None:
    """`finish` after a failure, whose own cause must not be hidden by a report that cannot be written."""
    if superseded(run, attempt) is not None:
        return  # the later attempt tells how the run ends
    with contextlib.suppress(Exception):
        finish(run, attempt, outcome)
