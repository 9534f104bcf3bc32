"""`slipstream watch` and `slipstream supervise`: looking at a run that runs elsewhere, and leading one without a flow."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cluster.decide import Decision, Kind, Observation
from flows.cli.parts import fault_lines, parts_table
from flows.cli.progress import PlainPrinter, render
from flows.cli.snapshot import take_snapshot, wall_time_s
from slipstream.run_folder import RunFolder
from tasks.finish import supervise_to_the_end
from tasks.interrupt import handling
from tasks.lease import StepDown
from tasks.outcome import Outcome, RunCancelled, RunFailed, outcome_of, read_outcome

REFRESH_S = 1.0


def watch(run: RunFolder) -> int:
    """Show the run until it has ended or Ctrl-C; it goes on without us. The exit code is the run's."""
    console = Console()
    if console.is_terminal:
        with Live(_view(run), console=console, auto_refresh=False) as live:
            while (ended := read_outcome(run)) is None:
                live.update(_view(run), refresh=True)
                time.sleep(REFRESH_S)
            live.update(_view(run), refresh=True)
    else:
        printer = PlainPrinter(lambda line: print(line, flush=True), take_snapshot(run).windows)
        while (ended := read_outcome(run)) is None:
            printer.show(take_snapshot(run), wall_time_s(run) or 0)
            time.sleep(REFRESH_S)
    return tell(run, ended)


def _view(run: RunFolder) -> Group:
    faults = [Text("started again", style="dim"), *map(Text, fault_lines(run))] if fault_lines(run, 1) else []
    return Group(render(take_snapshot(run), wall_time_s(run) or 0), Text(), parts_table(run), *faults)


def tell(run: RunFolder, ended: Outcome) -> int:
    """Say how the run ended; the exit code."""
    if ended.kind is Kind.FINISH:
        print(f"{run.run_id} has finished: {ended.reason}")
        return 0
    if ended.kind is Kind.CANCELLED:
        print(RunCancelled(str(run.path), ended.reason), file=sys.stderr)
        return 130
    print(f"error: {RunFailed(str(run.path), ended)}", file=sys.stderr)
    return 1


@contextmanager
def stepping_down() -> Iterator[None]:
    """INT, TERM and HUP end our supervision, not the run."""

    def handle(number: int, _frame: FrameType | None) -> None:
        raise StepDown(signal.Signals(number).name)

    with handling(handle):
        yield


def supervise(run: RunFolder) -> int:
    """Lead the run, or look on until its leader falls silent; the exit code is the run's, 0 after a signal."""
    said = ""

    def show(_seen: Observation, decision: Decision) -> None:
        nonlocal said
        if decision.reason != said:
            said = decision.reason
            print(f"[{time.strftime('%H:%M:%S')}] {said}", flush=True)

    if (ended := read_outcome(run)) is not None:
        return tell(run, ended)
    print(f"supervising {run.path}: Ctrl-C ends the supervision, not the run", flush=True)
    try:
        with stepping_down():
            return tell(run, supervise_to_the_end(run, show))
    except (RunFailed, RunCancelled) as error:
        return tell(run, read_outcome(run) or outcome_of(error))  # a full disk takes no outcome
    except StepDown as signal_name:
        print(f"stepped down ({signal_name}); the run goes on: `slipstream supervise {run.path}` leads it again")
        return 0
