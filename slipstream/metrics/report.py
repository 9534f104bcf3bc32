"""The report of a run: one HTML file with its curves, settings and events, which asks nothing of the network."""

import html
import io
import re
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.run_folder import RunFolder, is_number, read_jsonl, read_object, write_atomic

BLUE, ORANGE, GREEN, GREY = "#2563eb", "#ea580c", "#059669", "#9ca3af"


@dataclass(frozen=True)
class Curve:
    metric: str
    label: str
    color: str = BLUE
    marked: bool = False  # few points: draw them
    right: bool = False  # on an axis of its own, at the right


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    curves: tuple[Curve, ...]
    right_unit: str = ""
    from_zero: bool = False


PANELS: tuple[Panel, ...] = (
    Panel(
        "Reward", "mean reward", (Curve("reward", "training"), Curve("eval/reward", "held out", ORANGE, marked=True))
    ),
    Panel(
        "Loss and gradient norm",
        "loss",
        (Curve("loss", "loss"), Curve("grad_norm", "gradient norm", ORANGE, right=True)),
        "gradient norm",
    ),
    Panel("Entropy", "nats per token", (Curve("entropy", "entropy"),)),
    Panel(
        "Staleness",
        "weight updates",
        (Curve("sample/staleness_mean", "mean"), Curve("sample/staleness_max", "largest", ORANGE)),
        from_zero=True,
    ),
    Panel(
        "Throughput",
        "tokens/s",
        (
            Curve("rollout/generated_tokens_per_s", "generated"),
            Curve("perf/wall_clock_trained_tokens_per_s", "trained", ORANGE),
        ),
        from_zero=True,
    ),
    Panel("Queue", "samples", (Curve("rollout/queue_size", "queued samples"),), from_zero=True),
    Panel(
        "Time",
        "s",
        (
            Curve("perf/step_s", "step"),
            Curve("perf/rollout_wait_s", "waiting for rollouts", ORANGE),
            Curve("rollout/backpressure_s", "rollouts held back", GREEN),
        ),
        from_zero=True,
    ),
    Panel(
        "Importance ratio and masked tokens",
        "mean ratio",
        (
            Curve("sampling/importance_sampling_ratio/mean", "ratio"),
            Curve("sampling/masked_mean", "masked share", ORANGE, right=True),
        ),
        "masked share",
    ),
    Panel(
        "Completions",
        "tokens",
        (
            Curve("completions/mean_length", "mean length"),
            Curve("frac_reward_zero_std", "groups without reward spread", ORANGE, right=True),
        ),
        "share of groups",
    ),
)

