"""The guard of a process group, with real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from slipstream.serving.guard import Guard

GROUP = (
    "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; print(flush=True); time.sleep(600)'])"
)
GUARDED = f"""
import signal, subprocess, sys
from slipstream.serving.guard import Guard
child = subprocess.Popen([sys.executable, "-c", {GROUP!r}], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
guard = Guard(child.pid)
print(child.pid, guard._process.pid, flush=True)
signal.pause()
"""


@pytest.fixture
def group() -> Iterator[subprocess.Popen[bytes]]:
    """The leader of a process group of two."""
    child = subprocess.Popen([sys.executable, "-c", GROUP], start_new_session=True, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    yield child
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()


def test_a_killed_process_takes_the_whole_group_along() -> None:
    guarded = subprocess.Popen([sys.executable, "-c", GUARDED], stdout=subprocess.PIPE, text=True)
    assert guarded.stdout is not None
    with guarded, guarded.stdout:
        child, guard = (int(word) for word in guarded.stdout.readline().split())
        processes = [psutil.Process(guard), psutil.Process(child), *psutil.Process(child).children()]
        assert len(processes) == 3
        processes[0].terminate()  # a job's signals go to every process; the guard must outlive them
        guarded.kill()
        guarded.wait()
        _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []


def test_a_released_group_lives_on(group: subprocess.Popen[bytes]) -> None:
    guard = Guard(group.pid)
    guard.release()
    guard.release()
    assert group.poll() is None
    assert len(psutil.Process(group.pid).children()) == 1
