"""A scheduled start waits for nobody: it is skipped while its predecessor works, and of several at once one starts."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.decide import Kind
from cluster.local_jobs import started
from slipstream.run_folder import RunFolder, write_json
from tasks.origin import Origin, write_origin
from tasks.outcome import Outcome, write_outcome
from tasks.predecessor import claims_folder, look, unfinished_predecessor
from tasks.predecessor_policy import SILENT_CLAIM_S, Claim, Seen, has_ended, predecessor

WORKS, ENDED = Seen("a", "weekly", False), Seen("a", "weekly", True)


@pytest.mark.parametrize(
    ("seen", "claim", "expected"),
    [
        ([], None, None),
        ([WORKS], None, "a"),
        ([ENDED], None, None),
        ([replace(WORKS, deployment="other")], None, None),
        ([replace(WORKS, deployment="")], None, None),
        ([WORKS, Seen("own", "weekly", False)], None, None),  # begun before
        ([WORKS, Seen("own", "weekly", True)], None, None),
        ([], Claim("b", alive=True), "b"),
        ([], Claim("b", alive=False), None),
        ([], Claim("own", alive=True), None),
        ([], Claim("b", alive=None, age_s=SILENT_CLAIM_S - 1), "b"),
        ([], Claim("b", alive=None, age_s=SILENT_CLAIM_S), None),
        ([ENDED], Claim("a", alive=True), None),  # its process has not gone yet
        (
            [replace(WORKS, deployment="")],
            Claim("a", alive=False),
            "a",
        ),  # claimed for this deployment, whatever it says
    ],
)
def test_what_a_start_waits_for(seen: list[Seen], claim: Claim | None, expected: str | None) -> None:
    assert predecessor(seen, claim, "weekly", "own") == expected


@pytest.mark.parametrize(
    ("outcome", "newest", "ended"), [(None, 0, False), (None, 1, False), (1, 1, True), (1, 2, False), (0, 0, True)]
)
def test_the_outcome_of_an_earlier_attempt_is_no_end(outcome: int | None, newest: int, ended: bool) -> None:
    assert has_ended(outcome, newest) is ended


RUNS = st.lists(
    st.builds(Seen, st.sampled_from("abc"), st.sampled_from(["weekly", "daily"]), st.booleans()), max_size=5
)
CLAIMS = st.none() | st.builds(Claim, st.sampled_from("abcd"), st.sampled_from([True, False, None]), st.floats(0, 2e3))


@given(RUNS, CLAIMS)
def test_only_what_works_or_is_about_to_is_named(seen: list[Seen], claim: Claim | None) -> None:
    named = predecessor(seen, claim, "weekly", "own")
    working = {run.run_id for run in seen if run.deployment == "weekly" and not run.ended}
    if working:
        assert named in working
    elif named is not None:
        assert claim is not None
        assert named == claim.run_id
    assert predecessor([*seen, Seen("own", "weekly", True)], claim, "weekly", "own") is None


def a_run(
    root: Path, run_id: str, deployment: str = "weekly", outcome: int | None = None, attempts: int = 1
) -> RunFolder:
    run = RunFolder.create(root, run_id)
    write_origin(run, Origin(deployment=deployment))
    for _ in range(attempts):
        run.begin_attempt(None, 0)
    if outcome is not None:
        write_outcome(run, Outcome(Kind.FINISH, "done"), outcome)
    return run


def test_a_run_whose_newest_attempt_has_no_outcome_works(tmp_path: Path) -> None:
    assert unfinished_predecessor(tmp_path / "none yet", "weekly", "own") is None
    a_run(tmp_path, "ended", outcome=1)
    a_run(tmp_path, "of-another-schedule", "daily")
    assert unfinished_predecessor(tmp_path, "weekly", "own") is None
    a_run(tmp_path, "again", outcome=1, attempts=2)
    assert unfinished_predecessor(tmp_path, "weekly", "next") == "again"


def test_a_sweep_is_judged_by_the_same_files(tmp_path: Path) -> None:
    sweep = RunFolder(tmp_path / "sweep")
    sweep.path.mkdir()
    write_origin(sweep, Origin(deployment="weekly"))
    assert unfinished_predecessor(tmp_path, "weekly", "own") == "sweep"
    write_json(sweep.path / "outcome.json", {"kind": "finish"})
    assert unfinished_predecessor(tmp_path, "weekly", "own") is None


def test_a_damaged_folder_is_named_and_holds_up_nothing(tmp_path: Path) -> None:
    for number, (name, text) in enumerate([("origin", "{"), ("outcome", "[]"), ("outcome", '{"attempt": "one"}')]):
        (a_run(tmp_path, f"run{number}").path / f"{name}.json").write_text(text)
    said: list[str] = []
    assert unfinished_predecessor(tmp_path, "weekly", "own", said.append) is None
    assert [text.partition(" ")[0] for text in said] == ["run0", "run1", "run2"]
    assert all("does not count as a predecessor" in text and "damaged" in text for text in said)


def test_a_start_that_has_begun_is_not_judged_again(tmp_path: Path) -> None:
    assert unfinished_predecessor(tmp_path, "weekly", "own") is None
    a_run(tmp_path, "own")
    a_run(tmp_path, "other")
    assert unfinished_predecessor(tmp_path, "weekly", "own") is None
    assert unfinished_predecessor(tmp_path, "weekly", "next") in {"own", "other"}


def test_of_many_at_once_one_starts(tmp_path: Path) -> None:
    start, answers = threading.Barrier(8), {}

    def race(name: str) -> None:
        start.wait()
        answers[name] = unfinished_predecessor(tmp_path, "weekly", name)

    threads = [threading.Thread(target=race, args=(f"run{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (first,) = [name for name, answer in answers.items() if answer is None]
    assert {answer for answer in answers.values() if answer is not None} == {first}


CLAIM = """
import sys
from pathlib import Path
from tasks.predecessor import unfinished_predecessor
print(unfinished_predecessor(Path(sys.argv[1]), "weekly", "first"), flush=True)
sys.stdin.readline()
"""


def test_a_claim_holds_until_the_folder_is_there_and_ends_with_its_process(tmp_path: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == b"None\n"
        assert unfinished_predecessor(tmp_path, "weekly", "second") == "first"
        assert unfinished_predecessor(tmp_path, "daily", "other") is None
    finally:
        first.kill()
        first.communicate()
    assert unfinished_predecessor(tmp_path, "weekly", "third") is None
    assert unfinished_predecessor(tmp_path, "weekly", "fourth") == "third"
    assert unfinished_predecessor(tmp_path, "weekly", "third") is None  # the same flow run, started again


def test_a_claim_of_another_host_holds_for_some_minutes_by_the_storage_s_clock(tmp_path: Path) -> None:
    folder = claims_folder(tmp_path, "weekly")
    folder.mkdir(parents=True)
    claim = folder / "1.json"
    write_json(claim, {"run": "away", "host": "elsewhere", "pid": 1, "pid_started": 0.0, "time": 0.0})
    assert unfinished_predecessor(tmp_path, "weekly", "own") == "away"
    old = claim.stat().st_mtime - SILENT_CLAIM_S - 1
    os.utime(claim, (old, old))
    assert unfinished_predecessor(tmp_path, "weekly", "own") is None
    assert sorted(path.name for path in folder.iterdir()) == ["1.json", "2.json"]


def test_a_damaged_claim_holds_up_nothing_and_old_ones_are_removed(tmp_path: Path) -> None:
    folder = claims_folder(tmp_path, "weekly")
    folder.mkdir(parents=True)
    (folder / "1.json").write_text("{")
    for number in range(30):
        name = f"run{number}"
        assert unfinished_predecessor(tmp_path, "weekly", name) is None
        a_run(tmp_path, name, outcome=1)
    numbers = sorted(int(path.stem) for path in folder.glob("*.json"))
    assert numbers == list(range(12, 32))
    assert json.loads((folder / "31.json").read_text())["pid_started"] == started(psutil.Process())


def test_another_user_s_folder_is_not_spoken_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (a_run(tmp_path, "run").path / "origin.json").write_text("{")
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    said: list[str] = []
    assert look(tmp_path, said.append) == []
    assert said == []
