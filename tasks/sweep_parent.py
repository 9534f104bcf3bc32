"""A sweep's own folder, seen from outside: how far its cells are, how they are asked to stop, what its cancel means to one."""

import contextlib

from cluster.decide import Kind
from slipstream.run_folder import DamagedFile, RunFolder, read_object
from tasks.leads import resumed_at
from tasks.observe import cancel_request
from tasks.outcome import read_outcome
from tasks.records import run_step
from tasks.stop import request_cancel
from tasks.sweep_cells import requester
from tasks.sweep_folder import SweepFolder


def progress(sweep: SweepFolder) -> int:
    """How far the cells have come together: the steps of all, and one for each that has ended. Raises OSError."""
    done = 0
    for cell in sweep.cells():
        run = sweep.run(cell.id)
        if run.run_file.is_file():
            with contextlib.suppress(DamagedFile):
                done += run_step(run) + (read_outcome(run) is not None)
    return done


def open_cells(sweep: SweepFolder) -> list[str]:
    """Cells that have a run which has not ended. Raises OSError, DamagedFile."""
    runs = [(cell.id, sweep.run(cell.id)) for cell in sweep.cells()]
    return [cell for cell, run in runs if run.run_file.is_file() and read_outcome(run) is None]


def unasked(sweep: SweepFolder, cells: list[str]) -> list[str]:
    """Those of `cells` that nobody has asked to stop."""
    return [cell for cell in cells if not sweep.run(cell).cancel_file.exists()]


def ask_cells(sweep: SweepFolder, why: str) -> None:
    """Ask every cell that has begun and not ended to stop; who leads it, or reconciliation, ends it.

    Raises OSError, DamagedFile.
    """
    for cell in unasked(sweep, open_cells(sweep)):
        request_cancel(sweep.run(cell), requester(sweep), why)


def sweep_cancelled(run: RunFolder, sweep_id: str) -> str:
    """Why the sweep that `run` is a cell of was cancelled; '' where it was not, or where a person has resumed the cell since.

    Raises OSError, DamagedFile.
    """
    sweep = SweepFolder(run.path.parent / sweep_id)
    if not sweep_id or not sweep.sweep_file.is_file():
        return ""
    path, why = sweep.cancel_file, cancel_request(sweep.as_run)
    if not why:
        ended = read_outcome(sweep.as_run)
        if ended is None or ended.kind is not Kind.CANCELLED:
            return ""
        path, why = sweep.outcome_file, ended.reason
    when = 0.0
    with contextlib.suppress(DamagedFile):
        when = float(read_object(path, "time").get("time") or 0.0)
    return "" if resumed_at(run) > when else why
