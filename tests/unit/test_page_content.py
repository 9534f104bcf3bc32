"""What the artifacts of a run's page say, from a run folder."""

import json
import re
from pathlib import Path

import pytest

from cluster.recovery import RELEASED
from flows.cli.snapshot import Snapshot
from flows.masking import MASK, Mask
from flows.page import content
from flows.page.content import Content, contents
from flows.page.curves import Curves, draw_curves, thinned
from flows.page.facts import Facts, done, left_s, read_facts
from slipstream.metrics.report import PANELS
from slipstream.run_folder import RunFolder, append_jsonl, write_json
from tests.page_runs import BEGAN, EVIL, VERDICT, beat, breaks, completes, ends, learns, new_run

NAMES = (
    "attempt",
    "step",
    "time",
    "kind",
    "incarnation",
    "max_steps",
    "role",
    "learner",
    "jobs",
    "prompt",
    "reward",
    "job",
)
GARBAGE = (
    "", "{", "[1]", "7", "[" * 100_000, '{"step": 1e400, "time": 1e400}', '{"step": 1, "time": 1e300, "role": "server"}',
    *(json.dumps(dict.fromkeys(NAMES, value)) for value in (["x"], {"i1": 3}, None)),
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return new_run(tmp_path, log_completions=True)


def facts(run: RunFolder) -> Facts:
    return read_facts(run, Mask(["planted-secret"]))


def page(run: RunFolder) -> dict[str, Content]:
    return contents(facts(run), Curves())


def outside_of_code(markdown: str) -> str:
    """What a renderer may take for markup: all but code blocks and code spans."""
    rest = re.sub(r"^(`{3,})text\n.*?\n\1$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", rest)


def test_a_run_that_is_only_a_folder(tmp_path: Path) -> None:
    for run in (RunFolder(tmp_path / "gone"), RunFolder.create(tmp_path, "empty")):
        found = page(run)
        assert list(found) == [content.RUN]
        assert "`preparing`" in found[content.RUN].description
        assert "never" in found[content.RUN].data


def test_before_the_first_step_there_are_jobs_with_the_reason_that_the_scheduler_gives(run: RunFolder) -> None:
    found = page(run)
    assert list(found) == [content.RUN, content.JOBS]
    assert found[content.JOBS].description == "`learner` `pending` (`(Resources)`)\n\n`server` `running`"
    assert "| `server` | `47i1` | `running` | `n1, n2` | – | " in found[content.JOBS].data
    assert f"`{run.log_file('learner', 1)}`" in found[content.JOBS].data


def test_a_job_that_no_supervisor_has_seen(run: RunFolder) -> None:
    beat(run, "supervisor", phase="the server is starting")
    write_json(run.assignment_file, {"attempt": 1, "server": "i1", "learner": "not recorded"})
    assert page(run)[content.JOBS].description == "`server` `submitted`\n\n`learner` `being submitted`"


def test_a_run_that_trains(run: RunFolder) -> None:
    for step in range(1, 6):
        learns(run, step)
    said = page(run)
    assert said[content.RUN].description.split("\n\n") == [
        "`training`",
        "step 5 of 10 (50%)",
        "reward 0.500",
        "held out 0.100 → 0.200",
        "`generation-bound`",
    ]
    assert said[content.PROGRESS] == Content("progress", 50.0, "step 5 of 10 (50%) · about 0:50 left")
    text = said[content.RUN].data
    for row in (
        f"| folder | `{run.path}` |", "| held-out reward | 0.100 → 0.200 |", "| trained tok/s | 3,005 |",
        "| staleness | 1.50 |", "| largest staleness | 3 |", "| time left | about 0:50 |", "| attempt | 1 |", "| model | `m` |",
        "| newest record | 2023-11-14 22:14:10 UTC |",
    ):  # fmt: skip
        assert row in text
    assert f"**Bottleneck**\n\n```text\n{VERDICT[:40]}" in text
    assert "healthy: 90%" in text


def test_nothing_changes_while_nothing_happens(run: RunFolder) -> None:
    learns(run, 1)
    completes(run, 1)
    assert page(run) == page(run)


def test_how_a_run_failed(run: RunFolder) -> None:
    learns(run, 1)
    ends(
        run,
        "fail",
        role="learner",
        reason="out of luck",
        log="/r/logs/learner-1.log",
        last_lines="a\nplanted-secret ```",
    )
    found = page(run)
    text = found[content.RUN].data
    assert found[content.RUN].description == "**failed**\n\nstep 1 of 10 (10%)\n\nreward 0.100\n\n`out of luck`"
    assert (
        "## Failed at 2023-11-14 22:21:40 UTC\n\nThe part that failed: `learner`\n\n```text\nout of luck\n```\n" in text
    )
    assert f"Last lines of `/r/logs/learner-1.log`\n\n````text\na\n{MASK} ```\n````" in text
    assert f"`slipstream resume {run.path}`" in text
    assert "`server` `ended`" in found[content.JOBS].description
    assert "left" not in found[content.PROGRESS].description


@pytest.mark.parametrize(("kind", "word"), [("finish", "**finished**"), ("cancelled", "**stopped**")])
def test_other_ends(run: RunFolder, kind: str, word: str) -> None:
    learns(run, 1)
    ends(run, kind)
    found = page(run)
    assert found[content.RUN].description.startswith(word)
    assert (found[content.PROGRESS].data == 100.0) == (kind == "finish")


def test_the_end_of_an_earlier_attempt_is_not_this_ones(run: RunFolder) -> None:
    ends(run, "fail")
    run.begin_attempt(None, 0)
    assert facts(run).outcome is None


def test_recoveries(run: RunFolder) -> None:
    learns(run, 1)
    breaks(run, 1, "i0", f"broke: planted-secret {EVIL}")
    learns(run, 2)
    append_jsonl(run.path / "records" / "faults.jsonl", {"time": BEGAN + 25, "attempt": 1, "kind": "resumed"})
    breaks(run, 2, "i1", "again")
    breaks(run, 2, "i1", "again, by the next leader")
    breaks(run, 2, "i3", "idle", kind=RELEASED)
    first, second, third = facts(run).recoveries
    assert (first.step_after, first.seconds, first.counts) == (2, 9.0, True)
    assert (second.reason, second.step_after, second.seconds) == ("again", None, None)
    assert not third.counts
    found = page(run)[content.RECOVERIES]
    assert found.description == "3 · the last: `server` at step 2, `idle`"
    rows = found.data.split("\n")[2:]
    assert rows[0].startswith(
        "| 2023-11-14 22:13:41 UTC | `server` | `released` | `idle` | 2 (attempt 1) | not there yet |"
    )
    assert rows[2].endswith("| 1 (attempt 1) | 0:09 (step 2) |")
    assert "planted-secret" not in found.data
    assert MASK in found.data


def test_what_a_model_says_is_no_markup(run: RunFolder) -> None:
    learns(run, 1)
    completes(run, 1, EVIL + " planted-secret", count=6)
    breaks(run, 1, "i0", EVIL)
    ends(run, "fail", reason=EVIL, role=EVIL, last_lines=EVIL, log=EVIL)
    for one in page(run).values():
        for text in (str(one.data), one.description):
            assert not re.search(r"<\w|http|www|!\[|\]\(|evil|\x1b|\u202e|planted", outside_of_code(text)), text
            assert "planted-secret" not in text
    text = page(run)[content.COMPLETIONS].data
    assert text.count("**Completion** · reward 0.500 · step 1") == 4
    assert text.count("**Prompt**") == 1
    assert "\\x1b[31m\\u202e" in text


def test_long_completions_are_cut(run: RunFolder) -> None:
    completes(run, 1, "word " * 50_000, count=3)
    assert len(page(run)[content.COMPLETIONS].data) < 10_000


def test_completions_that_nobody_recorded(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    learns(run, 1)
    found = page(run)
    assert content.COMPLETIONS not in found
    assert "| completions | not recorded: set `trainer.log_completions` |" in found[content.RUN].data


@pytest.mark.parametrize(
    "name",
    [
        "assignment.json", "run.toml", "fences/1.json", "heartbeats/learner.json", "heartbeats/supervisor.json",
        "jobs/1.jsonl", "outcome.json", "origin.json", "records/a1/metrics.jsonl", "records/faults.jsonl",
        "records/a1/completions/step-000001.jsonl", "exit/learner-i2.json",
    ],
)  # fmt: skip
def test_damaged_records_leave_the_rest_of_the_page(run: RunFolder, name: str) -> None:
    for step in (1, 2):
        learns(run, step)
    completes(run, 1)
    breaks(run, 1, "i0")
    path = run.path / name
    before = path.read_text() if path.suffix == ".jsonl" else ""
    for garbage in GARBAGE:
        path.write_text(f"{before}{garbage}\n")
        windows = facts(run).snapshot.windows
        for panel in PANELS:
            thinned(panel, windows)
        found = contents(facts(run), Curves())
        assert f"`{run.path}`" in found[content.RUN].data
        json.dumps(
            [[one.data, one.description] for one in found.values()], allow_nan=False, ensure_ascii=False
        ).encode()


@pytest.mark.parametrize(
    ("snapshot", "trainer", "share"),
    [
        (Snapshot("r", step=3, max_steps=12), {}, 0.25),
        (Snapshot("r", step=30, max_steps=12), {}, 1.0),
        (Snapshot("r", step=3, metrics={"epoch": 0.5}), {"num_train_epochs": 2.0, "max_steps": -1}, 0.25),
        (Snapshot("r", step=3, metrics={"epoch": 0.5}), {"num_train_epochs": 2.0, "max_steps": 10}, None),
        (Snapshot("r", step=3), {"num_train_epochs": 2.0}, None),
        (Snapshot("r", step=3, metrics={"epoch": 0.5}), {"num_train_epochs": "x"}, None),
    ],
)
def test_which_share_is_done(snapshot: Snapshot, trainer: dict[str, object], share: float | None) -> None:
    assert done(snapshot, trainer) == share


def test_without_a_known_end_the_page_says_the_step(tmp_path: Path) -> None:
    run = new_run(tmp_path, max_steps=-1)
    learns(run, 4, most=0)
    found = page(run)
    assert content.PROGRESS not in found
    assert "step 4" in found[content.RUN].description.split("\n\n")


def test_time_left_is_of_the_newest_windows_of_this_attempt() -> None:
    old = [{"attempt": 1, "step": 100, "time": 5.0}]
    windows = [{"attempt": 2, "step": step, "time": 1000.0 + 10 * step} for step in (10, 20)]
    snapshot = Snapshot("r", attempt=2, step=20, max_steps=50, windows=old + windows)
    assert left_s(snapshot, 0.4) == 300.0
    assert left_s(snapshot, None) is None
    assert left_s(Snapshot("r", attempt=2, step=20, max_steps=50, windows=old), 0.4) is None
    by_prompts = Snapshot("r", attempt=2, step=20, windows=windows)
    assert left_s(by_prompts, 0.5) == 200.0


def test_curves_are_images(run: RunFolder) -> None:
    for step in range(1, 4):
        learns(run, step)
    drawn = draw_curves(facts(run).snapshot.windows, (2,))
    images = re.findall(r"!\[([\w ,]+)\]\(data:image/svg\+xml;base64,[A-Za-z0-9+/=]+\)", drawn.first)
    assert images == ["Reward", "Loss and gradient norm", "Throughput", "Staleness"]
    assert draw_curves([]).others == ""
    assert "recorded" in draw_curves([]).first


def test_a_long_run_has_small_images_and_keeps_its_seldom_points() -> None:
    windows = [{"step": step, "reward": 1.0} for step in range(10_000)]
    windows[5000]["eval/reward"] = 0.5
    thin = thinned(PANELS[0], windows)
    assert len(thin) == 201
    assert {"step": 5000, "eval/reward": 0.5} in thin
    assert len(draw_curves(windows).first) < 60_000
