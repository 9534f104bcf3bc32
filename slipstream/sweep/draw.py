"""Pictures of a sweep: heat maps over its first two axes, lines over one, points where values lie scattered; PNG bytes.

What is missing is drawn as missing: a hatched field, or a cross, with a word that says why.
"""

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.sweep.expand import shown
from slipstream.sweep.rank import FINISHED, Ranking, Row
from slipstream.sweep.spec import same

MOST_TICKS = 12  # values of an axis that are still drawn as fields
MOST_LETTERS, MOST_OF_A_TITLE, MOST_DIGITS = 32, 100, 12
ROOM = 12  # letters beneath a field
INK, PALE, GRID, BLUE, ORANGE = "#111827", "#9ca3af", "#e5e7eb", "#2563eb", "#ea580c"


@dataclass(frozen=True)
class Quantity:
    """One number of a cell. `better`: "low", "high" or ""."""

    name: str
    title: str
    unit: str
    form: str
    of: Callable[[Row], float | None]
    better: str = ""

    def text(self, value: float) -> str:
        """A number of it as it is drawn."""
        text = self.form.format(value)
        return text if len(text) <= MOST_DIGITS else f"{value:.3g}"


QUANTITIES = (
    Quantity("time_to_reward", "Time to reward", "s", "{:.0f}", lambda row: row.time_to_reward, "low"),
    Quantity("tokens_per_s", "Trained tokens per second", "tokens/s", "{:,.0f}", lambda row: row.tokens_per_s, "high"),
    Quantity("staleness", "Staleness", "weight updates", "{:.2f}", lambda row: row.staleness),
    Quantity("reward", "Final reward", "reward", "{:.3f}", lambda row: row.reward, "high"),
)


def title_of(quantity: Quantity, ranking: Ranking) -> str:
    """The title with what it is measured by."""
    if quantity.name == "time_to_reward":
        target = "–" if ranking.target is None else f"{ranking.target:.3g}"
        return f"{quantity.title}: seconds until {ranking.metric} is {target}"
    return f"{quantity.title}: {ranking.metric}" if quantity.name == "reward" else quantity.title


def word_for_missing(quantity: Quantity, row: Row, metric: str) -> str:
    """Why a cell has no number."""
    if quantity.name == "time_to_reward" and row.state == FINISHED and row.reward is not None:
        return "not reached"
    return "no value" if row.state == FINISHED else row.state


def distinct(rows: Sequence[Row], key: str) -> list[Any]:
    """The values of an axis, numbers in order and before all else; others as they come by cell."""
    found: list[Any] = []
    for row in sorted(rows, key=lambda row: row.id):
        value = row.values.get(key, "")
        if not any(same(value, other) for other in found):
            found.append(value)
    numbers = sorted(value for value in found if isinstance(value, int | float) and not isinstance(value, bool))
    return numbers + [value for value in found if isinstance(value, bool) or not isinstance(value, int | float)]


def _index(values: Sequence[Any], value: Any) -> int:
    return next(index for index, other in enumerate(values) if same(other, value))


def picture(quantity: Quantity, ranking: Ranking, keys: Sequence[str]) -> bytes:
    """The picture of one number over the first axes. `keys`: those in which cells differ."""
    rows = ranking.rows
    if len(keys) < 2:
        return _lines(quantity, ranking, keys[0] if keys else "")
    across, down = distinct(rows, keys[0]), distinct(rows, keys[1])
    if len(across) > MOST_TICKS or len(down) > MOST_TICKS:
        return _points(quantity, ranking, keys)
    return _fields(quantity, ranking, keys, across, down)


def written(text: str, most: int = MOST_LETTERS) -> str:
    """A text of the user's as it is drawn: its end where it is long, and never read as a formula."""
    plain = "".join(letter if letter.isprintable() else "·" for letter in text)
    return (plain if len(plain) <= most else f"…{plain[1 - most :]}").replace("$", r"\$")


def _labels(values: Sequence[Any]) -> list[str]:
    return [written(shown(value)) for value in values]


