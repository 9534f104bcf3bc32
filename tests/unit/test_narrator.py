"""What a run says in words: each window, when it is silent, and when an epoch has trained nothing."""

import io
import json
import logging
import queue
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.config import AsyncGRPOConfig
from slipstream.learner.completions import print_completions
from slipstream.learner.feed import SampleFeed
from slipstream.learner.inbox import Inbox
from slipstream.learner.ledger import Ledger, NothingTrained
from slipstream.learner.narrator import Narrator
from slipstream.learner.replay import ReplaySource
from slipstream.learner.reporter import Reporter
from slipstream.metrics.verdict import Limits
from slipstream.metrics.window import Window
from slipstream.rollout.setup import Position
from slipstream.rollout.types import ZERO_STD, EndOfData, GroupResult
from slipstream.run_folder import RunFolder, read_jsonl
from tests.learner_replay import ReplayTrainer, made_up_group, replay_config, tiny_model

LIMITS = Limits(4, 64, 3)
STEP = {"perf/step_s": 10.0, "rollout/backpressure_s": 0.0, "reward_seen_min": 0.0, "reward_seen_max": 1.0}
SLOW = {**STEP, "perf/rollout_wait_s": 8.0, "frac_reward_zero_std": 0.1, "reward": 0.5}
FAST = {**STEP, "perf/rollout_wait_s": 0.0, "frac_reward_zero_std": 0.1, "reward": 0.5}


def test_it_is_logged_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    narrator = Narrator(LIMITS)
    with caplog.at_level(logging.INFO, logger="slipstream.learner.narrator"):
        texts = [narrator.window(values) for values in (SLOW, SLOW, FAST, FAST, SLOW)]
    assert [text["verdict"].split(":")[0] for text in texts] == [
        *["generation-bound"] * 2,
        *["balanced"] * 2,
        "generation-bound",
    ]
    assert all(text["saturation"].startswith("healthy") for text in texts)
    said = [(record.levelname, record.getMessage().split(":")[0]) for record in caplog.records]
    assert said == [
        ("WARNING", "generation-bound"),
        ("INFO", "healthy"),
        ("INFO", "balanced"),
        ("WARNING", "generation-bound"),
    ]


def test_a_window_without_a_step_is_judged_by_how_long_it_has_waited() -> None:
    texts = Narrator(LIMITS).window({"rollout/backpressure_s": 0.0, "frac_reward_zero_std": 1.0, "reward": 0.0}, 60.0)
    assert "training waits 100% of the time" in texts["verdict"]
    assert "see the saturation diagnosis" in texts["verdict"]


def test_each_window_has_a_verdict_though_the_rollout_process_reports_less_often() -> None:
    narrator = Narrator(LIMITS)
    held = {"rollout/backpressure_s": 3.0, "rollout/backpressure_frac": 0.6}
    short = {"perf/step_s": 0.5, "perf/rollout_wait_s": 0.0}
    found = [narrator.window(values)["verdict"].split(":")[0] for values in (SLOW, short, {**short, **held}, short)]
    assert found == ["generation-bound", "balanced", "trainer-bound", "trainer-bound"]


def test_nothing_is_said_of_what_was_not_measured() -> None:
    assert Narrator(LIMITS).window({"loss": 0.1}) == {}


# ---- in the trainer


def all_wrong(number: int, length: int) -> GroupResult:
    """A group whose rollouts all got 0."""
    observations = [
        ("frac_reward_zero_std", 1.0, 1),
        ("reward", 0.0, 3),
        ("reward_dropped", 0.0, 1),
        ("completions/clipped_ratio", 0.9, 3),
        ("rollout/backpressure_s", 0.0, 1),
    ]
    return GroupResult(number, 0, number, number, [], {ZERO_STD: 3}, observations=observations)


class Recorded(Reporter):
    def __init__(self) -> None:
        super().__init__()
        self.windows: list[tuple[int, dict, dict]] = []

    def metrics(self, step, values, texts=None) -> None:
        self.windows.append((step, values, texts or {}))


