"""Children that cannot outlive their parent; heartbeats; exit records."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import slipstream.process as process
from slipstream.process import Heartbeat, how_ended, importing, last_lines, spawn, stop, write_exit
from slipstream.run_folder import RunFolder, read_json

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0


def wait_for(condition, what: str):
    end = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(0.01)
    return value


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def pids_in(path: Path, count: int) -> list[int]:
    """The pids that `count` processes wrote, one a line."""
    return wait_for(
        lambda: len(found := path.read_text().split() if path.is_file() else []) >= count and [int(p) for p in found],
        f"{count} pids in {path}",
    )


# a child that starts a grandchild; both write their pid and sleep. argv: file, ignore TERM?
TREE = """
import os, signal, subprocess, sys, time
if sys.argv[2] == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
def note(pid):
    with open(sys.argv[1], "a") as file:
        file.write(f"{pid}\\n")
import psutil
note(psutil.Process().children()[0].pid)
note(os.getpid())
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("term", "code"), [("obey", -signal.SIGTERM), ("ignore", -signal.SIGKILL)])
def test_stop_ends_the_whole_tree(tmp_path, term, code):
    child = spawn([sys.executable, "-c", TREE, str(tmp_path / "pids"), term], tmp_path / "logs" / "c.log")
    grandchild, pid = pids_in(tmp_path / "pids", 2)
    assert pid == child.pid
    assert stop(child, grace_s=0.3 if term == "ignore" else DEADLINE_S) == code
    wait_for(lambda: gone(pid) and gone(grandchild), "the tree has gone")


def test_stop_of_a_child_that_has_ended_ends_what_it_left(tmp_path):
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "open(sys.argv[1], 'w').write(str(p.pid)); sys.exit(3)"
    )
    child = spawn([sys.executable, "-c", code, str(tmp_path / "pids")], tmp_path / "c.log")
    (left,) = pids_in(tmp_path / "pids", 1)
    wait_for(lambda: child.poll() is not None, "the child has ended")
    assert not gone(left)
    assert stop(child) == 3
    wait_for(lambda: gone(left), "its child has gone")


def test_a_spawned_child_dies_with_its_parent(tmp_path):
    parent_code = (
        "import sys, time, pathlib; from slipstream.process import spawn\n"
        "c = spawn([sys.executable, '-c', 'import time; time.sleep(600)'], pathlib.Path(sys.argv[1]) / 'c.log')\n"
        "(pathlib.Path(sys.argv[1]) / 'pids').write_text(str(c.pid)); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code, str(tmp_path)], cwd=ROOT)
    try:
        (child,) = pids_in(tmp_path / "pids", 1)
        assert not gone(child)
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: gone(child), "the child died with its parent")


def test_die_with_parent_asks_for_the_signal_and_notices_a_dead_parent(tmp_path):
    child_code = (
        "import os, sys, time; from slipstream.process import die_with_parent; die_with_parent(int(sys.argv[2]))\n"
        "open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"
    )
    # a parent that says a wrong pid: as if it had died before the call
    late = subprocess.run([sys.executable, "-c", child_code, str(tmp_path / "pids"), "1"], cwd=ROOT, timeout=DEADLINE_S)
    assert late.returncode == 1
    assert not (tmp_path / "pids").exists()
    parent_code = (
        "import os, subprocess, sys; c = subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2],"
        " str(os.getpid())]); c.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code, child_code, str(tmp_path / "pids")], cwd=ROOT)
    try:
        (child,) = pids_in(tmp_path / "pids", 1)
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: gone(child), "the child died with its parent")


def test_the_log_is_private_and_appended_to(tmp_path):
    log = tmp_path / "deep" / "c.log"
    for word in ("first", "second"):
        child = spawn([sys.executable, "-c", f"import sys; print('{word}'); sys.stderr.write('!')"], log)
        assert child.wait(DEADLINE_S) == 0
    text = log.read_text()
    assert text.index("first") < text.index("second")
    assert text.count("!") == 2
    assert log.stat().st_mode & 0o777 == 0o600