def _label_across(axis: Any, places: Sequence[int], values: Sequence[Any]) -> None:
    """Long ones aslant, so that they do not lie on each other."""
    labels = _labels(values)
    slant = {"rotation": 20, "ha": "right"} if any(len(label) > ROOM for label in labels) else {}
    axis.set_xticks(places, labels, **slant)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=150, facecolor="white")
    axis = figure.add_subplot()
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("#d1d5db")
    axis.tick_params(colors="#4b5563", labelsize=9)
    return figure, axis


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # drawn as a box; the table has it
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _heading(axis: Any, text: str) -> None:
    axis.set_title(written(text, MOST_OF_A_TITLE), fontsize=10.5, color=INK, loc="left", pad=10)


def _colours(quantity: Quantity, numbers: Sequence[float]) -> tuple[Any, Any]:
    """A scale from pale to dark: dark is better, or more."""
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    low, high = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
    scale = Normalize(low, high if high > low else low + 1.0)
    return colormaps["Blues_r" if quantity.better == "low" else "Blues"], scale


def _fields(
    quantity: Quantity, ranking: Ranking, keys: Sequence[str], across: Sequence[Any], down: Sequence[Any]
) -> bytes:
    from matplotlib.patches import Rectangle

    figure, axis = _figure(max(4.2, 1.15 * len(across) + 2.2), max(2.6, 0.75 * len(down) + 1.5))
    groups: dict[tuple[int, int], list[Row]] = {}
    for row in ranking.rows:
        place = (_index(across, row.values.get(keys[0], "")), _index(down, row.values.get(keys[1], "")))
        groups.setdefault(place, []).append(row)
    means: dict[tuple[int, int], float] = {}
    for place, rows in groups.items():
        values = [value for row in rows if (value := quantity.of(row)) is not None]
        if values:
            means[place] = sum(values) / len(values)
    colours, scale = _colours(quantity, list(means.values()))
    for (x, y), rows in groups.items():
        mean = means.get((x, y))
        if mean is None:
            look: dict[str, Any] = {"facecolor": "#f9fafb", "edgecolor": PALE, "hatch": "////", "linewidth": 0}
            axis.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, **look))
            words = sorted({word_for_missing(quantity, row, ranking.metric) for row in rows})
            small = {"fontsize": 8, "color": INK, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.5}}
            axis.text(x, y, "\n".join(words), ha="center", va="center", **small)
            continue
        shade = 0.1 + 0.75 * float(scale(mean))
        axis.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, facecolor=colours(shade), linewidth=0))
        red, green, blue, _ = colours(shade)
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
        measured = sum(quantity.of(row) is not None for row in rows)
        part = f"\n({measured} of {len(rows)})" if measured < len(rows) else ""
        text = quantity.text(mean) + part
        axis.text(x, y, text, ha="center", va="center", fontsize=10, color="white" if dark else INK)
    axis.set_xlim(-0.5, len(across) - 0.5)
    axis.set_ylim(-0.5, len(down) - 0.5)
    _label_across(axis, range(len(across)), across)
    axis.set_yticks(range(len(down)), _labels(down))
    axis.tick_params(length=0)
    axis.spines[["left", "bottom"]].set_visible(False)
    axis.set_xlabel(written(keys[0]), fontsize=9, color="#4b5563")
    axis.set_ylabel(written(keys[1]), fontsize=9, color="#4b5563")
    _heading(axis, f"{title_of(quantity, ranking)} [{quantity.unit}]")
    return _png(figure)


