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

import psutil
import pytest
from click.testing import CliRunner

from cluster.decide import Kind
from cluster.jobs import JobRecord, record_job
from cluster.local_jobs import started
from flows.cli.main import main
from slipstream.config_file import dump_config, parse_config
from slipstream.learner.checkpoint import seal
from slipstream.run_folder import RunFolder, append_jsonl, write_atomic, write_json
from tasks import clean as cleaning
from tasks.clean import REMAINS, Stays, remove, survey, what_goes
from tasks.lease import claim, held_lease, release
from tasks.origin import Origin, write_origin
from tasks.outcome import Outcome, outcome_record

DAY = 86400.0


def a_run(
    root: Path, run_id: str, days: float | None = 45, held_out: float | None = None, sweep: str = "", name: str = "demo"
) -> RunFolder:
    """A run that ended so many days ago; None: it has not."""
    run = RunFolder.create(root, run_id)
    write_origin(run, Origin(sweep=sweep))
    values: dict[str, Any] = {"model": {"name": "m"}, "data": {"source": "d"}, "recovery": {"lease": 2.0}}
    write_atomic(run.run_file, dump_config(parse_config({**values, "name": name})))
    attempt = run.begin_attempt(None, 0)
    if held_out is not None:
        append_jsonl(run.records(attempt) / "metrics.jsonl", {"step": 1, "eval/reward": held_out, "reward": 0.1})
    if days is not None:
        record = outcome_record(Outcome(Kind.FINISH, "done"), attempt, time.time() - days * DAY)
        write_json(run.path / "outcome.json", record)
    return run


def job(run: RunFolder, **more: Any) -> JobRecord:
    me = {"host": socket.gethostname(), "job_id": str(os.getpid()), "start_time": started(psutil.Process())}
    values = {"run_id": run.run_id, "role": "learner", "attempt": 1, "incarnation": "i1", "executor": "local", **me}
    return JobRecord(**{**values, "submitted": 0.0, "why": "start", **more})


def goes(root: Path, days: float = 30, keep_best: bool = False) -> dict[str, str]:
    return {row.found.id: row.why for row in what_goes(root, days * DAY, keep_best, time.time()) if row.goes}


def stays(root: Path, days: float = 30, keep_best: bool = False) -> dict[str, str]:
    return {row.found.id: row.why for row in what_goes(root, days * DAY, keep_best, time.time()) if not row.goes}


def clean(root: Path, *argv: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["clean", "--root", str(root), *argv])
    return done.exit_code, done.output


def test_only_old_ended_runs_go_and_only_when_told(tmp_path: Path) -> None:
    a_run(tmp_path, "old")
    a_run(tmp_path, "young", days=3)
    a_run(tmp_path, "live", days=None)
    (tmp_path / "something else").mkdir()
    (tmp_path / "note.txt").write_text("")
    code, out = clean(tmp_path, "--older-than", "30d")
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()[1:4]] == [
        ["stays", "live"],
        ["goes", "old"],
        ["stays", "young"],
    ]
    assert "it ended 45 days ago" in out
    assert "1 of 3 go, " in out
    assert out.endswith("nothing was removed: --yes removes them\n")
    assert (tmp_path / "old").is_dir()
    code, out = clean(tmp_path, "--older-than", "30d", "--yes")
    assert code == 0
    assert "removed old\n" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["live", "note.txt", "something else", "young"]


def test_keep_best(tmp_path: Path) -> None:
    for number, reward in enumerate([0.2, 0.9, None]):
        a_run(tmp_path, f"r{number}", held_out=reward)
    assert stays(tmp_path, keep_best=True) == {"r1": "the best of those named demo"}
    code, out = clean(tmp_path, "--older-than", "2w", "--keep-best", "--yes")
    assert code == 0
    assert "0.900" in out
    assert [path.name for path in tmp_path.iterdir()] == ["r1"]


def test_a_sweep_stays_as_long_as_a_cell_of_it(tmp_path: Path) -> None:
    sweep = tmp_path / "s"
    sweep.mkdir()
    (sweep / "sweep.toml").write_text("[axes]\n")
    write_origin(RunFolder(sweep), Origin())
    write_json(sweep / "outcome.json", {"kind": "finish", "time": time.time() - 45 * DAY})
    a_run(tmp_path, "s-c00", sweep="s", held_out=0.2)
    a_run(tmp_path, "s-c01", sweep="s", held_out=0.4)
    assert stays(tmp_path, keep_best=True)["s"] == "its cell s-c01 stays"
    assert set(goes(tmp_path)) == {"s", "s-c00", "s-c01"}
    code, out = clean(tmp_path, "--older-than", "30d", "--yes")
    assert (code, list(tmp_path.iterdir())) == (0, [])
    assert out.splitlines()[-1] == "removed s", "after its cells"


def test_a_cell_whose_sweep_was_begun_anew_since_it_was_looked_at_stays(tmp_path: Path) -> None:
    a_run(tmp_path, "s-c00", sweep="s")
    (found,) = survey(tmp_path)
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "sweep.toml").write_text("[axes]\n")
    with pytest.raises(Stays, match="its sweep s has been begun anew"):
        remove(tmp_path, found)


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": "finish", "time": "yesterday"}'])
def test_what_cannot_be_read_stays(tmp_path: Path, text: str) -> None:
    run = a_run(tmp_path, "run")
    (run.path / "outcome.json").write_text(text)
    assert stays(tmp_path)["run"].startswith(f"it cannot be read: {run.path / 'outcome.json'} is damaged")
    run.run_file.write_text("[")
    (run.path / "outcome.json").write_text('{"time": 1}')
    assert "cannot be read" in stays(tmp_path)["run"]


