"""Stopping a sweep from outside."""

import time

from slipstream.run_config import RecoverySection
from slipstream.run_folder import DamagedFile, write_json
from slipstream.sweep.schedule import INTERRUPT
from tasks.lease import LeaseWatch
from tasks.outcome import read_outcome
from tasks.stop import request_cancel
from tasks.sweep_cells import requester, stop_unled
from tasks.sweep_folder import SweepFolder


def stop_sweep(sweep: SweepFolder, who: str, why: str) -> str:
    """Ask the sweep's driver to stop all cells; where none drives it, stop them here. What was done, in words.

    Raises OSError, DamagedFile.
    """
    if not sweep.cancel_file.exists():
        write_json(sweep.cancel_file, {"who": who, "why": why, "time": time.time()})
    driver = LeaseWatch(sweep.as_run, RecoverySection().lease).look(time.monotonic())
    if driver:
        return f"asked whoever drives {sweep.sweep_id} ({driver}) to stop its cells"
    stopped = stop_cells(sweep, f"{who}: {why}")
    return f"stopped {', '.join(stopped)}" if stopped else f"{sweep.sweep_id}: no cell was running"


def stop_cells(sweep: SweepFolder, why: str) -> list[str]:
    """Ask every cell that has begun and not ended to stop, and end those that nobody leads. The cells' ids.

    Nobody may drive the sweep meanwhile. Raises OSError, DamagedFile.
    """
    try:
        notes = sweep.notes()
    except DamagedFile:  # each request says by whom it is, and that is enough
        notes = {}
    stopped = []
    for cell in sweep.cell_ids():
        run = sweep.run(cell)
        if run.run_file.is_file() and read_outcome(run) is None:
            if cell in notes:
                notes[cell].stopped_for, notes[cell].why = INTERRUPT, why
                sweep.write_notes(notes)
            request_cancel(run, requester(sweep), why)
            stop_unled(sweep, cell)
            stopped.append(cell)
    return stopped
