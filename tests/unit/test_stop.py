"""Stopping where the storage takes no more writes, and what is said of a job that could not leave a record."""

import shutil
import subprocess
import sys
import time
from collections import namedtuple

import psutil
import pytest

import tasks.prepare
import tasks.records
import tasks.stop
from cluster.intents import write_intent, writer_lives
from cluster.jobs import JOB_MARK, JobRecord, JobState, read_jobs, record_job
from cluster.local_jobs import job_view, started
from slipstream.run_folder import RunFolder
from tasks import lease as leases
from tasks.outcome import NothingToResume
from tasks.stop import stop


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(tmp_path, "run")
    folder.begin_attempt(None, 0)
    return folder


def record(run, pid, start_time):
    host = tasks.prepare.socket.gethostname()
    return JobRecord("run", "learner", 1, "abcd", "local", str(pid), host, start_time, time.time(), "start")


def full(*args):
    raise OSError(28, "No space left on device")


@pytest.fixture
def job(run):
    """A process of the run's learner job."""
    mark = {JOB_MARK: "run/a1/learner/abcd"}
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=mark)
    record_job(run, record(run, child.pid, started(psutil.Process(child.pid))))
    yield child
    child.kill()
    child.communicate()


def test_a_resume_of_a_finished_run_stops_what_a_killed_flow_left(run, job):
    (run.path / "result.json").write_text('{"attempt": 1}')
    with pytest.raises(NothingToResume, match=r"has finished.*\(stopped what was left running: learner"):
        tasks.prepare.check_resumable(run)
    assert not psutil.pid_exists(job.pid)
    with pytest.raises(NothingToResume, match=r"shows it$"):
        tasks.prepare.check_resumable(run)


def test_a_full_disk_does_not_keep_jobs_alive(run, job, monkeypatch):
    monkeypatch.setattr(tasks.stop, "write_json", full)
    monkeypatch.setattr(tasks.records, "append_jsonl", full)
    assert [job.role for job in stop(run, "me", "why", kill_after_s=20)] == ["learner"]
    assert not psutil.pid_exists(job.pid)
    tasks.records.log_event(run, 1, "not written")


@pytest.mark.parametrize(("free", "words"), [(0, "is full"), (1 << 30, "killed, or out of memory")])
def test_a_job_without_a_record_on_a_full_disk(run, monkeypatch, free, words):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 0, free))
    view = job_view(run, record(run, 2**22 + 1, 0.0))  # above the largest pid
    assert view.state is JobState.FAILED
    assert words in view.reason


def test_a_step_of_the_clock_takes_no_live_process_for_gone(run, job, monkeypatch):
    leases.claim(run)
    intent = write_intent(run, "learner", 1, "abcd", "local", "start")
    assert writer_lives(intent)
    real = psutil.boot_time()
    for module in (psutil, psutil._psplatform):
        monkeypatch.setattr(module, "boot_time", lambda: real + 3600)
    assert job_view(run, read_jobs(run, 1)[0]).state is JobState.RUNNING
    assert writer_lives(intent)
    assert leases.LeaseWatch(run, 60).look(0.0)
    leases.release(run)
