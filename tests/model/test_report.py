"""The report: one file that stands alone, with whatever the run has recorded."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from slipstream.metrics.report import PANELS, draw, series, write_report
from slipstream.run_folder import RunFolder, append_jsonl, write_atomic, write_json

METRICS = [curve.metric for panel in PANELS for curve in panel.curves]


class Page(HTMLParser):
    """Collects everything in a page that a browser would fetch, and checks that the tags are balanced."""

    VOID = ("meta", "br", "img", "link")

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.panels = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        for name in ("src", "href", "xlink:href", "data"):
            target = values.get(name)
            if target and not target.startswith("#"):
                self.fetched.append(target)
        if tag in ("script", "link", "iframe"):
            self.fetched.append(tag)
        self.panels += tag == "svg"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(RunFolder.create(tmp_path, "r").path.rename(tmp_path / "r-<1>"))  # as nobody can name one today
    text = 'name = "r"\n[model]\nname = "tiny & small"\n[data]\nsource = "d"\n[trainer]\nlearning_rate = 1e-4\n'
    write_atomic(folder.run_file, text)
    folder.begin_attempt(None, 0)
    return folder


def record(run: RunFolder, attempt: int, steps: range, offset: float = 0.0) -> None:
    for step in steps:
        line = {"step": step, "time": 100.0 + step, **dict.fromkeys(METRICS, step + offset)}
        append_jsonl(run.records(attempt) / "metrics.jsonl", line)


def test_the_page_stands_alone_and_has_every_panel(run: RunFolder) -> None:
    record(run, 1, range(1, 5))
    text = write_report(run).read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.fetched == []
    assert not re.findall(r"url\((?!#)|@import", text)
    assert page.panels == len(PANELS)
    assert "<title>r-&lt;1&gt;</title>" in text
    assert "tiny &amp; small" in text
    assert "trainer.learning_rate" in text
    assert "1.000 → 4.000" in text


def test_each_of_several_reward_functions_has_a_panel(run: RunFolder) -> None:
    record(run, 1, range(1, 5))
    for step, value in ((0, 0.2), (4, 0.9)):
        line = {"step": step, "eval/rewards/right": 0.1, "eval/rewards/shape": value}
        append_jsonl(run.records(1) / "metrics.jsonl", line)
    text = write_report(run).read_text()
    assert text.count("<svg") == len(PANELS) + 2
    assert "<b>0.200 → 0.900</b><span>held-out shape</span>" in text
    assert text.index("Reward: right") < text.index("Reward: shape") < text.index("Loss and gradient norm")
    assert "Nothing recorded." not in text


def test_one_reward_function_has_no_panel_of_its_own(run: RunFolder) -> None:
    record(run, 1, range(1, 5))
    append_jsonl(run.records(1) / "metrics.jsonl", {"step": 4, "rewards/right/mean": 0.1, "eval/rewards/right": 0.1})
    assert write_report(run).read_text().count("<svg") == len(PANELS)


def test_a_run_that_failed_early_has_a_report_with_its_failure(run: RunFolder) -> None:
    outcome = {"attempt": 1, "kind": "fail", "reason": "no <luck>", "last_lines": "line & line"}
    write_json(run.path / "outcome.json", outcome)
    text = write_report(run).read_text()
    assert text.count("Nothing recorded.") == len(PANELS)
    assert "no &lt;luck&gt;" in text
    assert "line &amp; line" in text


def test_records_that_a_resume_made_void_are_not_drawn(run: RunFolder) -> None:
    record(run, 1, range(1, 7))
    run.begin_attempt("output/a1/checkpoint-3", 3)
    record(run, 2, range(4, 6), offset=100)
    append_jsonl(run.records(2) / "supervisor.jsonl", {"time": 200.0, "event": "attempt 2 continues from step 3"})
    windows = list(run.merged_records("metrics.jsonl"))
    assert series(windows, "reward") == ([1, 2, 3, 4, 5], [1.0, 2.0, 3.0, 104.0, 105.0])
    assert "attempt 2 continues from step 3" in write_report(run).read_text()


def test_values_that_are_no_numbers_are_left_out() -> None:
    windows = [
        {"step": 1, "loss": float("nan")},
        {"step": 2, "loss": 0.5},
        {"step": 3},
        {"step": 4, "loss": float("inf")},
    ]
    assert series(windows, "loss") == ([2], [0.5])
    panel = next(panel for panel in PANELS if panel.title == "Loss and gradient norm")
    assert draw(panel, windows[:1]) is None
    assert (draw(panel, windows) or "").startswith("<svg")
