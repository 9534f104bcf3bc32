"""The driver of a sweep: look at the cells' run folders, decide, act, until there is nothing left to do.

Level-triggered: what counts stands in the run folders, so a driver that was killed is followed by another one that goes
on, and cells that run in between are not disturbed. One process drives, by a lease as of a run.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from cluster.decide import Kind
from cluster.profile import ClusterError
from slipstream.config_file import ConfigError
from slipstream.run_config import RecoverySection
from slipstream.run_folder import DamagedFile, read_object, write_json
from slipstream.sweep.expand import CellSpec
from slipstream.sweep.halving import hopeless
from slipstream.sweep.measure import Measured
from slipstream.sweep.rank import CellResult
from slipstream.sweep.schedule import HALVING, INTERRUPT, CellState, Limits, Phase, Plan, decide
from slipstream.sweep.spec import TRAINING, SweepConfig
from tasks.interrupt import uninterrupted
from tasks.lease import StepDown, claim, held_lease, release
from tasks.outcome import NothingToResume, Outcome, outcome_record
from tasks.records import forgive
from tasks.stop import request_cancel, stop_jobs
from tasks.sweep_cells import Cells, NotNow, begin_note, requester, stop_cell, stop_unled
from tasks.sweep_folder import Note, SweepFolder
from tasks.sweep_report import Measuring, read_cell, result_of, write_report

POLL_S = 2.0
STOP_PATIENCE_S = 300.0


@dataclass(frozen=True)
class Look:
    """A sweep as it stands. `results` is in the order of the cells."""

    cells: tuple[CellSpec, ...]
    states: Mapping[str, CellState]
    results: tuple[CellResult, ...]

    @property
    def active(self) -> list[CellState]:
        return [state for state in self.states.values() if state.phase.active]


Watcher = Callable[[Look, Plan], None]


class SweepStopped(Exception):
    """Somebody asked the sweep to stop; its cells have been stopped."""


def drive(
    sweep: SweepFolder,
    cells: Cells,
    retry_failed: bool = False,
    tell: Watcher | None = None,
    poll_s: float = POLL_S,
    by_person: bool = True,
    leave: Callable[[BaseException], bool] = lambda _: False,
    spec: SweepConfig | None = None,
) -> Look:
    """Drive the sweep until nothing is left to do; how it stands then. Its report is written whenever a cell has ended.

    Args:
        retry_failed: try cells again that have failed, or that a person stopped.
        tell: called at each look.
        by_person: a person asked for it, so that earlier requests to stop, and an earlier end, are history.
        leave: whether an interruption leaves the cells alone, as StepDown does.
        spec: takes the place of the folder's, for other limits over the same cells; nothing is written where another drives.

    Whatever interrupts it (KeyboardInterrupt) stops the cells, which the next call continues; after StepDown they go on.
    Raises NothingToResume where another process drives it, SweepStopped, ConfigError, DamagedFile.
    """
    claim(sweep.as_run, RecoverySection().lease)
    try:
        if spec is not None:
            sweep.write_spec(spec)
        return _Driver(sweep, cells, tell, poll_s, leave).drive(retry_failed, by_person)
    finally:
        release(sweep.as_run)


class _Driver:
    def __init__(
        self,
        sweep: SweepFolder,
        cells: Cells,
        tell: Watcher | None,
        poll_s: float,
        leave: Callable[[BaseException], bool],
    ) -> None:
        self.sweep = sweep
        self._leave = leave
        self.spec: SweepConfig = sweep.spec()
        self.cells = cells
        self.specs = sweep.cells()
        self.ids = [cell.id for cell in self.specs]
        self.notes = sweep.notes()
        self._measuring = Measuring(sweep, self.spec.metric)
        self._seen: dict[str, tuple[CellState, str, Measured]] = {}
        self._tell = tell
        self._poll_s = poll_s
        self._reported: object = None
        self._said = ""

    def drive(self, retry_failed: bool, by_person: bool) -> Look:
        if by_person:
            self._begin(retry_failed)
        try:
            look, plan = self._until_done()
        except (StepDown, NothingToResume):
            raise
        except BaseException as error:
            if self._leave(error):
                raise
            with uninterrupted():
                stopped = self._stop_all(f"interrupted by {type(error).__name__}")
                self._end(stopped, Kind.CANCELLED, f"interrupted by {type(error).__name__}")
            raise
        why = self._asked()
        if why:
            self._end(look, Kind.CANCELLED, why)
            raise SweepStopped(why)
        some = any(state.phase is Phase.FINISHED for state in look.states.values())
        self._end(look, Kind.FINISH if some or plan.spent else Kind.FAIL, plan.reason, plan.spent)
        return look

    def _begin(self, retry_failed: bool) -> None:
        """Earlier requests and ends are history."""
        with contextlib.suppress(OSError):
            forgive(self.sweep.as_run, 0)
        for path in (self.sweep.cancel_file, self.sweep.outcome_file):
            path.unlink(missing_ok=True)
        look = self._look()
        for cell, state in look.states.items():
            note = self.notes[cell]
            note.starts = 0
            tried = state.phase is Phase.FAILED or (state.phase is Phase.STOPPED and not state.stopped_for)
            note.again = retry_failed and tried
        self._save()

    def _until_done(self) -> tuple[Look, Plan]:
        while True:
            try:
                look = self._look()
                plan = self._plan(look)
                self._report(look)
                if self._tell is not None:
                    with contextlib.suppress(OSError):  # a terminal or a pipe that is gone
                        self._tell(look, plan)
                if plan.done:
                    return look, plan
                lease = held_lease(self.sweep.as_run)
                if lease is None:
                    raise NothingToResume(f"another process drives {self.sweep.sweep_id} by now")
                self._act(look, plan)
            except OSError as error:  # storage that does not answer: the cells go on, and are looked at again
                refused = f"{self.sweep.path.parent}: {error.strerror or error}"
                self._say(f"{refused}: the sweep goes on once the storage is all right again")
            time.sleep(self._poll_s)

    def _asked(self) -> str:
        with contextlib.suppress(OSError, DamagedFile):
            value = read_object(self.sweep.cancel_file)
            return f"{value.get('who', 'somebody')}: {value.get('why', 'no reason given')}" if value else ""
        return ""

    def _plan(self, look: Look) -> Plan:
        if why := self._asked():
            stop = {state.id: (INTERRUPT, why) for state in look.active if not state.asked}
            return Plan(stop=stop, done=not look.active, reason=f"stopping: {why}")
        states = [look.states[cell] for cell in self.ids]
        limits = Limits(self.spec.cells_at_once, self.spec.gpu_hours)
        return decide(states, limits, self._hopeless(look))

    def _hopeless(self, look: Look) -> dict[str, str]:
        if self.spec.halving is None:
            return {}
        measured = {result.id: result.measured for result in look.results}
        metric = self.spec.metric
        if not any(one.curves.get(metric) for one in measured.values()):
            metric = TRAINING
        # one that was stopped before, and that a person has continued, is theirs
        running = frozenset(s.id for s in look.active if self.notes[s.id].stopped_for != HALVING)
        curves = {
            cell: [(point.step, point.value) for point in one.curves.get(metric, ())] for cell, one in measured.items()
        }
        return hopeless(self.spec.halving, {cell: one.steps for cell, one in measured.items()}, curves, running)

    def _look(self) -> Look:
        views = self.cells.look(self.ids, self.notes)
        for cell in self.ids:
            with contextlib.suppress(OSError):  # storage that stumbles: it stands as it was seen last
                self._seen[cell] = read_cell(self.sweep, cell, self.notes[cell], views[cell], self._measuring)
                self._note(cell)
            if cell not in self._seen:
                self._seen[cell] = CellState(cell, Phase.STARTING), "", Measured()
        states = {cell: self._seen[cell][0] for cell in self.ids}
        results = [result_of(cell, *self._seen[cell.id]) for cell in self.specs]
        return Look(self.specs, states, tuple(results))

    def _note(self, cell: str) -> None:
        """What has to be known of a cell where its run folder is not there."""
        state, reason, _ = self._seen[cell]
        note = self.notes[cell]
        if self.sweep.run(cell).run_file.is_file():
            if state.phase is Phase.RUNNING:  # it has begun all the same
                note.problem = ""
            note.ended, note.gpu_hours = (str(state.phase) if state.phase.ended else ""), state.gpu_hours
        elif state.phase is Phase.FAILED and not note.ended:
            note.problem = note.problem or reason

    def _act(self, look: Look, plan: Plan) -> None:
        for cell, (kind, why) in plan.stop.items():
            self._stop(look.states[cell], kind, why)
        self._end_unled(look)
        for cell in plan.start:
            self._start(look.states[cell])

    def _end_unled(self, look: Look) -> None:
        """Cells that were asked to stop, and that nobody is there to stop any more."""
        for state in look.active:
            if state.phase is Phase.RUNNING and state.asked and not state.led:
                with contextlib.suppress(OSError, ConfigError, ClusterError):
                    stop_unled(self.sweep, state.id)

    def _start(self, state: CellState) -> None:
        note = self.notes[state.id]
        before = replace(note)
        begin_note(self.sweep, state.id, note)
        self._save()
        if note.problem:
            if self.sweep.run(state.id).run_file.is_file():
                request_cancel(self.sweep.run(state.id), requester(self.sweep), note.problem)
                stop_unled(self.sweep, state.id)
            return
        try:
            self.cells.start(state.id, note)
        except NotNow as error:
            self._later(state.id, before, error)
        except OSError as error:
            note.problem = f"it could not be started: {error}"
        self._save()

    def _later(self, cell: str, before: Note, error: NotNow) -> None:
        """As if it had not been tried, so that the next try is the same start."""
        self.notes[cell] = before
        self._say(str(error))

    def _say(self, text: str) -> None:
        """Once."""
        if text != self._said:
            self._said = text
            with contextlib.suppress(OSError):
                print(text, file=sys.stderr, flush=True)

    def _stop(self, state: CellState, kind: str, why: str) -> None:
        note = self.notes[state.id]
        note.stopped_for, note.why = kind, why
        self._save()
        with contextlib.suppress(OSError, ConfigError, ClusterError):
            stop_cell(self.sweep, self.cells, state, note, why)

    def _stop_all(self, why: str) -> Look | None:
        """How the sweep stands then; None where the storage has not said."""
        look, end = None, time.monotonic() + STOP_PATIENCE_S
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                look = self._look()
                for state in look.active:
                    if not state.asked:
                        self._stop(state, INTERRUPT, why)
                if not [state for state in look.active if not self._is_stopped(state)]:
                    return look
                self._end_unled(look)
                if self._tell is not None:
                    self._tell(look, Plan(reason="stopping the cells"))
            time.sleep(min(self._poll_s, 0.5))
        return look

    def _is_stopped(self, state: CellState) -> bool:
        """Whether a cell that nobody leads, and that nobody can be asked to end, has no job left: the disk is full."""
        run = self.sweep.run(state.id)
        if state.led or run.cancel_file.exists() or not run.run_file.is_file():
            return False
        stop_jobs(run)
        return not run.cancel_file.exists()

    def _save(self) -> None:
        with contextlib.suppress(OSError):  # what it says can be read off the run folders, or is asked again
            self.sweep.write_notes(self.notes)

    def _report(self, look: Look, anyway: bool = False) -> None:
        """Once more whenever a cell has ended."""
        ended = tuple((result.id, result.state) for result in look.results if not look.states[result.id].phase.active)
        if ended == self._reported and not anyway:
            return
        self._reported = ended
        self._save()
        if anyway or any(result.measured.steps for result in look.results):
            try:
                write_report(self.sweep, look.results, self.spec)
            except Exception as error:  # the cells are worth more than a picture of them
                self._say(f"the report could not be written: {type(error).__name__}: {error}")

    def _end(self, look: Look | None, kind: Kind, reason: str, left: bool = False) -> None:
        """`left`: the budget is spent, and cells are left."""
        self._save()
        if look is not None:
            self._report(look, anyway=True)
        record = outcome_record(Outcome(kind, reason), 0, time.time())
        with contextlib.suppress(OSError):
            write_json(self.sweep.outcome_file, {**record, "left": left})