def replayed(tmp_path: Path, groups, **changes) -> tuple[ReplayTrainer, list]:
    trainer = ReplayTrainer(tiny_model(), replay_config(tmp_path, num_generations=3, **changes), groups, 64)
    trainer.reporter = Recorded()
    trainer.reporter.ledger = lambda line: None
    return trainer, trainer.reporter.windows


class OneByOne(ReplaySource):
    """A dropped group comes when the trainer waits, and whatever is next once the trainer has spoken of it."""

    windows: list[tuple[int, dict, dict]]
    awaited: threading.Event
    handed_out = 0

    def take(self) -> GroupResult | None:
        end = time.monotonic() + 60
        while sum("loss" not in w[1] and "frac_reward_zero_std" in w[1] for w in self.windows) < self.handed_out:
            assert time.monotonic() < end, "nothing was said"
            time.sleep(0.001)
        group = super().take()
        if group is not None and not group.samples:
            self.handed_out += 1
            assert self.awaited.wait(60)
        return group

    def step_awaited(self) -> None:
        self.awaited.set()

    def step_planned(self) -> None:
        self.awaited.clear()


def test_a_run_without_a_step_speaks_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps' worth of groups, then five that are dropped, then more to train; the interval is over at once."""
    groups = [made_up_group(number, 3, 5, 12) for number in range(12)]
    groups[4:9] = [all_wrong(number, 12) for number in range(4, 9)]
    trainer, windows = replayed(tmp_path, groups)
    trainer.speak_after_s = 0.0
    monkeypatch.setattr(OneByOne, "windows", windows, raising=False)
    monkeypatch.setattr(OneByOne, "awaited", threading.Event(), raising=False)
    monkeypatch.setattr("slipstream.learner.replay.ReplaySource", OneByOne)
    trainer.train()
    silent = [
        (step, values, texts)
        for step, values, texts in windows
        if "loss" not in values and "frac_reward_zero_std" in values
    ]
    assert len(silent) == 5
    assert all(step > 0 for step, _, _ in silent)
    for _, values, texts in silent:
        assert values["sample/dropped_zero_std_count"] == 3
        assert not any(name.startswith(("sampling/", "perf/", "entropy")) for name in values), (
            "other ranks' share is missing"
        )
        assert "training waits 100% of the time" in texts["verdict"]
    assert silent[0][2]["saturation"].startswith("stuck at the bottom")
    assert "90% of the completions are cut off" in silent[0][2]["saturation"]
    total = sum(values.get("sample/dropped_zero_std_count", 0) for _, values, _ in windows)
    assert total == 15, "no window counts what another one did"


def test_a_run_that_steps_does_not(tmp_path: Path) -> None:
    groups = [made_up_group(number, 3, 5, 6) for number in range(6)]
    trainer, windows = replayed(tmp_path, groups)
    trainer.train()
    assert windows
    assert all("loss" in values for _, values, _ in windows)


def test_an_epoch_without_a_trained_sample_raises_with_the_diagnosis(tmp_path: Path) -> None:
    trainer, _ = replayed(tmp_path, [all_wrong(number, 5) for number in range(5)])
    with pytest.raises(
        NothingTrained,
        match=r"zero_std: 15(?s:.*)stuck at the bottom: 100% of the groups(?s:.*)raise max_completion_length",
    ):
        trainer.train()


# ---- completions


def row(reward: float | None, text: str) -> dict:
    return {
        "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "[bold]2+2[/bold]"}],
        "completion": [{"role": "assistant", "content": text}],
        "reward": reward,
        "advantage": -0.5,
    }


def printed(*args) -> str:
    out = io.StringIO()
    print_completions(*args, file=out)
    return out.getvalue()


def test_the_prompt_of_a_group_is_printed_once() -> None:
    rows = [row(1.0, "four"), row(0.0, "five"), {**row(0.0, "six"), "prompt": "3+3"}, row(0.0, "seven")]
    text = printed(rows, 7, None)
    assert text.count("[bold]2+2[/bold]") == 2
    assert text.count("″") == 1


