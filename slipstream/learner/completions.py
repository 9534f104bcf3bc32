"""Completions as a table, for the log of a run."""

import re
import sys
from collections.abc import Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 140  # in a file; a terminal has its own
CELL = 600  # characters of a prompt or completion that are shown; the records hold all
# what would move the cursor, ring the bell or colour the rest of the log
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def as_text(messages: Any) -> str:
    """Messages as plain text, each with its role where there are several."""
    if not isinstance(messages, list):
        return str(messages)
    if len(messages) == 1:
        return str(messages[0].get("content", ""))
    return "\n".join(f"{m.get('role', '?')}: {m.get('content', '')}" for m in messages)


def _cell(text: str) -> Text:
    text = text.replace("\r\n", "\n").expandtabs(4)
    if len(text) > CELL:
        half = CELL // 2
        text = f"{text[:half]} … ({len(text) - 2 * half} characters) … {text[-half:]}"
    if not text:
        return Text("(empty)", style="dim italic")
    return Text(_CONTROL.sub(lambda found: repr(found[0])[1:-1], text))


def _number(value: float | None, sign: str = "") -> str:
    if value is None:
        return "unscored"
    return f"{value:{sign}.3f}" if abs(value) < 10_000 else f"{value:{sign}.3g}"


def completions_table(rows: Sequence[dict[str, Any]], step: int) -> Table:
    """A table of prompt, completion, reward and advantage; a prompt that is the same as above is not repeated."""
    table = Table(title=f"completions at step {step}", show_lines=True, expand=True)
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("completion", ratio=3, overflow="fold")
    table.add_column("reward", justify="right", no_wrap=True)
    table.add_column("advantage", justify="right", no_wrap=True)
    above = None
    for row in rows:
        prompt, completion = as_text(row["prompt"]), _cell(as_text(row["completion"]))
        shown = _cell("″" if prompt == above else prompt)
        table.add_row(shown, completion, _number(row["reward"]), _number(row["advantage"], "+"))
        above = prompt
    return table


def print_completions(
    rows: Sequence[dict[str, Any]], step: int, limit: int | None, file: IO[str] | None = None
) -> None:
    """Print the newest `limit` rows (None: all), as wide as the terminal is."""
    shown = rows if limit is None else rows[-limit:]
    if shown:
        console = Console(file=file or sys.stdout)
        if not console.is_terminal:
            console = Console(file=file or sys.stdout, width=WIDTH)
        console.print(completions_table(shown, step))