def _lines(quantity: Quantity, ranking: Ranking, key: str) -> bytes:
    figure, axis = _figure(5.4, 3.2)
    values = distinct(ranking.rows, key)
    drawn: list[tuple[int, float]] = []
    for row in sorted(ranking.rows, key=lambda row: _index(values, row.values.get(key, ""))):
        x = _index(values, row.values.get(key, ""))
        if (y := quantity.of(row)) is None:
            word = word_for_missing(quantity, row, ranking.metric)
            axis.text(x, 0.04, f"× {word}", transform=axis.get_xaxis_transform(), ha="center", fontsize=8, color=ORANGE)
        else:
            drawn.append((x, y))
    axis.plot([x for x, _ in drawn], [y for _, y in drawn], color=BLUE, marker="o", linewidth=1.5, markersize=5)
    for x, y in drawn:
        offset = {"textcoords": "offset points", "xytext": (0, 7)}
        axis.annotate(quantity.text(y), (x, y), ha="center", fontsize=8, color=INK, **offset)
    axis.margins(x=0.08, y=0.2)
    if drawn and min(y for _, y in drawn) >= 0:
        axis.set_ylim(bottom=0)
    every = -(-len(values) // MOST_TICKS)
    _label_across(axis, range(0, len(values), every), values[::every])
    axis.set_xlabel(written(key), fontsize=9, color="#4b5563")
    axis.set_ylabel(quantity.unit, fontsize=9, color="#4b5563")
    axis.grid(axis="y", color=GRID)
    _heading(axis, title_of(quantity, ranking))
    return _png(figure)


def _points(quantity: Quantity, ranking: Ranking, keys: Sequence[str]) -> bytes:
    """Each cell as a point at its values, coloured by the number; a cross where it has none."""
    figure, axis = _figure(5.8, 3.8)
    places = [_positions(ranking.rows, key) for key in keys[:2]]
    with_number = [(row, value) for row in ranking.rows if (value := quantity.of(row)) is not None]
    colours, scale = _colours(quantity, [value for _, value in with_number])
    for row in ranking.rows:
        x, y = places[0][row.id], places[1][row.id]
        value = quantity.of(row)
        if value is None:
            axis.plot(x, y, marker="x", color=ORANGE, markersize=7)
        else:
            look = {"markersize": 11, "markeredgecolor": PALE, "color": colours(0.1 + 0.75 * float(scale(value)))}
            axis.plot(x, y, marker="o", linestyle="none", **look)
        word = word_for_missing(quantity, row, ranking.metric) if value is None else quantity.text(value)
        offset = {"textcoords": "offset points", "xytext": (0, 8)}
        axis.annotate(word, (x, y), ha="center", fontsize=7, color=INK, **offset)
    for key, set_scale, label in zip(
        keys, (axis.set_xscale, axis.set_yscale), (axis.set_xlabel, axis.set_ylabel), strict=False
    ):
        given = [row.values.get(key) for row in ranking.rows]
        numbers = [value for value in given if isinstance(value, int | float)]
        if len(numbers) == len(given) and min(numbers) > 0 and max(numbers) >= 20 * min(numbers):
            set_scale("log")
        label(written(key), fontsize=9, color="#4b5563")
    axis.margins(0.12, 0.18)
    _heading(axis, f"{title_of(quantity, ranking)} [{quantity.unit}]")
    return _png(figure)


def _positions(rows: Sequence[Row], key: str) -> dict[str, float]:
    values = {row.id: row.values.get(key, "") for row in rows}
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values()):
        return {cell: float(value) for cell, value in values.items()}
    order = distinct(rows, key)
    return {cell: float(_index(order, value)) for cell, value in values.items()}


def pareto_picture(ranking: Ranking) -> bytes | None:
    """Final reward against trained tokens per second, the front joined; None where no cell has both."""
    drawn = [
        (row, row.tokens_per_s, row.reward)
        for row in ranking.rows
        if row.tokens_per_s is not None and row.reward is not None
    ]
    if not drawn:
        return None
    figure, axis = _figure(6.2, 4.0)
    joined = sorted((x, y) for row, x, y in drawn if row.on_front)
    axis.plot([x for x, _ in joined], [y for _, y in joined], color=BLUE, linewidth=1.2, zorder=1)
    for row, x, y in drawn:
        ended = row.state == FINISHED
        colour = BLUE if row.on_front else PALE
        look = {"marker": "o", "markersize": 7, "color": colour, "markerfacecolor": colour if ended else "white"}
        axis.plot(x, y, linestyle="none", **look)
        text = row.id if ended else f"{row.id} ({row.state})"
        offset = {"textcoords": "offset points", "xytext": (6, 5)}
        axis.annotate(text, (x, y), fontsize=8, color=INK if row.on_front else "#4b5563", **offset)
    axis.margins(0.12)
    axis.grid(color=GRID)
    axis.set_axisbelow(True)
    axis.set_xlabel("trained tokens/s", fontsize=9, color="#4b5563")
    axis.set_ylabel(written(f"final {ranking.metric}"), fontsize=9, color="#4b5563")
    _heading(axis, "Pareto front: no other finished cell is better in one and as good in the other")
    return _png(figure)
