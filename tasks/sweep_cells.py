"""The cells of a sweep as runs: how each stands by its run folder, what it has cost, and who starts and stops them."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import psutil

from cluster.decide import Kind
from cluster.local_jobs import find_process, started
from slipstream.config_file import ConfigError
from slipstream.process import last_lines
from slipstream.run_config import RunConfig
from slipstream.run_folder import DamagedFile, RunFolder, is_number, read_object
from slipstream.sweep.schedule import INTERRUPT, CellState, Phase
from tasks.interrupt import uninterrupted
from tasks.lease import LeaseWatch, claim, configured_lease, release
from tasks.observe import cancel_request, heartbeat, newest_attempt
from tasks.origin import SWEEP_ENV, read_origin
from tasks.outcome import NothingToResume, Outcome, read_outcome, write_outcome
from tasks.records import run_step
from tasks.stop import request_cancel, stop_jobs
from tasks.sweep_folder import Note, SweepFolder

MOST_STARTS = 3
WORDS = 12  # lines of a log
ENDS = [str(phase) for phase in Phase if phase.ended]


@dataclass(frozen=True)
class View:
    """What is known of whoever leads a cell, beside the run folder.

    Attributes:
        alive: it is there, or will be: a process, or a flow run that has not ended.
        led: as far as a run that has begun is concerned; True where somebody else looks after leaders.
        problem: why it could not even begin, where it has ended without a run.
        cancelled: that was because somebody cancelled it.
    """

    alive: bool = False
    led: bool = False
    problem: str = ""
    cancelled: bool = False


class NotNow(Exception):
    """A cell cannot be started at the moment; a later try may do."""


class Cells(Protocol):
    """Who leads the cells. All of it is safe to do again."""

    def look(self, cells: Sequence[str], notes: Mapping[str, Note]) -> dict[str, View]: ...

    def start(self, cell: str, note: Note) -> None:
        """Have the cell led: a new run, one that has ended and is to go on, or one without a leader. Fills in `note`.

        `note.serial` names this start: done twice with the same one, it is one start. Raises OSError, NotNow.
        """

    def stop(self, cell: str, note: Note, why: str) -> None:
        """Stop what leads a cell that has no run yet."""


def requester(sweep: SweepFolder) -> str:
    """Who asks a cell to stop, when the sweep does."""
    return f"sweep {sweep.sweep_id}"


def look_at(sweep: SweepFolder, cell: str, note: Note, view: View, hours: float) -> tuple[CellState, str]:
    """How a cell stands, and why it failed or was stopped ('' otherwise). Raises OSError, DamagedFile."""
    run = sweep.run(cell)
    state = CellState(cell, Phase.WAITING, again=note.again, gpu_hours=hours)
    if not run.run_file.is_file():
        state = replace(state, gpu_hours=note.gpu_hours)
        if view.alive:
            return replace(state, phase=Phase.STARTING, asked=bool(note.stopped_for)), ""
        if note.ended in ENDS and not note.problem:
            removed = replace(state, phase=Phase(note.ended), stopped_for=note.stopped_for)
            return removed, f"{run.path} was removed after it had ended"
        if note.problem or (view.problem and not note.stopped_for):
            phase = Phase.STOPPED if view.cancelled else Phase.FAILED
            return replace(state, phase=phase), note.problem or view.problem
        return state, ""
    outcome = read_outcome(run)
    if outcome is None:
        if note.problem and run.cancel_file.exists():  # given up; one that was thought not to begin, and has, runs
            return replace(state, phase=Phase.FAILED), note.problem
        return replace(state, phase=Phase.RUNNING, led=view.led, asked=run.cancel_file.exists()), ""
    if outcome.kind is Kind.FINISH:
        return replace(state, phase=Phase.FINISHED), ""
    if resumes(run, note):  # it is to go on: until it does, its old end is there
        if view.alive:
            return replace(state, phase=Phase.STARTING, asked=bool(note.stopped_for)), ""
        if view.problem and not note.stopped_for:
            return replace(state, phase=Phase.FAILED), view.problem
    if outcome.kind is Kind.FAIL:
        return replace(state, phase=Phase.FAILED), outcome.reason
    asked = cancel_request(run)
    by_sweep = asked.startswith(f"{requester(sweep)}: ")
    ours = by_sweep or asked.startswith(("command line: ", "flow"))
    stopped_for = note.stopped_for if ours else ""
    if by_sweep and not stopped_for and not note.problem:  # by whoever stopped it in the place of a dead driver
        return replace(state, phase=Phase.STOPPED, stopped_for=INTERRUPT), outcome.reason
    return replace(state, phase=Phase.STOPPED, stopped_for=stopped_for), note.why if stopped_for else outcome.reason


def resumes(run: RunFolder, note: Note) -> bool:
    """Whether a run that has ended was started again since, and has not come to its next attempt."""
    ended = read_object(run.path / "outcome.json", "attempt")
    return note.attempt > 0 and ended.get("attempt") == note.attempt


def gpu_hours(run: RunFolder, config: RunConfig) -> float:
    """GPU hours that the jobs of a run have used: of its leaders, from their start to their end, or to their last beat.

    A node without GPUs counts as one GPU. What waits in a queue costs nothing. A job that was killed so hard that
    nothing of it is left counts with what its last beat tells.
    """
    seconds: dict[tuple[str, str], float] = {}
    for path in (run.path / "heartbeats").glob("*.json"):
        beat = heartbeat(run, path.stem)
        if _leads(path.stem) and beat.get("incarnation"):
            role = path.stem.removesuffix("-0").replace("learner-n", "learner.")
            began = beat.get("started")
            seconds[(role, str(beat["incarnation"]))] = _span(began if is_number(began) else None, beat.get("time"))
    for path in (run.path / "exit").glob("*.json"):
        with contextlib.suppress(ValueError, OSError):
            record = read_object(path, "started", "time")
            role = str(record.get("role", "")).removesuffix("-0")
            seconds[(role, str(record.get("incarnation")))] = _span(record.get("started"), record.get("time"))
    return sum(_gpus(config, role) * span for (role, _), span in seconds.items()) / 3600


def _leads(writer: str) -> bool:
    return writer == "learner" or writer.startswith(("learner-n", "server-"))


def _span(begun: float | None, ended: float | None) -> float:
    return 0.0 if begun is None or ended is None else max(0.0, ended - begun)


def _gpus(config: RunConfig, role: str) -> int:
    return max(1, config.server.gpus if role.startswith("server") else config.learner.gpus)


def stop_unled(sweep: SweepFolder, cell: str) -> None:
    """End a run that was asked to stop and that nobody leads. Does nothing where somebody does by now."""
    run = sweep.run(cell)
    try:
        claim(run)
    except NothingToResume:
        return
    try:
        with uninterrupted():
            stop_jobs(run)
            if read_outcome(run) is None:
                write_outcome(run, Outcome(Kind.CANCELLED, cancel_request(run)), newest_attempt(run))
    finally:
        release(run)


def stop_cell(sweep: SweepFolder, cells: Cells, state: CellState, note: Note, why: str) -> None:
    """Ask a cell to stop. `note` is written by the caller before."""
    run = sweep.run(state.id)
    if run.run_file.is_file():
        request_cancel(run, requester(sweep), why)
    cells.stop(state.id, note, why)


def begin_note(sweep: SweepFolder, cell: str, note: Note) -> None:
    """Note that a cell is about to be started, and that it has been too often where it has."""
    run = sweep.run(cell)
    step = run_step(run) if run.run_file.is_file() else 0
    note.serial += 1
    note.starts = note.starts + 1 if note.attempt >= 0 and step <= note.at_step and not note.again else 1
    note.at_step = step
    note.attempt = newest_attempt(run) if run.run_file.is_file() else 0
    note.stopped_for = note.why = note.problem = note.ended = ""
    note.again = False
    if note.starts > MOST_STARTS:
        note.problem = f"it was started {MOST_STARTS} times without a new step in between: see {sweep.log_file(cell)}"


def _last_words(log: Path) -> str:
    """What a command has refused, from its `error:` on; else its last line, and what stands above that."""
    lines = [line for line in last_lines(log, WORDS).splitlines() if line.strip()]
    errors = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    if errors:
        return "\n".join(lines[errors[-1] :]).removeprefix("error: ")
    return "\n".join([lines[-1].strip(), *lines[:-1]]) if lines else "it said nothing"


class LocalCells:
    """Cells that are led by a command each, children of ours that outlive us.

    Args:
        command: what `train CONFIG` and `resume RUN` are given to: `slipstream`.
    """

    def __init__(self, sweep: SweepFolder, command: Sequence[str]) -> None:
        self._sweep = sweep
        self._command = list(command)
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._watches: dict[str, LeaseWatch] = {}

    def look(self, cells: Sequence[str], notes: Mapping[str, Note]) -> dict[str, View]:
        return {cell: self._seen(cell, notes[cell]) for cell in cells}

    def _seen(self, cell: str, note: Note) -> View:
        """What is damaged says whoever reads the run; the others are not to wait for it."""
        try:
            return self._look(cell, note)
        except (DamagedFile, ConfigError):
            return View()

    def _look(self, cell: str, note: Note) -> View:
        run = self._sweep.run(cell)
        child = self._children.get(cell)
        alive = child.poll() is None if child is not None else _lives(note)
        problem = ""
        if (
            child is not None
            and not alive
            and (not run.run_file.is_file() or (child.returncode and resumes(run, note)))
        ):
            problem = f"it did not start (exit code {child.returncode}): {_last_words(self._sweep.log_file(cell))}"
        led = alive
        if not led and run.run_file.is_file():
            led = bool(self._watch(cell).look(time.monotonic()))
        return View(alive, led, problem)

    def _watch(self, cell: str) -> LeaseWatch:
        if cell not in self._watches:
            run = self._sweep.run(cell)
            self._watches[cell] = LeaseWatch(run, configured_lease(run))
        return self._watches[cell]

    def start(self, cell: str, note: Note) -> None:
        run = self._sweep.run(cell)
        if run.run_file.is_file():
            if who := self._watch(cell).look(time.monotonic()):
                raise NotNow(f"{cell} goes on once its earlier leader ({who}) has ended")
            what = ["resume", str(run.path)]
        else:
            if run.path.is_dir():  # whoever makes it is at it, or died before the run was there
                if self._watch(cell).look(time.monotonic()):
                    return
                shutil.rmtree(run.path)
            what = ["train", str(self._sweep.config_file(cell)), "--run-id", run.run_id]
        log = self._sweep.log_file(cell)
        log.parent.mkdir(mode=0o700, exist_ok=True)
        folder = Path(read_origin(self._sweep.as_run).cwd)
        with open(log, "ab") as out:
            os.chmod(log, 0o600)
            child = subprocess.Popen(
                [*self._command, *what],
                cwd=folder if folder.is_dir() else None,
                env=os.environ | {SWEEP_ENV: self._sweep.sweep_id, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children[cell] = child
        with contextlib.suppress(psutil.Error):
            note.pid, note.started, note.host = child.pid, started(psutil.Process(child.pid)), os.uname().nodename

    def stop(self, cell: str, note: Note, why: str) -> None:
        """A cell that has a run has been asked on storage; of others, and where that is full, the command is told."""
        run = self._sweep.run(cell)
        if run.run_file.is_file() and run.cancel_file.exists() and not resumes(run, note):
            return
        if _lives(note):
            with contextlib.suppress(psutil.Error):
                psutil.Process(note.pid).terminate()


def _lives(note: Note) -> bool:
    here = bool(note.pid) and note.host == os.uname().nodename
    return here and find_process(note.pid, note.started) is not None
