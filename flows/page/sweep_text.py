"""What a sweep's page says, and the event of its end; whoever sends it."""

import base64
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flows.events import Due, sweep_finished
from slipstream.sweep.draw import QUANTITIES, title_of
from slipstream.sweep.rank import CellResult
from slipstream.sweep.report import SweepReport, draw_all, markdown
from tasks.sweep_folder import SweepFolder

TABLE, PICTURES = "sweep-table", "sweep-pictures"  # keys of the artifacts


def table_text(sweep: SweepFolder, report: SweepReport) -> str:
    return f"Sweep folder: `{sweep.path}`\n\n{markdown(report)}"


def pictures_text(report: SweepReport) -> str:
    """The pictures as markdown, inside the text: the interface asks nothing of another server."""
    titles = {quantity.name: title_of(quantity, report.ranking) for quantity in QUANTITIES} | {"pareto": "Pareto front"}
    return "\n\n".join(
        f"![{titles[name]}](data:image/png;base64,{base64.b64encode(data).decode()})"
        for name, data in draw_all(report).items()
    )


def finished(sweep: SweepFolder, results: Sequence[CellResult], outcome: Mapping[str, Any]) -> Due:
    """The event of the sweep's end, for automations that notify; sent twice, the server keeps one."""
    states: dict[str, int] = {}
    for result in results:
        states[result.state] = states.get(result.state, 0) + 1
    payload = {"states": states, "report": str(sweep.report_file), **outcome}
    return sweep_finished(sweep.sweep_id, payload, float(outcome.get("time") or time.time()))
