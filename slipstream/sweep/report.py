"""The report of a sweep: one HTML file with its pictures inside, the pictures beside it, and the best cell's file."""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.metrics.report import STYLE
from slipstream.run_folder import write_atomic
from slipstream.sweep.draw import QUANTITIES, pareto_picture, picture, title_of
from slipstream.sweep.expand import shown
from slipstream.sweep.rank import Ranking, Row

MORE_STYLE = """
.panel img { width: 100%; max-width: 720px; height: auto; display: block; margin: 0 auto; }
.scroll { overflow-x: auto; } .fact b { white-space: normal; } td.n, th.n { text-align: right; white-space: nowrap; }
tr.best td { background: #eff6ff; font-weight: 600; }
"""


@dataclass(frozen=True)
class SweepReport:
    """What a report shows.

    Attributes:
        keys: configuration keys that the cells differ in, the axes of the pictures first.
        state: how the sweep stands, in words.
        facts: more numbers by name, as they are shown.
    """

    sweep_id: str
    base: str
    keys: Sequence[str]
    ranking: Ranking
    state: str
    facts: Mapping[str, str]


def write_sweep_report(folder: Path, report: SweepReport, best: str | None) -> Path:
    """Write report.html, its pictures as .png files and, where there is a best cell, best.toml; the report's path.

    Args:
        best: text of the best cell's configuration.
    """
    pictures = draw_all(report)
    for name, data in pictures.items():
        write_atomic(folder / f"{name}.png", data)
    if best is not None:
        write_atomic(folder / "best.toml", best)
    path = folder / "report.html"
    write_atomic(path, page(report, pictures))
    return path


def draw_all(report: SweepReport) -> dict[str, bytes]:
    """The pictures by name: time_to_reward, tokens_per_s, staleness, reward and pareto. Nothing where all is missing."""
    found = {
        quantity.name: picture(quantity, report.ranking, report.keys)
        for quantity in QUANTITIES
        if any(quantity.of(row) is not None for row in report.ranking.rows)
    }
    if (pareto := pareto_picture(report.ranking)) is not None:
        found["pareto"] = pareto
    return found


def notes_of(report: SweepReport) -> list[str]:
    """What a reader must know about the numbers."""
    notes = list(report.ranking.notes)
    if len(report.keys) > 2:
        notes.append(
            f"The pictures are over {' and '.join(report.keys[:2])}, averaged over {', '.join(report.keys[2:])}."
        )
    notes.append(
        "Time to reward: seconds of training until the metric first was at the target; start-up, time between attempts "
        "and repeated steps are left out. Trained tokens per second: trained tokens by step time, waiting included. "
        "Staleness: weight updates between the oldest trained token of a sample and its step, on average."
    )
    return notes


COLUMNS = ("cell", "state", "steps", "final reward", "time to reward", "tokens/s", "staleness", "minutes", "GPU h")


def cells_of(row: Row, keys: Sequence[str], ranking: Ranking) -> list[str]:
    """A row of the table as text: the cell, its values, its numbers."""

    def number(value: float | None, form: str) -> str:
        return "–" if value is None else form.format(value)

    missed = row.time_to_reward is None and row.reward is not None and ranking.target is not None
    time_to = "not reached" if missed else number(row.time_to_reward, "{:.1f} s")
    return [
        row.id + (" ★" if row.id == ranking.best else "") + (" ◆" if row.on_front else ""),
        *(shown(row.values.get(key, "")) for key in keys),
        row.state,
        str(row.steps),
        number(row.reward, "{:.3f}"),
        time_to,
        number(row.tokens_per_s, "{:,.0f}"),
        number(row.staleness, "{:.2f}"),
        number(None if row.seconds is None else row.seconds / 60, "{:.1f}"),
        number(row.gpu_hours, "{:.2f}"),
    ]


def said(row: Row, keys: Sequence[str]) -> str:
    """What a cell sets, in words."""
    return ", ".join(f"{n} {shown(row.values.get(k, ''))}" for k, n in zip(keys, short_names(keys), strict=True))


