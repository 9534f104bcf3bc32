"""The supervisor where storage stumbles, where it leads no more, and where another leads: nothing is ended by mistake."""

import errno
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flows.cli.watch
import tasks.supervise
from cluster.backend import JobRequest
from cluster.decide import Action, Decision, Kind, Observation, State
from cluster.jobs import JobRecord, JobState, JobView, record_job
from cluster.profile import ClusterError
from slipstream.config_file import dump_config, parse_config
from slipstream.run_folder import RunFolder, read_json, write_atomic, write_json
from tasks.finish import supervise_to_the_end
from tasks.lease import claim, release, take_over
from tasks.records import assign
from tasks.supervise import Supervisor, supervise


class Jobs:
    """A cluster whose jobs are as they are said to be."""

    def __init__(self) -> None:
        self.views: dict[str, JobView] = {}
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.looks = 0
        self.on_look: Any = lambda count: None

    def submit(self, run: RunFolder, request: JobRequest) -> JobRecord:
        self.submitted.append(request.role)
        job = JobRecord(run.run_id, request.role, request.attempt, request.incarnation, "local", "1", "h", 0.0, 0.0, "")
        record_job(run, job)
        return job

    def look(self, run: RunFolder, jobs: Sequence[JobRecord]) -> dict[str, JobView]:
        self.looks += 1
        self.on_look(self.looks)
        return {job.incarnation: self.views.get(job.incarnation, JobView(JobState.RUNNING)) for job in jobs}

    def adopt(self, run: RunFolder) -> list[JobRecord]:
        return []

    def cancel(self, run: RunFolder, jobs: Sequence[JobRecord], kill_after_s: float = 5.0) -> list[JobRecord]:
        self.cancelled += [job.incarnation for job in jobs]
        return list(jobs)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    made = Jobs()
    monkeypatch.setattr(tasks.supervise, "backend_for", lambda run: made)
    monkeypatch.setattr("tasks.stop.backend_anyway", lambda run: made)
    monkeypatch.setattr("tasks.finish.finish", lambda run: run.path)
    return made


@pytest.fixture
def run(tmp_path: Path) -> Any:
    folder = RunFolder.create(tmp_path, "r")
    values: dict[str, Any] = {"model": {"name": "m"}, "data": {"source": "d"}, "storage": {"root": str(tmp_path)}}
    write_atomic(folder.run_file, dump_config(parse_config(values)))
    folder.begin_attempt(None, 0)
    for role in ("server", "learner"):
        record_job(folder, JobRecord("r", role, 1, f"{role}-1", "local", "1", "h", 0.0, 0.0, "start"))
        assign(folder, 1, **{role: f"{role}-1"})
    yield folder
    release(folder)


def finished(run: RunFolder, jobs: Jobs) -> None:
    write_json(run.path / "result.json", {"attempt": 1})
    jobs.views["learner-1"] = JobView(JobState.FINISHED, 0)


def stumble(monkeypatch: pytest.MonkeyPatch, *names: str) -> SimpleNamespace:
    """Storage that answers no read of the files of these names (of any, without one) while `.on`."""
    state = SimpleNamespace(on=False, count=0)
    read = Path.read_text

    def read_text(self: Path, *args: Any, **kwargs: Any) -> str:
        if state.on and (not names or self.name in names):
            state.count += 1
            raise OSError(errno.EIO, "Input/output error", str(self))
        return read(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)
    return state


def test_storage_that_does_not_answer_for_a_while_ends_nothing(
    run: RunFolder, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = stumble(monkeypatch)
    real = Supervisor.sleep

    def sleep(self: Supervisor) -> None:
        real(self)
        storage.on &= storage.count < 4

    def on_look(count: int) -> None:
        storage.on = count == 2
        if count == 3:
            finished(run, jobs)

    monkeypatch.setattr(Supervisor, "sleep", sleep)
    jobs.on_look = on_look
    assert supervise(run, poll_s=0.01).kind is Kind.FINISH
    assert storage.count > 3
    assert not jobs.submitted


def test_an_assignment_that_cannot_be_read_is_not_an_empty_one(
    run: RunFolder, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = stumble(monkeypatch, "assignment.json")
    real = tasks.supervise.assigned_jobs
    calls = []

    def assigned(run: RunFolder) -> Any:
        calls.append(1)
        storage.on = len(calls) == 2
        try:
            return real(run)
        finally:
            storage.on = False

    monkeypatch.setattr(tasks.supervise, "assigned_jobs", assigned)
    jobs.on_look = lambda count: finished(run, jobs) if count == 4 else None
    assert supervise(run, poll_s=0.01).kind is Kind.FINISH
    assert not jobs.submitted


def test_a_leader_that_was_replaced_while_it_looked_ends_nothing(run: RunFolder, jobs: Jobs) -> None:
    """It was stopped in the middle of a look; the next leader has given the job up meanwhile."""

    def on_look(count: int) -> None:
        if count == 1:
            held = dict(tasks.lease._held)
            tasks.lease._held.clear()
            take_over(run, 60)  # another process
            tasks.lease._held.clear()
            tasks.lease._held.update(held)
            jobs.views["server-1"] = JobView(JobState.CANCELLED)

    jobs.on_look = on_look
    lease = claim(run)
    assert Supervisor(run, None, 0.01).lead(lease) is None
    assert not run.cancel_file.exists()
    assert read_json(run.path / "outcome.json") is None
    assert not jobs.cancelled


def test_one_who_cannot_supervise_says_nothing_of_the_run(
    run: RunFolder, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_profile(run: RunFolder) -> Jobs:
        raise ClusterError("there is no such profile on this host")

    monkeypatch.setattr(tasks.supervise, "backend_for", no_profile)
    with pytest.raises(ClusterError):
        supervise_to_the_end(run)
    assert read_json(run.path / "outcome.json") is None


def test_a_learner_that_was_told_to_leave_is_waited_for_without_a_hot_loop(
    run: RunFolder, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tasks.supervise, "decide", lambda *_: Decision((Action(Kind.LEAVE, "learner"),), "leave", State())
    )
    slept = []

    def sleep(self: Supervisor) -> None:
        slept.append(jobs.looks)

    monkeypatch.setattr(Supervisor, "sleep", sleep)

    class Enough(BaseException):
        pass

    def on_look(count: int) -> None:
        if count == 4:
            raise Enough

    jobs.on_look = on_look
    with pytest.raises(Enough):
        Supervisor(run, None, 0.01)._lead(claim(run))
    assert slept == [1, 2, 3]


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.EIO, "the terminal is gone")])
def test_a_terminal_that_is_gone_does_not_end_the_run(run: RunFolder, jobs: Jobs, error: OSError) -> None:
    def show(_seen: Observation, _decision: Decision) -> None:
        raise error

    jobs.on_look = lambda count: finished(run, jobs) if count == 3 else None
    assert supervise(run, show, poll_s=0.01).kind is Kind.FINISH


def test_a_full_disk_does_not_hide_why_the_run_ended(
    run: RunFolder, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    jobs.views["server-1"] = JobView(JobState.FAILED, 1, "out of luck")
    monkeypatch.setattr(tasks.supervise, "record_fault", full)
    monkeypatch.setattr("tasks.outcome.write_json", full)
    assert flows.cli.watch.supervise(run) == 1
    assert "the run's storage takes no writes" in capsys.readouterr().err
