"""Files of a run: whole or not at all, private, fenced."""

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream.run_folder as run_folder
from slipstream.run_folder import (
    RunFolder,
    RunFolderError,
    append_jsonl,
    new_run_id,
    read_json,
    read_jsonl,
    write_atomic,
    write_json,
)

ROOT = Path(__file__).resolve().parents[2]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def loose_umask():
    old = os.umask(0)
    yield
    os.umask(old)


def test_a_run_is_private_to_its_user(tmp_path, loose_umask):
    run = RunFolder.create(tmp_path / "storage", "r1")
    assert mode(run.path) == 0o700
    assert {mode(p) for p in run.path.iterdir()} == {0o700}
    assert mode(run.token_file) == 0o600
    run.begin_attempt(None, 0)
    write_json(run.endpoint_file(), {})
    assert mode(run.fence_file(1)) == mode(run.endpoint_file()) == 0o600


def test_each_run_has_a_token_of_its_own(tmp_path):
    tokens = [RunFolder.create(tmp_path, name).token_file.read_text().strip() for name in ("a", "b")]
    assert len(set(tokens)) == 2
    assert all(len(token) >= 43 for token in tokens)  # 32 random bytes


def test_an_existing_run_is_not_made_again(tmp_path):
    token = RunFolder.create(tmp_path, "r").token_file.read_text()
    with pytest.raises(RunFolderError, match="exists"):
        RunFolder.create(tmp_path, "r")
    assert RunFolder(tmp_path / "r").token_file.read_text() == token


def test_a_folder_without_a_run_is_not_opened(tmp_path):
    with pytest.raises(RunFolderError, match=r"run\.toml"):
        RunFolder.open(tmp_path)


def test_run_ids_sort_and_differ():
    ids = {new_run_id("demo") for _ in range(20)}
    assert len(ids) > 15
    assert all(name.startswith("demo-20") for name in ids)


@pytest.mark.parametrize("failing", ["fsync", "replace", "chmod"])
def test_a_failed_write_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch, failing):
    path = tmp_path / "f.json"
    write_json(path, {"old": 1})

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run_folder.os, failing, full)
        with pytest.raises(OSError, match="No space"):
            write_json(path, {"new": 2})
    assert read_json(path) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["f.json"]
    write_json(path, {"new": 2})
    assert read_json(path) == {"new": 2}


