"""After a run: its report."""

import contextlib
from pathlib import Path

from cluster.decide import Kind
from slipstream.run_folder import RunFolder
from tasks.lease import release
from tasks.observe import newest_attempt
from tasks.outcome import Outcome, outcome_of, read_outcome, write_outcome
from tasks.records import log_event
from tasks.stop import request_cancel, stop_jobs
from tasks.supervise import Watcher, supervise
from tasks.sweep_folder import SweepFolder, is_sweep


def finish(run: RunFolder) -> Path:
    """Write the report of a run, or of a sweep, whose folder stands for it; returns its path."""
    if is_sweep(run):
        from tasks.sweep_report import write_report as write_sweep_report

        return write_sweep_report(SweepFolder(run.path))
    from slipstream.metrics.report import write_report

    return write_report(run)


def finish_failed(run: RunFolder, error: BaseException) -> None:
    """What is to be told of a run that `error` ended, where nobody has told it yet; and its report, if that can be written.

    The failure's own cause must not be hidden by one that comes on top.
    """
    with contextlib.suppress(Exception):
        if read_outcome(run) is None:
            outcome = outcome_of(error)
            write_outcome(run, outcome, newest_attempt(run))
            log_event(run, newest_attempt(run), f"{outcome.kind}: {outcome.reason}")
        finish(run)


def end_with(run: RunFolder, error: BaseException, who: str) -> None:
    """End a run that `error` ended: no job is left, how it ended is told, and the lease given back.

    Args:
        who: asked for it, for the record of a cancel.
    """
    ended = outcome_of(error)
    if ended.kind is Kind.CANCELLED:
        request_cancel(run, who, ended.reason)
    stop_jobs(run)
    finish_failed(run, error)
    release(run)


def supervise_to_the_end(run: RunFolder, on_observation: Watcher | None = None) -> Outcome:
    """`supervise` without a flow around it: the report is written, and the lease given back. Raises what it raises."""
    try:
        outcome = supervise(run, on_observation)
        finish(run)
        return outcome
    except Exception:
        with contextlib.suppress(Exception):
            if read_outcome(run) is not None:  # who did not lead the run has not ended it
                finish(run)
        raise
    finally:
        release(run)
