"""The parts of a run: who beats, where, and what it does. Read from the run folder alone."""

import time
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from slipstream.run_folder import RunFolder
from tasks.observe import OVER, heartbeat, newest_attempt
from tasks.records import read_faults


@dataclass(frozen=True)
class Part:
    """One heartbeat. `age_s`: since it was written, by the clocks of its host and this one."""

    writer: str
    host: str
    attempt: int
    phase: str
    step: int | None
    age_s: float
    counts: bool

    @property
    def age(self) -> str:
        return "ended" if self.phase in OVER else f"{max(0.0, self.age_s):.0f} s ago"


def parts(run: RunFolder, now: float | None = None) -> list[Part]:
    """All heartbeats of a run, those that count first."""
    assignment = run.assignment()
    named = {value for key, value in assignment.items() if key != "attempt"}
    newest = newest_attempt(run)
    found = []
    for path in sorted((run.path / "heartbeats").glob("*.json")):
        beat: dict[str, Any] = heartbeat(run, path.stem)
        if not beat:
            continue
        step = beat.get("step")
        found.append(
            Part(
                writer=path.stem,
                host=str(beat.get("host", "")),
                attempt=int(beat.get("attempt") or 0),
                phase=str(beat.get("phase", "")),
                step=None if step is None else int(step),
                age_s=(time.time() if now is None else now) - float(beat.get("time", 0)),
                counts=beat.get("incarnation") in named
                or path.stem == "supervisor"
                or (not named and beat.get("attempt") == newest),
            )
        )
    return sorted(found, key=lambda part: (not part.counts, part.writer))


def parts_table(run: RunFolder) -> Table:
    """The parts that count, as a table for the terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("part", "host", "beat", "step", "phase"):
        table.add_column(title)
    for part in parts(run):
        if part.counts:
            style = "red" if part.phase not in OVER and part.age_s > 30 else ""
            step = "" if part.step is None else str(part.step)
            table.add_row(part.writer, part.host, part.age, step, part.phase, style=style)
    return table


def parts_lines(run: RunFolder) -> list[str]:
    """The same as plain lines."""
    return [
        f"  {part.writer:<12} {part.host:<16} {part.age:<10} {'' if part.step is None else f'step {part.step}':<10} {part.phase}"
        for part in parts(run)
        if part.counts
    ]


def fault_lines(run: RunFolder, most: int = 5) -> list[str]:
    """What was started again and why, newest last."""
    faults = read_faults(run)
    lines = []
    for fault in faults[-most:]:
        when = time.strftime("%m-%d %H:%M:%S", time.localtime(fault.time))
        lines.append(f"  {when}  attempt {fault.attempt}, step {fault.step}: {fault.reason}")
    more = len(faults) - len(lines)
    return [f"  ({more} earlier)", *lines] if more > 0 else lines
