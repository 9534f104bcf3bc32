"""One process at a time drives a run; an older attempt gives way to a newer one."""

import subprocess
import sys

import pytest
from tasks.claim import claim, release, superseded

from cluster.decide import Kind
from slipstream.run_folder import RunFolder
from tasks.finish import finish_failed
from tasks.observe import observe
from tasks.outcome import NothingToResume, Outcome
from tasks.stop import request_own_cancel

HOLD = """
import sys
from slipstream.run_folder import RunFolder
from tasks.claim import claim
claim(RunFolder(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(tmp_path, "run")
    yield folder
    release(folder)


def test_another_process_is_refused_until_the_first_is_gone(run):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(NothingToResume, match=rf"run is running \(pid {holder.pid} on .*slipstream stop"):
            claim(run)
    finally:
        holder.kill()
        holder.communicate()
    claim(run)


def test_the_same_process_may_claim_again_and_children_do_not_keep_it(run):
    claim(run)
    claim(run)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        release(run)
        holder = subprocess.run(
            [sys.executable, "-c", HOLD, str(run.path)], stdin=subprocess.DEVNULL, capture_output=True
        )
        assert holder.stdout == b"held\n"
    finally:
        child.kill()
        child.communicate()


def test_an_older_attempt_gives_way_and_does_not_cancel_the_newer(run):
    first = run.begin_attempt(None, 0)
    assert superseded(run, first) is None
    assert observe(run, first, 0.0).cancel == ""
    second = run.begin_attempt(None, 0)
    assert "attempt 2 has taken over" in observe(run, first, 0.0).cancel
    assert observe(run, second, 0.0).cancel == ""
    request_own_cancel(run, first, "flow", "attempt 2 has taken over")
    finish_failed(run, first, Outcome(Kind.CANCELLED, "attempt 2 has taken over"))
    assert not run.cancel_file.exists()
    assert not (run.path / "outcome.json").exists()
    request_own_cancel(run, second, "flow", "interrupted")
    assert run.cancel_file.exists()
