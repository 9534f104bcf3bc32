"""A run's curves as images inside markdown: both of Prefect's interfaces show them, also on the card of an artifact."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.metrics.report import Panel, draw, panels, series

POINTS = 200  # of one curve; more cannot be told apart in an image of this size
FIRST = ("Reward", "Loss and gradient norm", "Throughput", "Staleness")
NOTHING = "Nothing has been recorded yet."


@dataclass(frozen=True)
class Curves:
    """Markdown with images: of what matters most, and of everything else."""

    first: str = NOTHING
    others: str = ""


def draw_curves(windows: Sequence[dict[str, Any]], starts: Sequence[int] = ()) -> Curves:
    """The panels of the report that have anything to show.

    Args:
        starts: steps at which a later attempt began.
    """
    drawn = [(panel, draw(panel, thinned(panel, windows), starts)) for panel in panels(windows)]
    images = [(panel.title, image(panel.title, svg)) for panel, svg in drawn if svg is not None]
    chosen = sorted((one for one in images if one[0] in FIRST), key=lambda one: FIRST.index(one[0]))
    others = [f"### {_heading(title)}\n\n{shown}" for title, shown in images if title not in FIRST]
    return Curves("\n\n".join(shown for _, shown in chosen) or NOTHING, "\n\n".join(others))


def thinned(panel: Panel, windows: Sequence[dict[str, Any]], most: int = POINTS) -> list[dict[str, Any]]:
    """The values of a panel, each curve averaged down to at most `most` points."""
    points: list[dict[str, Any]] = []
    for curve in panel.curves:
        steps, values = series(windows, curve.metric)
        size = max(1, -(-len(steps) // most))
        for i in range(0, len(steps), size):
            part = values[i : i + size]
            points.append({"step": steps[min(i + size, len(steps)) - 1], curve.metric: sum(part) / len(part)})
    return points


def image(title: str, svg: str) -> str:
    """An SVG as a markdown image, on a white ground: its labels are dark, and one interface is dark too."""
    data = base64.b64encode(svg.replace("<svg ", '<svg style="background:#ffffff" ', 1).encode()).decode()
    return f"![{_heading(title)}](data:image/svg+xml;base64,{data})"


def _heading(title: str) -> str:
    """A title may hold the name of a reward function, which is the user's."""
    return "".join(char if char.isalnum() or char in " :.,()-" else "_" for char in title).replace("](", "_")