def test_completions_are_printed_as_they_are() -> None:
    text = printed([row(1.0, "four"), row(None, "[red]five")], 7, None)
    for part in (
        "completions at step 7",
        "user: [bold]2+2[/bold]",
        "system: S",
        "four",
        "[red]five",
        "1.000",
        "unscored",
        "-0.500",
    ):
        assert part in text


def test_only_so_many_are_printed() -> None:
    text = printed([row(1.0, f"answer{i}") for i in range(5)], 7, 2)
    assert [f"answer{i}" in text for i in range(5)] == [False, False, False, True, True]
    assert printed([], 7, None) == ""


def test_a_long_one_is_cut_in_the_middle() -> None:
    text = printed([row(1.0, "begin " + "x" * 5000 + " end")], 1, None)
    assert "begin" in text
    assert "end" in text
    assert len(text) < 5000


def test_a_completion_cannot_steer_the_terminal() -> None:
    text = printed([row(1.0, "a\x1b[31mred\x07 \x9b \u202ereversed\r\nnext")], 1, None)
    assert not set(text) & {"\x1b", "\x07", "\x9b", "\u202e", "\r"}
    for part in ("a\\x1b[31mred\\x07", "\\u202ereversed", "next"):
        assert part in text
    assert len({len(line) for line in text.splitlines()[1:]}) == 1, "the frame is straight"


def test_nothing_is_lost_at_the_edge_of_a_column() -> None:
    text = printed([row(-123456.789, "~" * 500), row(0.0, "")], 1, None)
    assert text.count("~") == 500
    assert "-1.23e+05" in text
    assert "(empty)" in text


def test_the_trainer_prints_them_each_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = [made_up_group(number, 3, 5, 6) for number in range(6)]
    trainer, _ = replayed(tmp_path, groups, log_completions=True, num_completions_to_print=1)
    trainer.completions += [row(1.0, "first"), row(0.0, "second")]
    trainer.train()
    out = capsys.readouterr().out
    assert out.count("completions at step") == 1
    assert "second" in out
    assert "first" not in out


def test_without_log_completions_nothing_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, _ = replayed(tmp_path, [made_up_group(number, 3, 5, 6) for number in range(6)])
    trainer.completions += [row(1.0, "first")]
    trainer.train()
    assert "first" not in capsys.readouterr().out


# ---- where it comes from and goes to


def test_the_feed_lets_the_trainer_speak_while_it_waits() -> None:
    """On the training thread: what is said must not change under what trains."""
    worker = SimpleNamespace(
        rollouts=queue.Queue(),
        trainer_waits=SimpleNamespace(value=0),
        allowance=SimpleNamespace(value=0),
        check=lambda: None,
    )
    spoken = []

    def speak() -> None:
        spoken.append(threading.current_thread())
        worker.rollouts.put(EndOfData(0))

    inbox = Inbox(worker)  # type: ignore[arg-type]
    shape = {"ranks": 1, "accumulation": 1, "token_budget": 10, "max_staleness": 1}
    window = Window()
    ledger = Ledger(10, Position())
    feed = SampleFeed(inbox, ledger, window, **shape, warn=print, while_waiting=speak)  # type: ignore[arg-type]
    assert feed.next_step(0) is None
    assert set(spoken) == {threading.current_thread()}
    inbox.close()
    feed.close()


def test_words_stand_beside_the_numbers(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "r")
    reporter = Reporter(run, 1)
    reporter.metrics(3, {"loss": 0.5}, {"verdict": "balanced: both."})
    (line,) = read_jsonl(run.records(1) / "metrics.jsonl")
    assert (line["step"], line["loss"], line["verdict"]) == (3, 0.5, "balanced: both.")
    json.dumps(line)


def test_the_run_file_names_integrations() -> None:
    config = AsyncGRPOConfig(output_dir="x", report_to=[], use_cpu=True, bf16=False)
    assert config.report_to == []
