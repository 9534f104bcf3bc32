"""Live progress: a display on a terminal, a line per logging window elsewhere. Reads the run folder only."""

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flows.cli.snapshot import (
    HELD_OUT,
    HELD_OUT_OF_ONE,
    OF_ONE,
    REWARD,
    Snapshot,
    history,
    take_snapshot,
)
from slipstream.metrics.report import reward_functions
from slipstream.run_folder import RunFolder

TICKS = "▁▂▃▄▅▆▇█"
REFRESH_S = 0.5
History = list[tuple[int, float]]

# label, metric, format; what is shown beside the reward
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("staleness", "sample/staleness_mean", "{:.2f}"),
    ("generated tok/s", "rollout/generated_tokens_per_s", "{:,.0f}"),
    ("trained tok/s", "perf/wall_clock_trained_tokens_per_s", "{:,.0f}"),
    ("queue", "rollout/queue_size", "{:.0f}"),
)


def sparkline(values: list[float], width: int = 40) -> str:
    """The last values as a row of bars, averaged down to `width`."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    span = high - low
    return "".join(TICKS[int((value - low) / span * (len(TICKS) - 1))] if span else TICKS[0] for value in means)


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _value(metrics: dict[str, Any], name: str, form: str) -> str:
    value = metrics.get(name)
    return form.format(value) if isinstance(value, int | float) else "–"


def window_line(window: dict[str, Any], max_steps: int, elapsed_s: float) -> str:
    """One logging window as a plain line."""
    step = int(window.get("step", 0))
    parts = [f"[{clock(elapsed_s)}] step {step}" + (f"/{max_steps}" if max_steps else "")]
    for label, name in (("reward", REWARD), ("held-out reward", HELD_OUT)):
        if name in window:
            parts.append(f"{label} {_value(window, name, '{:.3f}')}")
    for function in reward_functions([window]):
        name = OF_ONE if OF_ONE.format(function) in window else HELD_OUT_OF_ONE
        parts.append(f"{function} {_value(window, name.format(function), '{:.3f}')}")
    parts += [f"{label} {_value(window, name, form)}" for label, name, form in COLUMNS if name in window]
    parts += [str(window[name]).split(":")[0] for name in ("verdict",) if name in window]
    return "  ".join(parts)


def phase_text(snapshot: Snapshot) -> str:
    """What is going on, in words: both parts while they load."""
    if snapshot.phase in ("the server is starting", "the learner is starting", "starting"):
        return f"server: {snapshot.server or 'starting'} · learner: {snapshot.learner or 'starting'}"
    if snapshot.phase == "training" and snapshot.learner:
        return snapshot.learner
    return snapshot.phase


def _add_reward(table: Table, label: str, training: History, held_out: History) -> None:
    rewards = [value for _, value in training]
    recent = f"{rewards[-1]:.3f}" if rewards else "–"
    change = f"held out {held_out[0][1]:.3f}" if held_out else ""
    change += f" → {held_out[-1][1]:.3f}" if len(held_out) > 1 else ""
    table.add_row(
        label, Text(recent, style="bold green"), Text(sparkline(rewards), style="green"), Text(change, style="bold")
    )


def render(snapshot: Snapshot, elapsed_s: float) -> RenderableType:
    """The display of one moment."""
    head = Text.assemble(
        (snapshot.run_id, "bold"),
        f"  attempt {snapshot.attempt}" if snapshot.attempt > 1 else "",
        f"  {clock(elapsed_s)}  ",
        (phase_text(snapshot), "cyan"),
    )
    bar = Table.grid(padding=(0, 1))
    total = snapshot.max_steps or None
    bar.add_row(
        "step",
        Text(f"{snapshot.step}" + (f"/{total}" if total else ""), style="bold"),
        ProgressBar(total=total or 1, completed=snapshot.step if total else 0, width=40),
    )
    table = Table.grid(padding=(0, 2))
    _add_reward(table, "reward", snapshot.rewards, snapshot.held_out)
    for function in snapshot.functions:
        training = history(snapshot.windows, OF_ONE.format(function))
        _add_reward(table, f"  {function}", training, history(snapshot.windows, HELD_OUT_OF_ONE.format(function)))
    rest = "   ".join(f"{label} {_value(snapshot.metrics, name, form)}" for label, name, form in COLUMNS)
    words = [snapshot.words[name] for name in ("verdict", "saturation") if name in snapshot.words]
    return Group(head, bar, table, Text(rest), *(Text(text, style="dim") for text in words))


class PlainPrinter:
    """Prints each phase and each new logging window once; those of `known` are not new.

    Counted by attempt: a resume makes windows void, which must not hide those that come after.
    """

    def __init__(self, write: Callable[[str], None], known: Sequence[dict[str, Any]] = ()) -> None:
        self._write = write
        self._phase = ""
        self._printed = Counter(int(window.get("attempt", 0)) for window in known)

    def show(self, snapshot: Snapshot, elapsed_s: float) -> None:
        met: Counter[int] = Counter()
        for window in snapshot.windows:
            attempt = int(window.get("attempt", 0))
            met[attempt] += 1
            if met[attempt] > self._printed[attempt]:
                self._write(window_line(window, snapshot.max_steps, elapsed_s))
        self._printed |= met
        phase = phase_text(snapshot)
        # once training, the phases of each step would drown the windows
        if phase not in (self._phase, "ended") and not (self._printed and phase == snapshot.learner):
            self._phase = phase
            self._write(f"[{clock(elapsed_s)}] {phase}")


@contextlib.contextmanager
def progress(run: RunFolder, console: Console | None = None) -> Iterator[None]:
    """Show the run's progress from a thread while the body runs."""
    console = console or Console()
    started = time.monotonic()
    done = threading.Event()

    def elapsed() -> float:
        return time.monotonic() - started

    if console.is_terminal:
        live = Live(render(take_snapshot(run), 0), console=console, auto_refresh=False)

        def show() -> None:
            live.update(render(take_snapshot(run), elapsed()), refresh=True)

        context: contextlib.AbstractContextManager[Any] = live
    else:
        printer = PlainPrinter(lambda line: print(line, flush=True), take_snapshot(run).windows)

        def show() -> None:
            printer.show(take_snapshot(run), elapsed())

        context = contextlib.nullcontext()

    def loop() -> None:
        while not done.wait(REFRESH_S):
            try:
                show()
            except (OSError, ValueError) as error:  # a display must not end a run
                print(f"progress: {error}", file=sys.stderr)

    with context:
        thread = threading.Thread(target=loop, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(5)
            with contextlib.suppress(OSError, ValueError):
                show()