REWARD_FUNCTION = re.compile(r"rewards/(.+)/mean|eval/rewards/(.+)")

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #111827; background: #f9fafb; margin: 0; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 40px 0 12px; }
.sub { color: #6b7280; overflow-wrap: anywhere; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 12px; margin-top: 24px; }
.fact, .panel { background: #fff; border: 1px solid #e5e7eb; border-radius: 8px; padding: 12px 16px; }
.fact b { display: block; font-size: 17px; font-weight: 600; white-space: nowrap; }
.fact span { color: #6b7280; font-size: 13px; overflow-wrap: anywhere; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 16px; }
.panel svg { width: 100%; height: auto; display: block; }
.none { color: #6b7280; }
.failed { border-color: #fca5a5; background: #fef2f2; }
table { border-collapse: collapse; width: 100%; background: #fff; border: 1px solid #e5e7eb; font-size: 14px; }
td, th { text-align: left; padding: 4px 12px; border-bottom: 1px solid #f3f4f6; vertical-align: top; }
td { overflow-wrap: anywhere; }
td:first-child { white-space: nowrap; color: #374151; width: 1%; }
details summary { cursor: pointer; color: #374151; }
pre { background: #fff; border: 1px solid #e5e7eb; border-radius: 8px; padding: 12px; overflow-x: auto; }
"""


def write_report(run: RunFolder) -> Path:
    """Write `report.html` of a run, whatever it has recorded so far; returns its path."""
    windows = list(run.merged_records("metrics.jsonl"))
    page = "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
            f"<title>{_text(run.run_id)}</title><style>{STYLE}</style></head><body><main>",
            *_header(run, windows),
            *_curves(run, windows),
            *_settings(run),
            *_events(run),
            "</main></body></html>",
        ]
    )
    write_atomic(run.report_file, page)
    return run.report_file


def panels(windows: Iterable[dict[str, Any]]) -> tuple[Panel, ...]:
    """The panels of a run: where several functions make up the reward, one for each of them follows the reward's."""
    each = [
        Panel(
            f"Reward: {name}",
            "mean reward",
            (
                Curve(f"rewards/{name}/mean", "training, without dropped groups"),
                Curve(f"eval/rewards/{name}", "held out", ORANGE, marked=True),
            ),
        )
        for name in reward_functions(windows)
    ]
    return (PANELS[0], *each, *PANELS[1:])


def reward_functions(windows: Iterable[dict[str, Any]]) -> list[str]:
    """Names of the reward functions; none where it is only one, which is the reward."""
    found = (match for window in windows for name in window if (match := REWARD_FUNCTION.fullmatch(name)))
    names = list(dict.fromkeys(match[1] or match[2] for match in found))
    return names if len(names) > 1 else []


def series(windows: Iterable[dict[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    """Steps and finite values of one metric, in the order of the records."""
    steps, values = [], []
    for window in windows:
        value = window.get(metric)
        if is_number(value):
            steps.append(int(window.get("step") or 0))
            values.append(float(value))
    return steps, values


def draw(panel: Panel, windows: Sequence[dict[str, Any]], starts: Sequence[int] = ()) -> str | None:
    """The panel as an SVG element; None where no metric of it was recorded.

    Args:
        starts: steps at which a later attempt began; each is a dotted line.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawn = [(curve, *series(windows, curve.metric)) for curve in panel.curves]
    drawn = [(curve, steps, values) for curve, steps, values in drawn if steps]
    if not drawn:
        return None
    figure = Figure(figsize=(5.4, 2.9), layout="constrained")
    left = figure.add_subplot()
    right = left.twinx() if any(curve.right for curve, _, _ in drawn) else None
    lines = []
    for curve, steps, values in drawn:
        axis = right if curve.right and right is not None else left
        marker = "o" if curve.marked or len(steps) == 1 else None
        look: dict[str, Any] = {"color": curve.color, "linewidth": 1.5, "marker": marker, "markersize": 4}
        lines += axis.plot(steps, values, label=curve.label, **look)
    for step in starts:
        left.axvline(step, color=GREY, linewidth=0.8, linestyle=":")
    for axis in (left,) if right is None else (left, right):
        axis.spines[["top"]].set_visible(False)
        axis.spines[["left", "right", "bottom"]].set_color("#d1d5db")
        axis.tick_params(colors="#4b5563", labelsize=8)
    left.spines["right"].set_visible(right is not None)
    left.grid(axis="y", color="#f3f4f6")
    left.set_xlabel("optimizer step", fontsize=8, color="#4b5563")
    left.set_ylabel(panel.unit, fontsize=8, color="#4b5563")
    left.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if panel.from_zero:
        left.set_ylim(bottom=0)
    if right is not None:
        right.set_ylabel(panel.right_unit, fontsize=8, color="#4b5563")
    if len(lines) > 1:
        left.legend(handles=lines, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(lines))
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)


def _text(value: object) -> str:
    return html.escape(str(value))


def _number(value: Any, form: str = "{:.3f}") -> str:
    return form.format(value) if isinstance(value, int | float) else "–"


def _run_file(run: RunFolder) -> dict[str, Any]:
    try:
        return tomllib.loads(run.run_file.read_text())
    except (OSError, ValueError):
        return {}


def _header(run: RunFolder, windows: Sequence[dict[str, Any]]) -> list[str]:
    settings = _run_file(run)
    outcome = read_object(run.path / "outcome.json")
    attempts = run.attempts()
    _, rewards = series(windows, "reward")
    steps = max((int(w.get("step") or 0) for w in windows), default=0)
    times = [float(w["time"]) for w in windows if is_number(w.get("time"))]
    facts = [
        ("held-out reward", _first_to_last(windows, "eval/reward")),
        *((f"held-out {name}", _first_to_last(windows, f"eval/rewards/{name}")) for name in reward_functions(windows)),
        ("last training reward", _number(rewards[-1] if rewards else None)),
        ("optimizer steps", str(steps)),
        ("minutes of training", f"{(max(times) - min(times)) / 60:.1f}" if times else "–"),
        ("attempts", str(len(attempts))),
    ]
    states = {"finish": "finished", "fail": "failed", "cancelled": "stopped"}
    state = states.get(str(outcome.get("kind")), "not ended")
    lines = [
        f"<h1>{_text(run.run_id)}</h1>",
        f'<div class="sub">{_text(settings.get("model", {}).get("name", "unknown model"))} · '
        f"{_text(settings.get('data', {}).get('source', 'unknown data'))} · {_text(state)}</div>",
        '<div class="facts">',
        *(f'<div class="fact"><b>{_text(value)}</b><span>{_text(name)}</span></div>' for name, value in facts),
        "</div>",
    ]
    if state == "failed":
        lines += ["<h2>Failure</h2>", f'<div class="fact failed">{_text(outcome.get("reason", ""))}</div>']
        lines += [f"<pre>{_text(outcome['last_lines'])}</pre>"] if outcome.get("last_lines") else []
    return lines


def _first_to_last(windows: Sequence[dict[str, Any]], metric: str) -> str:
    _, values = series(windows, metric)
    return " → ".join(_number(value) for value in (values[:1] if len(values) < 2 else (values[0], values[-1]))) or "–"


def _curves(run: RunFolder, windows: Sequence[dict[str, Any]]) -> list[str]:
    starts = [int(run.fence(attempt).get("step") or 0) for attempt in run.attempts()[1:]]
    drawn = [(panel, draw(panel, windows, starts)) for panel in panels(windows)]
    lines = ["<h2>Curves</h2>", '<div class="panels">']
    for panel, svg in drawn:
        body = svg or '<p class="none">Nothing recorded.</p>'
        lines.append(f'<div class="panel"><b>{_text(panel.title)}</b>{body}</div>')
    return [*lines, "</div>"]


def _settings(run: RunFolder) -> list[str]:
    rows = []
    for section, values in _run_file(run).items():
        pairs = values.items() if isinstance(values, dict) else [(None, values)]
        for key, value in pairs:
            name = f"{section}.{key}" if key else section
            rows.append(f"<tr><td>{_text(name)}</td><td>{_text(value)}</td></tr>")
    if not rows:
        return []
    head = f"<details><summary>{len(rows)} settings</summary><table>"
    return ["<h2>Settings</h2>", head, *rows, "</table></details>"]


LATEST = 1e11  # seconds since the epoch: a time beyond it is a damaged record, and no calendar has it


def _events(run: RunFolder) -> list[str]:
    """Attempts, and what the supervisor and the trainer noted, in the order of time."""
    rows: list[tuple[float, int, str]] = []
    for attempt in run.attempts():
        for name in ("supervisor.jsonl", "events.jsonl"):
            for line in read_jsonl(run.records(attempt) / name):
                text = line.get("event") or line.get("message") or ""
                extra = ", ".join(f"{k} {v}" for k, v in line.items() if k not in ("time", "event", "message"))
                said = f"{text} ({extra})" if extra and text else text or extra
                moment = line.get("time")
                rows.append((float(moment) if is_number(moment) and 0 <= moment < LATEST else 0.0, attempt, said))
    if not rows:
        return []
    rows.sort(key=lambda row: row[0])
    cells = [
        f"<tr><td>{_text(time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(moment)))}</td>"
        f"<td>{attempt}</td><td>{_text(text)}</td></tr>"
        for moment, attempt, text in rows
    ]
    head = "<tr><th>time</th><th>attempt</th><th>event</th></tr>"
    return ["<h2>Events</h2>", "<table>", head, *cells, "</table>"]