def table_of(report: SweepReport) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table. ★: the best cell; ◆: on the Pareto front."""
    head = [COLUMNS[0], *short_names(report.keys), *COLUMNS[1:]]
    return head, [cells_of(row, report.keys, report.ranking) for row in report.ranking.rows]


def short_names(keys: Sequence[str]) -> list[str]:
    """Keys without their section, where that names one of them."""
    last = [key.rpartition(".")[2] for key in keys]
    return [name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)]


def markdown(report: SweepReport) -> str:
    """The table and the notes as markdown."""
    head, rows = table_of(report)

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    lines = [f"**{report.state}**", "", line(head), line(["---"] * len(head)), *map(line, rows), ""]
    lines += ["★ the best cell · ◆ on the Pareto front of final reward and trained tokens per second", ""]
    lines += [f"- {note}" for note in notes_of(report)]
    lines += [f"- {row.id} {row.state}: {_first_line(row.reason)}" for row in report.ranking.rows if row.reason]
    return "\n".join(lines) + "\n"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def page(report: SweepReport, pictures: Mapping[str, bytes]) -> str:
    """The report as HTML that asks nothing of the network."""
    ranking = report.ranking
    best = next((row for row in ranking.rows if row.id == ranking.best), None)
    facts = {
        "best cell": "–" if best is None else f"{best.id}: {said(best, report.keys)}",
        f"its final {ranking.metric}": "–" if best is None or best.reward is None else f"{best.reward:.3f}",
        **report.facts,
    }
    head, rows = table_of(report)
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{_text(report.sweep_id)}</title><style>{STYLE}{MORE_STYLE}</style></head><body><main>",
        f"<h1>{_text(report.sweep_id)}</h1>",
        f'<div class="sub">{_text(report.base)} · {_text(report.state)}</div>',
        '<div class="facts">',
        *(f'<div class="fact"><b>{_text(value)}</b><span>{_text(name)}</span></div>' for name, value in facts.items()),
        "</div>",
        "<h2>Cells</h2>",
        '<div class="scroll"><table>',
        "<tr>" + "".join(f'<th class="n">{_text(cell)}</th>' for cell in head) + "</tr>",
    ]
    for row, cells in zip(ranking.rows, rows, strict=True):
        style = ' class="best"' if row.id == ranking.best else ""
        lines.append(f"<tr{style}>" + "".join(f'<td class="n">{_text(cell)}</td>' for cell in cells) + "</tr>")
    lines += ["</table></div>", '<p class="sub">★ the best cell (best.toml) · ◆ on the Pareto front</p>']
    lines += ["<h2>Pictures</h2>", '<div class="panels">', *_panels(report, pictures), "</div>"]
    lines += ["<h2>How to read this</h2>", "<ul>", *(f"<li>{_text(note)}</li>" for note in notes_of(report)), "</ul>"]
    if reasons := [row for row in ranking.rows if row.reason]:
        lines += ["<h2>Cells that did not finish</h2>"]
        for row in reasons:
            lines += [f"<p><b>{_text(row.id)}</b> {_text(row.state)}</p>", f"<pre>{_text(row.reason)}</pre>"]
    return "\n".join([*lines, "</main></body></html>"])


def _panels(report: SweepReport, pictures: Mapping[str, bytes]) -> list[str]:
    titles = {quantity.name: title_of(quantity, report.ranking) for quantity in QUANTITIES}
    lines = [
        f'<div class="panel"><img alt="{_text(titles.get(name, "Pareto front"))}" '
        f'src="data:image/png;base64,{base64.b64encode(data).decode()}"></div>'
        for name, data in pictures.items()
    ]
    nothing = [title for name, title in titles.items() if name not in pictures]
    lines += [
        f'<div class="panel"><b>{_text(title)}</b><p class="none">Nothing measured.</p></div>' for title in nothing
    ]
    return lines


def _text(value: object) -> str:
    return html.escape(str(value))
