"""Removing old runs: never one in use, whatever happens at the same moment, and finished after a kill."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.jobs import record_job
from flows.cli.clean import _act
from slipstream.run_folder import write_json
from tasks import clean as cleaning
from tasks.clean import REMAINS, Gone, Stays, remove, survey, what_goes
from tasks.clean_policy import Found
from tasks.lease import claim, held_lease, release
from tests.old_runs import DAY, a_run, clean, goes, job, stays

HOLD = """
import sys
from slipstream.run_folder import RunFolder
from tasks.lease import claim
claim(RunFolder(sys.argv[1]), 2)
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_run_that_somebody_leads_stays(tmp_path: Path) -> None:
    run = a_run(tmp_path, "run")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        (found,) = survey(tmp_path)
        assert holder.stdout.readline() == b"held\n"
        assert stays(tmp_path) == {"run": f"pid {holder.pid} on {socket.gethostname()} leads it"}
        with pytest.raises(
            Stays, match=f"pid {holder.pid} on .* leads it, or removes it now: clean again"
        ):  # begun after it was looked at
            remove(tmp_path, found)
    finally:
        holder.kill()
        holder.communicate()
    assert set(goes(tmp_path)) == {"run"}


def test_a_leader_elsewhere_has_its_lease_to_give_a_sign(tmp_path: Path) -> None:
    runs = [a_run(tmp_path, name) for name in ("beats", "silent")]
    for run in runs:
        (run.path / "leases").mkdir()
        write_json(run.path / "leases" / "1.json", {"term": 1, "pid": 1, "host": "elsewhere", "started": 0.0})
    over = threading.Event()

    def beat() -> None:
        counter = 0
        while not over.wait(0.1):
            counter += 1
            write_json(runs[0].path / "lease.json", {"term": 1, "counter": counter, "released": False})

    thread = threading.Thread(target=beat)
    thread.start()
    said: list[str] = []
    try:
        rows = {row.found.id: row for row in what_goes(tmp_path, DAY, False, time.time(), said.append)}
    finally:
        over.set()
        thread.join()
    assert rows["beats"].why == "pid 1 on elsewhere leads it"
    assert rows["silent"].goes
    assert said == ["waiting for a sign of life of who led beats, silent"]


def test_a_run_begun_anew_since_it_was_looked_at_stays(tmp_path: Path) -> None:
    run = a_run(tmp_path, "run")
    (found,) = survey(tmp_path)
    run.begin_attempt(None, 0)
    with pytest.raises(Stays, match="begun anew"):
        remove(tmp_path, found)
    assert held_lease(run) is None
    (run.path / "fences" / "2.json").unlink()
    record_job(run, job(run))
    with pytest.raises(Stays, match="still there: learner"):
        remove(tmp_path, found)
    assert run.run_file.exists()
    shutil.rmtree(run.path)
    with pytest.raises(Gone, match="somebody else has removed it"):
        remove(tmp_path, found)


def test_the_lease_s_beat_does_not_make_the_folder_again(tmp_path: Path) -> None:
    run = a_run(tmp_path, "run")
    lease = claim(run, 2)
    (found,) = survey(tmp_path)
    remove(tmp_path, found)
    assert not lease._thread.is_alive()
    release(run)
    assert list(tmp_path.iterdir()) == []


RACE = """
import sys, time
from pathlib import Path
from slipstream.run_folder import RunFolder
from tasks.clean import remove, survey, Stays
from tasks.lease import claim, release
from tasks.outcome import NothingToResume
root, what = Path(sys.argv[1]), sys.argv[2]
found = {one.id: one for one in survey(root)}
print("ready", flush=True)
sys.stdin.readline()
for name in sorted(found):
    run = RunFolder(root / name)
    try:
        if what == "clean":
            remove(root, found[name])
        else:
            claim(run)
            (run.path / "outcome.json").rename(run.path / "outcome-1.json")
            run.begin_attempt(None, 0)
            (run.path / "resumed").touch()
        print(what, name, flush=True)
    except (Stays, NothingToResume, OSError):
        pass
"""


def test_of_a_removal_and_a_resume_at_the_same_moment_one_wins(tmp_path: Path) -> None:
    names = {f"run{number}" for number in range(8)}
    for name in names:
        a_run(tmp_path, name)
    both = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path), what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for what in ("clean", "resume")
    ]
    try:
        for process in both:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in both:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        lines = [line for process in both for line in process.communicate(timeout=120)[0].splitlines()]
    finally:
        for process in both:
            process.kill()
            process.wait()
    won = dict(reversed(line.split()) for line in lines)
    assert set(won) == names, "each has one winner"
    assert len(lines) == len(names)
    for name, what in won.items():
        assert (tmp_path / name / "resumed").exists() == (what == "resume")
        assert (tmp_path / name).exists() == (what == "resume")


KILLED = """
import os, signal, shutil, sys, time
from pathlib import Path
from tasks import clean
shutil.rmtree = lambda *_args, **_more: os.kill(os.getpid(), signal.SIGKILL)
(found,) = clean.survey(Path(sys.argv[1]))
clean.remove(Path(sys.argv[1]), found)
"""


def test_a_removal_that_was_killed_is_finished_by_the_next(tmp_path: Path) -> None:
    a_run(tmp_path, "run", days=1000)
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(f"{REMAINS}run-")
    assert not (left / "origin.json").exists(), "nobody takes it for a run"
    assert not (left / "run.toml").exists()
    assert (left / "outcome.json").exists()
    assert goes(tmp_path, days=10000) == {left.name: "a removal of it was cut short"}
    code, out = clean(tmp_path, "--older-than", "10000d", "--yes")
    assert (code, list(tmp_path.iterdir())) == (0, [])
    assert f"removed {left.name}" in out


def test_a_file_that_does_not_go_is_told_and_the_rest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run1", "run2"):
        a_run(tmp_path, name)
    unlink = os.unlink

    def stubborn(path: Any, *args: Any, **more: Any) -> None:
        if os.path.basename(path) == "token" and not done:
            done.append(path)
            raise OSError(16, "Device or resource busy", "token")
        unlink(path, *args, **more)

    done: list[Any] = []
    monkeypatch.setattr(os, "unlink", stubborn)
    code, out = clean(tmp_path, "--older-than", "30d", "--yes")
    assert code == 1
    assert "run1 is not all gone: token: Device or resource busy" in out
    assert "removed run2" in out
    code, out = clean(tmp_path, "--older-than", "30d", "--yes")
    assert (code, list(tmp_path.iterdir())) == (0, [])


def test_the_claim_of_a_cleaned_run_is_whole_json(tmp_path: Path) -> None:
    """A run that stays after a claim can be led by others at once."""
    run = a_run(tmp_path, "run")
    (found,) = survey(tmp_path)
    record_job(run, job(run))
    with pytest.raises(Stays):
        remove(tmp_path, found)
    assert json.loads((run.path / "lease.json").read_text())["released"]


def test_what_another_removal_has_removed_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        a_run(tmp_path, name)
    removal = cleaning.remove

    def after_another(root: Path, one: Found) -> None:
        shutil.rmtree(root / "b", ignore_errors=True)
        removal(root, one)

    monkeypatch.setattr(cleaning, "remove", after_another)
    assert _act(tmp_path, survey(tmp_path), False) == 0
    assert capsys.readouterr().out == "removed a\nb: somebody else has removed it\n"
