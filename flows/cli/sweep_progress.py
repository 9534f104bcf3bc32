"""A sweep driven in the foreground: a table of its cells on a terminal, a line per change elsewhere."""

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flows.cli.plain import say
from flows.cli.progress import clock
from slipstream.sweep.expand import shown
from slipstream.sweep.rank import CellResult
from slipstream.sweep.schedule import Phase, Plan
from slipstream.sweep.spec import SweepConfig
from tasks.interrupt import stopping
from tasks.sweep import Look, SweepStopped, Watcher, drive
from tasks.sweep_cells import Cells
from tasks.sweep_folder import SweepFolder

STYLES = {"finished": "green", "failed": "red", "running": "cyan", "starting": "cyan"}


def drive_shown(
    sweep: SweepFolder, cells: Cells, retry_failed: bool, by_person: bool = True, spec: SweepConfig | None = None
) -> int:
    """Drive the sweep and show it; 0 where every cell has finished or was stopped early, 130 after Ctrl-C, else 1."""
    shown = spec or sweep.spec()
    say(f"sweep folder: {sweep.path}")
    try:
        with stopping("the cells"), _showing(shown) as tell:
            look = drive(sweep, cells, retry_failed, tell, by_person=by_person, spec=spec)
    except (KeyboardInterrupt, SweepStopped) as error:
        reason = f": {error}" if isinstance(error, SweepStopped) else ""
        say(f"stopped{reason}; go on with: slipstream sweep {sweep.path}", err=True)
        return 130
    return _told(sweep, look)


@contextlib.contextmanager
def _showing(spec: SweepConfig) -> Iterator[Watcher]:
    console = Console()
    begun = time.monotonic()
    if not console.is_terminal:
        printer = PlainCells(spec)
        yield lambda look, plan: printer.show(look, plan, time.monotonic() - begun)
        return
    with Live(console=console, auto_refresh=False) as live:

        def show(look: Look, plan: Plan) -> None:
            live.update(render(spec, look, plan, time.monotonic() - begun), refresh=True)

        yield show


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def numbers_of(result: CellResult, metric: str) -> list[str]:
    """Step, newest value of the metric (or of the training reward), tokens/s and staleness."""
    measured = result.measured
    points = measured.curves.get(metric) or measured.curves.get("reward") or ()
    return [
        str(measured.steps),
        _number(points[-1].value if points else None, "{:.3f}"),
        _number(measured.tokens_per_s, "{:,.0f}"),
        _number(measured.staleness, "{:.2f}"),
    ]


def render(spec: SweepConfig, look: Look, plan: Plan, elapsed_s: float) -> Group:
    """The table of one moment."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in (
        "cell",
        *(key.rpartition(".")[2] for key in spec.keys),
        "state",
        "step",
        "reward",
        "tokens/s",
        "staleness",
    ):
        table.add_column(title)
    for result in look.results:
        values = [shown(result.values.get(key, "")) for key in spec.keys]
        cells = [result.id, *values, result.state, *numbers_of(result, spec.metric)]
        table.add_row(*cells, style=STYLES.get(result.state, ""))
    return Group(Text(f"{clock(elapsed_s)}  {plan.reason}", style="bold"), table)


class PlainCells:
    """Prints each cell whenever its state has changed."""

    def __init__(self, spec: SweepConfig) -> None:
        self._spec = spec
        self._said: dict[str, str] = {}
        self._reason = ""

    def show(self, look: Look, plan: Plan, elapsed_s: float) -> None:
        for cell, result in zip(look.cells, look.results, strict=True):
            if self._said.get(result.id, str(Phase.WAITING)) == result.state:
                continue
            self._said[result.id] = result.state
            step, reward, rate, staleness = numbers_of(result, self._spec.metric)
            numbers = f": step {step}, reward {reward}, {rate} tokens/s, staleness {staleness}" if step != "0" else ""
            why = f" – {result.reason.splitlines()[0]}" if result.reason else ""
            print(f"[{clock(elapsed_s)}] {result.id} ({cell}) {result.state}{numbers}{why}", flush=True)
        if plan.reason != self._reason:
            self._reason = plan.reason
            print(f"[{clock(elapsed_s)}] {plan.reason}", flush=True)


def _told(sweep: SweepFolder, look: Look) -> int:
    """Say how the sweep ended; the exit code."""
    outcome = sweep.outcome()
    say(f"{sweep.sweep_id}: {outcome.get('reason', '')}")
    left = [result for result in look.results if result.state not in ("finished", "stopped early")]
    for result in left:
        why = f": {result.reason}" if result.reason else ""
        say(f"  {result.id} {result.state}{why}", err=True)
    if (sweep.path / "best.toml").is_file():
        say(f"  best cell  {sweep.path / 'best.toml'}")
    say(f"  report     {sweep.report_file}")
    if outcome.get("left"):
        say(f"go on with a larger gpu_hours in the sweep's file, or in {sweep.sweep_file}", err=True)
    elif left:
        say(f"try them again: slipstream sweep {sweep.path} --retry-failed", err=True)
    return 1 if left else 0
