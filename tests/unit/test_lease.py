"""One process at a time leads a run; another takes over when it falls silent."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.run_folder import RunFolder, read_json, write_json
from tasks import lease as leasing
from tasks.lease import LeaseWatch, claim, held_lease, lease_file, newest_term, release, try_lead
from tasks.outcome import NothingToResume

HOLD = """
import sys
from slipstream.run_folder import RunFolder
from tasks.lease import claim
lease = claim(RunFolder(sys.argv[1]), 6)
print("held", flush=True)
sys.stdin.readline()
print(lease.held(), flush=True)
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder.create(tmp_path, "run")
    yield folder
    release(folder)


def holder(run: RunFolder) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def test_another_process_is_refused_until_the_first_is_gone(run: RunFolder) -> None:
    first = holder(run)
    try:
        with pytest.raises(NothingToResume, match=rf"run is running \(pid {first.pid} on .*slipstream stop"):
            claim(run)
    finally:
        end(first)
    assert claim(run).held()
    assert newest_term(run) == 2


def test_the_same_process_may_claim_again_and_gives_it_back(run: RunFolder) -> None:
    assert claim(run) is claim(run)
    release(run)
    release(run)
    second = holder(run)  # at once: it was given back
    end(second)


def test_a_leader_that_was_stopped_finds_itself_replaced(run: RunFolder) -> None:
    first = holder(run)
    try:
        os.kill(first.pid, signal.SIGSTOP)
        watch = LeaseWatch(run, 5)
        assert watch.look(100.0)
        assert watch.look(104.9)
        assert not watch.look(105.1)  # by the observer's clock, since the beat last changed
        later = _lead_past(run, watch)
        assert later.held()
        os.kill(first.pid, signal.SIGCONT)
        out, _ = first.communicate(b"\n", timeout=60)
        assert out == b"False\n"
        assert later.held()
        later.release()
    finally:
        end(first)


def _lead_past(run: RunFolder, watch: LeaseWatch) -> leasing.Lease:
    """A term begun by an observer for whom the lease is over."""
    watch._since = float("-inf")
    lease = try_lead(run, watch, 5)
    assert lease is not None
    return lease


def test_a_leader_on_another_host_is_judged_by_its_beats(run: RunFolder) -> None:
    (run.path / "leases").mkdir()
    write_json(run.path / "leases" / "1.json", {"term": 1, "pid": 1, "host": "elsewhere", "started": 0.0})
    watch = LeaseWatch(run, 5)
    assert watch.look(0.0) == "pid 1 on elsewhere"
    write_json(lease_file(run), {"term": 1, "counter": 1, "released": False})
    assert watch.look(4.0)
    assert watch.moved
    assert watch.look(8.0)  # the beat changed at 4
    assert not watch.look(9.5)
    write_json(lease_file(run), {"term": 1, "counter": 2, "released": True})
    assert not watch.look(9.6)


def test_a_silent_leader_elsewhere_is_waited_for_and_a_live_one_refused(run: RunFolder) -> None:
    (run.path / "leases").mkdir()
    write_json(run.path / "leases" / "1.json", {"term": 1, "pid": 1, "host": "elsewhere", "started": 0.0})
    assert claim(run, 2).term == 2
    release(run)
    write_json(run.path / "leases" / "3.json", {"term": 3, "pid": 1, "host": "elsewhere", "started": 0.0})
    over = threading.Event()

    def beat() -> None:
        counter = 0
        while not over.wait(0.1):
            counter += 1
            write_json(lease_file(run), {"term": 3, "counter": counter, "released": False})

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(NothingToResume, match="pid 1 on elsewhere"):
            claim(run, 60)
    finally:
        over.set()
        thread.join()


def test_of_many_at_once_one_leads(run: RunFolder) -> None:
    start, won = threading.Barrier(8), []

    def race() -> None:
        watch = LeaseWatch(run, 5)
        start.wait()
        if lease := try_lead(run, watch, 5):
            won.append(lease)

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([lease for lease in won if lease.held()]) == 1
    for lease in won:
        lease.release()


def test_an_old_leaders_beat_is_not_taken_for_the_new_ones(run: RunFolder) -> None:
    old = claim(run, 5)
    write_json(run.path / "leases" / "2.json", {"term": 2, "pid": 1, "host": "elsewhere", "started": 0.0})
    write_json(lease_file(run), {"term": 2, "counter": 1, "released": False})
    assert held_lease(run) is None
    old._write()
    assert (read_json(lease_file(run)) or {})["term"] == 2
