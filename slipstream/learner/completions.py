"""Completions as a table, for the log of a run."""

import sys
from collections.abc import Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 140
CELL = 600  # characters of a prompt or completion that are shown; the records hold all


def as_text(messages: Any) -> str:
    """Messages as plain text, each with its role where there are several."""
    if not isinstance(messages, list):
        return str(messages)
    if len(messages) == 1:
        return str(messages[0].get("content", ""))
    return "\n".join(f"{m.get('role', '?')}: {m.get('content', '')}" for m in messages)


def _cell(text: str) -> Text:
    return Text(text if len(text) <= CELL else text[: CELL // 2] + " … " + text[-CELL // 2 :])


def completions_table(rows: Sequence[dict[str, Any]], step: int) -> Table:
    """A table of prompt, completion, reward and advantage; a prompt that is the same as above is not repeated."""
    table = Table(title=f"completions at step {step}", show_lines=True, expand=True)
    table.add_column("prompt", ratio=2)
    table.add_column("completion", ratio=3)
    table.add_column("reward", justify="right", width=9)
    table.add_column("advantage", justify="right", width=9)
    above = None
    for row in rows:
        prompt = as_text(row["prompt"])
        reward = "unscored" if row["reward"] is None else f"{row['reward']:.3f}"
        table.add_row(
            _cell("″" if prompt == above else prompt),
            _cell(as_text(row["completion"])),
            reward,
            f"{row['advantage']:+.3f}",
        )
        above = prompt
    return table


def print_completions(
    rows: Sequence[dict[str, Any]], step: int, limit: int | None, file: IO[str] | None = None
) -> None:
    """Print the newest `limit` rows (None: all)."""
    shown = rows if limit is None else rows[-limit:]
    if shown:
        Console(file=file or sys.stdout, width=WIDTH).print(completions_table(shown, step))
