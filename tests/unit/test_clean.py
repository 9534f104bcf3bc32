"""What of a storage root goes, what stays, and why."""

import os
import time
from pathlib import Path

import pytest

from cluster.jobs import record_job
from slipstream.config_file import dump_config, parse_config
from slipstream.learner.checkpoint import seal
from slipstream.run_folder import RunFolder, write_atomic, write_json
from tasks import clean as cleaning
from tasks.clean import REMAINS, Stays, remove, survey
from tasks.lease import held_lease
from tasks.origin import Origin, write_origin
from tests.old_runs import DAY, a_run, clean, goes, job, stays


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