def test_the_environment_is_the_one_given(tmp_path):
    child = spawn(
        [sys.executable, "-c", "import os; print(os.environ.get('ONLY'), os.environ.get('HOME'), os.getcwd())"],
        tmp_path / "c.log",
        env={"ONLY": "this"},
        cwd=tmp_path,
    )
    assert child.wait(DEADLINE_S) == 0
    assert (tmp_path / "c.log").read_text().split() == ["this", "None", str(tmp_path)]


def test_the_last_lines_of_a_long_log(tmp_path):
    log = tmp_path / "c.log"
    assert last_lines(log) == ""
    log.write_bytes(b"\xff\n" + b"\n".join(b"line %d" % i for i in range(20_000)))
    assert last_lines(log, 2) == "line 19998\nline 19999"
    log.write_bytes(b"\xff bytes")
    assert last_lines(log).endswith(" bytes")


def test_a_heartbeat_goes_on_by_itself_and_writes_changes_soon(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(process, "HEARTBEAT_WRITE_S", 0.01)
    run = RunFolder.create(tmp_path, "r")
    path = run.heartbeat_file("learner")
    beat = Heartbeat(run, "learner", 3, "inc").start()
    try:
        first = read_json(path)
        assert (first["role"], first["attempt"], first["incarnation"], first["pid"]) == (
            "learner",
            3,
            "inc",
            os.getpid(),
        )
        wait_for(lambda: read_json(path)["counter"] > first["counter"] + 1, "beats")
        beat.update(phase="training", progress=7)
        wait_for(lambda: (read_json(path)["phase"], read_json(path)["progress"]) == ("training", 7), "the change")
    finally:
        beat.stop(phase="stopped")
    last = read_json(path)
    assert last["phase"] == "stopped"
    assert last["progress"] == 7


def test_a_full_disk_does_not_end_a_process_that_beats(tmp_path, monkeypatch):
    run = RunFolder.create(tmp_path, "r")
    beat = Heartbeat(run, "learner", 1, "inc")

    def full(*_args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(process, "write_json", full)
        beat.update(phase="training")
    beat.stop(progress=1)
    assert read_json(run.heartbeat_file("learner"))["phase"] == "training"


@pytest.mark.parametrize(("code", "kept"), [(0, ""), (1, "boom")])
def test_an_exit_record_holds_the_last_lines_of_a_failure(tmp_path, code, kept):
    run = RunFolder.create(tmp_path, "r")
    log = run.log_file("server", 2)
    log.write_text("boom\n")
    write_exit(run, "server", "inc", 2, code, "it ended", log)
    record = read_json(run.exit_file("server", "inc"))
    assert (record["returncode"], record["attempt"], record["reason"], record["last_lines"]) == (
        code,
        2,
        "it ended",
        kept,
    )


@pytest.mark.parametrize(
    ("code", "words"), [(0, "with code 0"), (3, "with code 3"), (-9, "by SIGKILL"), (-200, "by signal 200")]
)
def test_how_a_child_ended(code, words):
    assert how_ended(code) == words


def test_nothing_is_collected_while_modules_are_imported() -> None:
    assert gc.isenabled()
    try:
        with importing():
            assert not gc.isenabled()
            kept = [object() for _ in range(10)]
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        assert not [one for one in gc.get_objects() if one is kept], "what was made meanwhile is never looked at again"
    finally:
        gc.unfreeze()


def test_a_failed_import_leaves_the_collector_as_it_was() -> None:
    try:
        with pytest.raises(ImportError), importing():
            raise ImportError
        assert gc.isenabled()
        gc.disable()
        with importing():
            pass
        assert not gc.isenabled(), "whoever switched it off had a reason"
    finally:
        gc.enable()
        gc.unfreeze()