def test_a_reader_never_sees_a_part(tmp_path):
    """A writer rewrites a file while we read it: every read is one of the two whole contents."""
    path = tmp_path / "f"
    contents = ["a" * 200_000, "b" * 300_000]
    write_atomic(path, contents[0])
    code = (
        "import sys, pathlib; from slipstream.run_folder import write_atomic\n"
        "for i in range(40): write_atomic(pathlib.Path(sys.argv[1]), 'ab'[i % 2] * (2 + i % 2) * 100_000)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT) as writer:
        reads = set()
        while writer.poll() is None:
            reads.add(path.read_text())
    assert writer.returncode == 0
    assert reads <= set(contents)


def test_reading_json(tmp_path):
    assert read_json(tmp_path / "none.json") is None
    (tmp_path / "torn.json").write_text('{"a": ')
    with pytest.raises(RunFolderError, match=r"torn\.json is damaged, it is no JSON"):
        read_json(tmp_path / "torn.json")
    (tmp_path / "torn.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"torn\.json is damaged"):
        read_json(tmp_path / "torn.json")


def test_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "deep" / "f.jsonl"
    assert read_jsonl(path) == []
    append_jsonl(path, {"a": 1})
    append_jsonl(path, {"b": "ü\n"})
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"c": ')
    assert read_jsonl(path) == [{"a": 1}, {"b": "ü\n"}]
    with open(path, "ab") as damaged:
        damaged.write(b'\n\xff\xfe\x00\n[1, 2]\n3\n{"d": 4}\n')
    assert read_jsonl(path) == [{"a": 1}, {"b": "ü\n"}, {"d": 4}]


def test_attempts_are_numbered_by_their_fences(tmp_path):
    run = RunFolder.create(tmp_path, "r")
    assert run.attempts() == []
    assert [run.begin_attempt(None, 0), run.begin_attempt("output/a1/checkpoint-4", 4)] == [1, 2]
    for n in range(3, 12):
        assert run.begin_attempt(None, 0) == n
    assert run.attempts() == list(range(1, 12))
    fence = run.fence(2)
    assert (fence["attempt"], fence["checkpoint"], fence["step"]) == (2, "output/a1/checkpoint-4", 4)
    assert sorted(p.name for p in (run.path / "fences").iterdir()) == sorted(f"{n}.json" for n in range(1, 12))


def test_a_fence_is_never_replaced(tmp_path, monkeypatch):
    """A resume that looked before another one made its fence gets the next number."""
    run = RunFolder.create(tmp_path, "r")
    assert run.begin_attempt(None, 0) == 1
    monkeypatch.setattr(RunFolder, "attempts", lambda self: [])
    assert run.begin_attempt("c", 5) == 2
    assert (run.fence(1)["step"], run.fence(2)["step"]) == (0, 5)


def test_without_hard_links_a_fence_is_still_exclusive(tmp_path, monkeypatch):
    def refuse(*_args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(run_folder.os, "link", refuse)
    run = RunFolder.create(tmp_path, "r")
    assert run.begin_attempt(None, 0) == 1
    monkeypatch.setattr(RunFolder, "attempts", lambda self: [])
    assert run.begin_attempt("c", 5) == 2
    assert run.fence(1)["step"] == 0
    assert len(list((run.path / "fences").iterdir())) == 2


def test_two_processes_never_get_the_same_attempt(tmp_path):
    run = RunFolder.create(tmp_path, "r")
    code = (
        "import sys; from slipstream.run_folder import RunFolder; run = RunFolder(sys.argv[1]); sys.stdin.readline()\n"
        "print(*[run.begin_attempt(None, 0) for _ in range(25)])"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(run.path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    numbers = [int(n) for process in both for n in process.communicate()[0].split()]
    assert sorted(numbers) == list(range(1, 51))
    assert [json.loads(run.fence_file(n).read_text())["attempt"] for n in range(1, 51)] == list(range(1, 51))


def test_records_beyond_a_later_fence_are_void(tmp_path):
    run = RunFolder.create(tmp_path, "r")

    def write(attempt, *steps):
        for step in steps:
            append_jsonl(run.records(attempt) / "m.jsonl", {"step": step} if step is not None else {"note": 1})

    run.begin_attempt(None, 0)
    write(1, 1, 2, 3, None)
    run.begin_attempt("c", 2)
    write(1, 4)  # a cut-off writer goes on
    write(2, 3, 4, 5)
    run.begin_attempt("c", 4)
    write(3, 5)
    assert run.void_after() == {1: 2, 2: 4}
    merged = [(line["attempt"], line.get("step")) for line in run.merged_records("m.jsonl")]
    assert merged == [(1, 1), (1, 2), (1, None), (2, 3), (2, 4), (3, 5)]


def test_what_was_dropped_after_the_last_step_is_kept_where_the_checkpoint_knows_it(tmp_path):
    run = RunFolder.create(tmp_path, "r")

    def write(attempt, *steps):
        for step in steps:
            append_jsonl(run.records(attempt) / "ledger.jsonl", {"step": step})
            append_jsonl(run.records(attempt) / "metrics.jsonl", {"step": step})

    def kept(name):
        return [(line["attempt"], line["step"]) for line in run.merged_records(name)]

    checkpoint = "output/a1/checkpoint-2"
    run.begin_attempt(None, 0)
    write(1, 1, 2, 3)
    run.begin_attempt(checkpoint, 2, (1, 3))
    assert kept("ledger.jsonl") == [(1, 1), (1, 2), (1, 3)]
    assert kept("metrics.jsonl") == [(1, 1), (1, 2)]
    write(2, 3)  # with more epochs it goes on; this attempt's own is void once the next begins at the same checkpoint
    run.begin_attempt(checkpoint, 2, (1, 3))
    assert kept("ledger.jsonl") == [(1, 1), (1, 2), (1, 3)]
    assert run.void_after() == {1: 2, 2: 2}


def test_the_lowest_later_fence_counts(tmp_path):
    run = RunFolder.create(tmp_path, "r")
    for step in (0, 10, 5):
        run.begin_attempt(None, step)
    assert run.void_after() == {1: 5, 2: 5}


def test_which_server_counts(tmp_path):
    run = RunFolder.create(tmp_path, "run")
    assert run.endpoint(1) is None
    write_json(run.endpoint_file(), {"url": "u", "incarnation": "a", "attempt": 2})
    assert run.endpoint(1) is None
    assert run.endpoint(2)["url"] == "u"
    write_json(run.assignment_file, {"attempt": 3, "server": "a", "learner": "l"})
    assert run.endpoint(3)["incarnation"] == "a", "kept over attempts"
    write_json(run.assignment_file, {"attempt": 2, "server": "b", "learner": "l"})
    assert run.endpoint(2) is None
    write_json(run.assignment_file, {"attempt": 3, "allocation": "a"})
    assert run.endpoint(3)
    write_json(run.assignment_file, {"attempt": 2, "learner": "l"})  # the server is not one of the run's jobs
    assert run.endpoint(2)
    run.endpoint_file().write_text("{torn")
    assert run.endpoint(2) is None


def test_a_file_that_cannot_be_read_is_not_one_that_is_not_there(tmp_path, monkeypatch):
    def stale(self, *args, **kwargs):
        raise OSError(errno.ESTALE, "Stale file handle")

    write_json(tmp_path / "a.json", {"x": 1})
    monkeypatch.setattr(Path, "read_text", stale)
    with pytest.raises(OSError, match="Stale"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize(
    "run_id", ["", "..", "../x", "/tmp/x", "a/b", "a b", "a:b", "a\n", ".hidden", "-x", "é", "$(id)", "x" * 129]
)
def test_an_id_that_is_no_name_of_a_folder_in_the_root_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(RunFolderError, match="cannot name a run: letters, digits"):
        RunFolder.create(tmp_path / "runs", run_id)
    assert not list(tmp_path.iterdir())
