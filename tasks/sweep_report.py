"""The results of a sweep, from the run folders of its cells alone."""

from collections.abc import Sequence
from pathlib import Path

from slipstream.config_file import ConfigError
from slipstream.run_config import RunConfig
from slipstream.run_folder import DamagedFile
from slipstream.sweep.expand import CellSpec
from slipstream.sweep.measure import Measured, measure
from slipstream.sweep.rank import CellResult, rank
from slipstream.sweep.report import SweepReport, write_sweep_report
from slipstream.sweep.schedule import HALVING, CellState, Phase
from slipstream.sweep.spec import TRAINING, SweepConfig
from tasks.stored import stored_config
from tasks.sweep_cells import View, gpu_hours, look_at
from tasks.sweep_folder import Note, SweepFolder

METRICS_FILE = "metrics.jsonl"


class Measuring:
    """Measures runs, and reads those again whose records have grown. Readings of one sweep, by cell."""

    def __init__(self, sweep: SweepFolder, metric: str) -> None:
        self._sweep = sweep
        self._metrics = tuple(dict.fromkeys((metric, TRAINING)))
        self._known: dict[str, tuple[object, Measured]] = {}
        self._configs: dict[str, tuple[int, RunConfig]] = {}

    def config(self, cell: str) -> RunConfig:
        """That of its run, read again when the file has changed. Raises ConfigError, OSError."""
        run = self._sweep.run(cell)
        changed = run.run_file.stat().st_mtime_ns
        if cell not in self._configs or self._configs[cell][0] != changed:
            self._configs[cell] = (changed, stored_config(run))
        return self._configs[cell][1]

    def of(self, cell: str) -> Measured:
        """Raises OSError, DamagedFile."""
        run = self._sweep.run(cell)
        files = [run.records(attempt) / METRICS_FILE for attempt in run.attempts()]
        signature = tuple((str(file), file.stat().st_size) for file in files if file.is_file())
        known = self._known.get(cell)
        if known is not None and known[0] == (len(files), signature):
            return known[1]
        measured = measure(run.merged_records(METRICS_FILE), self._metrics)
        self._known[cell] = ((len(files), signature), measured)
        return measured


def result_of(cell: CellSpec, state: CellState, reason: str, measured: Measured) -> CellResult:
    word = "stopped early" if state.phase is Phase.STOPPED and state.stopped_for == HALVING else str(state.phase)
    return CellResult(cell.id, cell.values, word, measured, reason, state.gpu_hours)


def report_of(sweep: SweepFolder, spec: SweepConfig, results: Sequence[CellResult]) -> SweepReport:
    """What the report shows of these results."""
    ranking = rank(results, spec.metric, spec.target)
    counts: dict[str, int] = {}
    for result in results:
        counts[result.state] = counts.get(result.state, 0) + 1
    state = ", ".join(f"{count} {word}" for word, count in counts.items())
    hours = sum(result.gpu_hours for result in results)
    budget = f" of {spec.gpu_hours:g}" if spec.gpu_hours is not None else ""
    facts = {"cells": str(len(results)), "GPU hours (a CPU node counts as one GPU)": f"{hours:.2f}{budget}"}
    if ranking.target is not None:
        facts[f"target of {ranking.metric}"] = f"{ranking.target:.3g}"
    base = sweep.base()
    return SweepReport(
        sweep.sweep_id, f"{base.name}: {base.model.name}, {base.data.source}", spec.keys, ranking, state, facts
    )


def write_report(
    sweep: SweepFolder, results: Sequence[CellResult] | None = None, spec: SweepConfig | None = None
) -> Path:
    """Write the report, its pictures and best.toml; the report's path. `results`, `spec`: else they are read.

    A best.toml stays as it is where a cell that has finished, and may be the best, has no records any more.

    Raises ConfigError, DamagedFile, OSError.
    """
    spec = spec or sweep.spec()
    report = report_of(sweep, spec, read_results(sweep, spec) if results is None else results)
    best = report.ranking.best
    if not report.ranking.whole and (sweep.path / "best.toml").exists():
        best = None
    return write_sweep_report(sweep.path, report, sweep.best_text(best) if best is not None else None)


def read_results(sweep: SweepFolder, spec: SweepConfig) -> list[CellResult]:
    """All cells as they stand, without asking who leads them."""
    measuring, notes = Measuring(sweep, spec.metric), sweep.notes()
    found = []
    for cell in sweep.cells():
        state, reason, measured = read_cell(sweep, cell.id, notes[cell.id], View(led=True), measuring)
        found.append(result_of(cell, state, reason, measured))
    return found


def read_cell(
    sweep: SweepFolder, cell: str, note: Note, view: View, measuring: Measuring
) -> tuple[CellState, str, Measured]:
    """A cell's state, why it failed or was stopped, and what was measured; one whose files are damaged has failed.

    Raises OSError.
    """
    measured, hours = Measured(), 0.0
    try:
        measured = measuring.of(cell)
        if sweep.run(cell).run_file.is_file():
            hours = gpu_hours(sweep.run(cell), measuring.config(cell))
        state, reason = look_at(sweep, cell, note, view, hours)
    except (DamagedFile, ConfigError) as error:
        return CellState(cell, Phase.FAILED, again=note.again, gpu_hours=hours), str(error), measured
    return state, reason, measured