def test_a_run_that_is_only_being_prepared_stays(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "run")
    write_origin(run, Origin())
    assert stays(tmp_path) == {"run": "it has not ended"}


def test_a_run_that_was_begun_anew_has_not_ended(tmp_path: Path) -> None:
    a_run(tmp_path, "run").begin_attempt(None, 0)
    assert stays(tmp_path) == {"run": "it has not ended"}


def test_live_jobs_and_a_silent_scheduler_keep_a_run(tmp_path: Path) -> None:
    here = a_run(tmp_path, "here")
    record_job(here, job(here))
    away = a_run(tmp_path, "away")
    record_job(away, job(away, host="elsewhere"))
    ended = a_run(tmp_path, "ended")
    record_job(ended, job(ended, start_time=0.0))
    said = stays(tmp_path)
    assert said["here"] == f"still there: learner (job {os.getpid()}, running)"
    assert said["away"].startswith("nothing is known of its jobs: it runs on elsewhere")
    assert set(goes(tmp_path)) == {"ended"}


def test_slurm_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path, "run")
    record_job(run, job(run, executor="slurm", job_id="17"))
    (tmp_path / "profile.toml").write_text('executor = "slurm"\n')
    write_atomic(
        run.run_file,
        dump_config(
            parse_config(
                {
                    "model": {"name": "m"},
                    "data": {"source": "d"},
                    "cluster": {"profile": str(tmp_path / "profile.toml")},
                }
            )
        ),
    )
    monkeypatch.setenv("PATH", str(tmp_path))  # no squeue there
    assert stays(tmp_path)["run"].startswith("nothing is known of its jobs: ")


def test_another_instance_s_and_another_user_s_runs_are_left_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_INSTANCE", "mine")
    write_origin(a_run(tmp_path, "theirs"), Origin(instance="other"))
    write_origin(a_run(tmp_path, "mine"), Origin(instance="mine"))
    assert stays(tmp_path) == {"theirs": "it is of the instance other (SLIPSTREAM_INSTANCE)"}
    monkeypatch.setattr(cleaning.os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    assert set(stays(tmp_path)) == {"theirs", "mine"}
    assert all(why.startswith("it is ") and why.endswith("'s") for why in stays(tmp_path).values())


def test_links_are_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    target = a_run(outside, "run")
    (root / "linked").symlink_to(target.path)
    (outside / "data").mkdir()
    (outside / "data" / "precious").write_text("x")
    inner = a_run(root, "inner")
    (inner.path / "data").symlink_to(outside / "data")
    (root / f"{REMAINS}x-1").symlink_to(outside / "data")
    code, out = clean(root, "--older-than", "30d", "--yes")
    assert code == 0
    assert "it is a symbolic link, which is not followed" in out
    assert sorted(path.name for path in root.iterdir()) == [f"{REMAINS}x-1", "linked"]
    assert (outside / "data" / "precious").read_text() == "x"
    assert target.run_file.exists()


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
        with pytest.raises(Stays, match="is running"):  # begun after it was looked at
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
    with pytest.raises(Stays, match="not there any more"):
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


def checkpoint(run: RunFolder, step: int, sealed: bool = True) -> Path:
    path = run.output(1) / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "weights").write_text("w" * 1000)
    if sealed:
        seal(path)
    return path


def test_checkpoints_only_keeps_the_newest_complete_one_and_all_records(tmp_path: Path) -> None:
    run = a_run(tmp_path, "run", held_out=0.5)
    paths = [checkpoint(run, step, sealed=step != 30) for step in (10, 20, 30)]
    none = a_run(tmp_path, "none")
    checkpoint(none, 10, sealed=False)
    code, out = clean(tmp_path, "--older-than", "30d", "--checkpoints-only", "--yes")
    assert code == 1
    assert "none stays: it has no complete checkpoint" in out
    assert "run: freed" in out
    assert [path.exists() for path in paths] == [False, True, False]
    assert (run.records(1) / "metrics.jsonl").exists()
    assert (none.output(1) / "checkpoint-10").exists()
    assert held_lease(run) is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ("--older-than", "30 days"),
            "'30 days' is no duration: write a whole number and h, d or w, like 12h, 30d or 2w",
        ),
        ((), "Missing option '--older-than'"),
    ],
)
def test_what_is_refused(tmp_path: Path, argv: tuple[str, ...], words: str) -> None:
    a_run(tmp_path, "run")
    code, out = clean(tmp_path, *argv, "--yes")
    assert (code, words in " ".join(out.split())) == (2, True), out
    assert (tmp_path / "run").exists()
    code, out = clean(tmp_path / "none", "--older-than", "1d")
    assert (code, "there is no folder" in out) == (2, True)


def test_the_claim_of_a_cleaned_run_is_whole_json(tmp_path: Path) -> None:
    """A run that stays after a claim can be led by others at once."""
    run = a_run(tmp_path, "run")
    (found,) = survey(tmp_path)
    record_job(run, job(run))
    with pytest.raises(Stays):
        remove(tmp_path, found)
    assert json.loads((run.path / "lease.json").read_text())["released"]
