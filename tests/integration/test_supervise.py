"""The run's plain functions, without Prefect, on real jobs that stand in for server and learner."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import entry
from cluster.decide import Kind
from cluster.jobs import read_jobs
from cluster.local_jobs import cancel_jobs, job_processes
from slipstream.config_file import ConfigError, Problem, dump_config, parse_config
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, read_json, read_jsonl, write_json
from tasks import prepare as preparing
from tasks.finish import finish
from tasks.interrupt import uninterrupted
from tasks.lease import release
from tasks.outcome import NothingToResume, RunCancelled, RunFailed
from tasks.prepare import prepare, resume_prepare
from tasks.records import read_faults
from tasks.start import start_learner, start_role, start_server
from tasks.stop import stop
from tasks.stored import all_jobs
from tasks.supervise import supervise

pytestmark = pytest.mark.integration

STANDINS = Path(__file__).resolve().parents[1] / "standins"


def config_in(root: Path, **sections: dict[str, Any]) -> RunConfig:
    values: dict[str, Any] = {
        "model": {"name": "m"},
        "data": {"source": "d"},
        "server": {"gpus": 0},
        "learner": {"gpus": 0},
        "recovery": {"max_restarts": 0, "backoff": 0},
        "storage": {"root": str(root)},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return parse_config(values)


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RunFolder]]:
    """Starts both stand-ins of a new run; every process is gone afterwards."""
    monkeypatch.setenv("PYTHONPATH", f"{STANDINS}:{STANDINS.parents[1]}")
    for role in ("server", "learner"):
        monkeypatch.setitem(entry.LEADERS, role, f"standin_roles:{role}")
    monkeypatch.setattr("slipstream.preflight.check", lambda config: [])
    started: list[RunFolder] = []

    def start(faults: str = "", **sections: dict[str, Any]) -> RunFolder:
        monkeypatch.setenv("STANDIN", faults)
        prepared = prepare(config_in(tmp_path, **sections), "r")
        started.append(prepared.run)
        start_server(prepared.run)
        start_learner(prepared.run)
        return prepared.run

    yield start
    for run in started:
        release(run)
        cancel_jobs(all_jobs(run), grace_s=0.1)


def wait_for(path: Path, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < end, f"{path} was not written within {seconds} s"
        time.sleep(0.02)


def processes(run: RunFolder) -> list[Any]:
    return [process for job in all_jobs(run) for process in job_processes(job)]


def test_a_run_finishes_and_leaves_no_process(begin: Callable[..., RunFolder]) -> None:
    run = begin()
    reasons: list[str] = []
    outcome = supervise(run, lambda seen, decision: reasons.append(decision.reason), poll_s=0.1)
    assert outcome.kind is Kind.FINISH
    assert reasons[-1] == "the learner has finished"
    assert not processes(run)
    report = finish(run)
    assert report == run.report_file
    assert (read_json(run.path / "outcome.json") or {})["kind"] == "finish"
    assert (read_json(run.heartbeat_file("supervisor")) or {})["phase"] == "ended"
    events = [line["event"] for line in read_jsonl(run.records(1) / "supervisor.jsonl")]
    assert events[0] == "prepared"
    assert any(event.startswith("server submitted: job ") for event in events)
    with pytest.raises(NothingToResume, match="has finished"):
        resume_prepare(run.path)


def test_what_finished_while_nobody_led_it_is_told_by_a_resume(begin: Callable[..., RunFolder]) -> None:
    run = begin()
    release(run)
    wait_for(run.path / "result.json")
    prepared = resume_prepare(run.path)
    assert (prepared.attempt, run.attempts()) == (1, [1])
    assert supervise(run, poll_s=0.1).kind is Kind.FINISH
    assert (read_json(run.path / "outcome.json") or {})["kind"] == "finish"
    assert not processes(run)


def test_the_result_of_an_attempt_that_was_replaced_is_no_end(begin: Callable[..., RunFolder]) -> None:
    run = begin("learner:die")
    with pytest.raises(RunFailed):
        supervise(run, poll_s=0.1)
    run.begin_attempt(None, 0)
    write_json(run.path / "result.json", {"attempt": 1, "steps": 4})
    release(run)
    assert resume_prepare(run.path).attempt == 3


@pytest.mark.parametrize(
    ("faults", "limits", "role", "reason", "last_line"),
    [
        ("server:die", {}, "server", "exit code 3: server is out of luck", "server: RuntimeError: out of luck"),
        ("learner:die", {}, "learner", "exit code 3: learner is out of luck", "learner: RuntimeError: out of luck"),
        ("learner:kill", {}, "learner", "left no exit record", "learner about to be killed"),
        ("server:raise", {}, "server", "the server's leader is broken", "RuntimeError: the server's leader is broken"),
        (
            "server:hang",
            {"server": {"startup_timeout": 1.0}},
            "server",
            "server.startup_timeout = 1 s",
            "server child ",
        ),
        ("learner:hang", {"learner": {"step_timeout": 1.0}}, "learner", "learner.step_timeout = 1 s", "learner child "),
    ],
)
def test_what_breaks_ends_the_run_with_the_right_log(
    begin: Callable[..., RunFolder], faults: str, limits: dict[str, Any], role: str, reason: str, last_line: str
) -> None:
    run = begin(faults, **limits)
    for started in ("server", "learner"):
        wait_for(run.log_file(started, 1))
    with pytest.raises(RunFailed) as caught:
        supervise(run, poll_s=0.1)
    assert caught.value.role == role
    assert reason in caught.value.reason
    assert any(line.startswith(last_line) for line in caught.value.last_lines.splitlines())
    other = {"server": "learner child", "learner": "server child"}[role]
    assert other not in caught.value.last_lines
    assert caught.value.outcome.log in str(caught.value)
    assert not processes(run)


def test_a_stop_from_outside_ends_it_and_is_not_called_a_failure(begin: Callable[..., RunFolder]) -> None:
    run = begin("learner:hang")
    threading.Thread(target=lambda: stop(run, "anna", "enough")).start()
    with pytest.raises(RunCancelled, match="anna: enough"):
        supervise(run, poll_s=0.1)
    assert not processes(run)
    assert stop(run, "bert", "me too") == []
    assert (read_json(run.cancel_file) or {})["who"] == "anna"


def test_an_interrupt_cancels_on_storage_and_leaves_no_process(begin: Callable[..., RunFolder]) -> None:
    run = begin("learner:hang")

    def interrupt(_seen: Any, decision: Any) -> None:
        if decision.reason == "training":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        supervise(run, interrupt, poll_s=0.1)
    assert "KeyboardInterrupt" in (read_json(run.cancel_file) or {})["why"]
    assert not processes(run)


def test_resume_stops_what_was_left_and_begins_a_new_attempt(begin: Callable[..., RunFolder], tmp_path: Path) -> None:
    run = begin("learner:hang")
    stop(run, "anna", "enough")  # as a stop whose jobs come back to life below would leave it
    start_role(run, "server")
    left = read_jobs(run, 1)[-1]
    prepared = resume_prepare(run.path)
    assert prepared.attempt == 2
    assert "server (attempt 1" in prepared.notes[0]
    assert "from the start" in prepared.notes[1]
    assert not job_processes(left)
    assert not run.cancel_file.exists()
    assert (run.path / "cancel-1.json").exists()
    assert run.fence(2)["step"] == 0


RESUME = "import sys; from tasks.prepare import resume_prepare; print(resume_prepare(sys.argv[1]).notes)"
SUPERVISE = "import sys; from slipstream.run_folder import RunFolder; from tasks.supervise import supervise; "
SUPERVISE += "print(supervise(RunFolder(sys.argv[1]), poll_s=0.2).reason)"


def test_resume_of_a_running_run_is_refused(begin: Callable[..., RunFolder]) -> None:
    run = begin("learner:hang")
    done = threading.Event()

    def watch() -> None:
        with pytest.raises(RunCancelled):
            supervise(run, lambda seen, decision: done.set(), poll_s=0.1)

    thread = threading.Thread(target=watch)
    thread.start()
    done.wait(60)
    try:
        other = subprocess.run(
            [sys.executable, "-c", RESUME, str(run.path)], capture_output=True, text=True, check=False
        )
        assert "NothingToResume" in other.stderr
        assert f"is running (pid {os.getpid()} on" in other.stderr
    finally:
        stop(run, "test", "over")
        thread.join(60)


@pytest.mark.parametrize("fault", ["die once", "kill once", "raise once"])
def test_a_learner_that_breaks_once_is_resumed_and_the_server_kept(begin: Callable[..., RunFolder], fault: str) -> None:
    run = begin(f"learner:{fault}", recovery={"max_restarts": 2})
    server = run.assignment()["server"]
    kinds: list[Kind] = []
    outcome = supervise(run, lambda seen, decision: kinds.extend(a.kind for a in decision.actions), poll_s=0.1)
    assert outcome.kind is Kind.FINISH
    assert run.attempts() == [1, 2]
    assert run.assignment()["server"] == server
    assert kinds.count(Kind.STOP) == 1
    (found,) = read_faults(run)
    assert (found.role, found.kind, found.attempt) == ("learner", "died", 1)
    assert [job.why for job in read_jobs(run, 2)] == [found.reason]
    assert not processes(run)


def test_a_server_that_breaks_once_is_restarted_in_its_attempt(begin: Callable[..., RunFolder]) -> None:
    run = begin("server:die once", recovery={"max_restarts": 2})
    first = run.assignment()
    assert supervise(run, poll_s=0.1).kind is Kind.FINISH
    assert run.attempts() == [1]
    assert run.assignment()["learner"] == first["learner"]
    assert run.assignment()["server"] != first["server"]
    assert not processes(run)


def test_what_always_breaks_ends_the_run_with_its_cause(begin: Callable[..., RunFolder]) -> None:
    run = begin("learner:die", recovery={"max_restarts": 2})
    with pytest.raises(RunFailed, match=r"learner is out of luck \(3 strikes.*max_restarts = 2"):
        supervise(run, poll_s=0.1)
    assert run.attempts() == [1, 2]
    assert (read_json(run.path / "outcome.json") or {})["kind"] == "fail"
    assert not processes(run)


def test_what_a_killed_supervisor_left_is_taken_over(begin: Callable[..., RunFolder]) -> None:
    run = begin("learner:hang once", learner={"step_timeout": 1e6})
    release(run)
    first = subprocess.Popen([sys.executable, "-c", SUPERVISE, str(run.path)], stderr=subprocess.DEVNULL)
    try:
        wait_for(run.path / "lease.json")
        wait_for(run.heartbeat_file("supervisor"))
        onlooker = subprocess.Popen(
            [sys.executable, "-c", SUPERVISE, str(run.path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        first.kill()
        first.wait()
        alive = {process.pid for process in processes(run)}
        assert alive
        assigned = run.assignment()
        wait_for(run.path / "leases" / "3.json")
        assert run.assignment() == assigned
        stop(run, "anna", "enough")
        _, errors = onlooker.communicate(timeout=240)
        assert "RunCancelled" in errors
    finally:
        first.kill()
        first.wait()
    assert run.attempts() == [1]
    assert not processes(run)


def test_resume_takes_over_what_runs(begin: Callable[..., RunFolder]) -> None:
    run = begin("learner:hang once")
    release(run)
    wait_for(run.log_file("learner", 1))
    prepared = resume_prepare(run.path)
    assert prepared.attempt == 1
    assert prepared.notes[0].startswith("took over what runs: server (attempt 1, job")
    assert len(processes(run)) >= 4


def test_killed_between_the_job_and_its_record(
    begin: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next leader finds the job by its mark, and starts no second one."""
    run = begin("learner:hang")
    job = read_jobs(run, 1)[-1]
    lines = [line for line in run.jobs_file(1).read_text().splitlines() if job.incarnation not in line]
    run.jobs_file(1).write_text("".join(f"{line}\n" for line in lines))
    seen: list[Any] = []

    def look(observation: Any, decision: Any) -> None:
        seen.append(decision.actions)
        if decision.reason == "training":
            stop(run, "anna", "enough")

    with pytest.raises(RunCancelled):
        supervise(run, look, poll_s=0.1)
    assert {record.incarnation for record in read_jobs(run, 1)} == {record.incarnation for record in all_jobs(run)}
    assert len(all_jobs(run)) == 2
    assert not any(action.kind is Kind.START for actions in seen for action in actions)
    assert not processes(run)


def test_nothing_is_created_where_the_configuration_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: RunConfig) -> None:
        raise ConfigError([Problem("model.name", "m", "there is no such model")])

    monkeypatch.setattr("slipstream.preflight.check", refuse)
    for sections in (
        {"cluster": {"profile": "nowhere"}},
        {"cluster": {"profile": "slurm"}},
        {},
    ):
        with pytest.raises(ConfigError):
            prepare(config_in(tmp_path / "root", **sections), "r")
    assert list(tmp_path.iterdir()) == []


def test_the_stored_configuration_is_the_given_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.preflight.check", lambda config: [])
    config = config_in(tmp_path, trainer={"max_steps": 7})
    run = prepare(config, "r").run
    assert preparing.stored_config(run) == config
    assert run.run_file.read_text() == dump_config(config)
    assert preparing.started_in(run) == Path.cwd()
    assert run.path.stat().st_mode & 0o777 == 0o700


def test_a_second_ctrl_c_does_not_break_a_clean_up(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "from tasks.interrupt import uninterrupted\n"
        "try:\n"
        "    print('ready', flush=True); time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    with uninterrupted():\n"
        "        print('cleaning', flush=True)\n"
        "        input()\n"
        "        print('clean', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "cleaning\n"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        child.send_signal(number)
        time.sleep(0.05)
    output, _ = child.communicate("\n", timeout=60)
    assert output == "clean\n"
    assert child.returncode == 0


def test_a_held_back_signal_is_delivered_after_the_section() -> None:
    inside: list[str] = []

    def section() -> None:
        with uninterrupted(deliver_after=True):
            os.kill(os.getpid(), signal.SIGINT)
            inside.append("went on")

    with pytest.raises(KeyboardInterrupt):
        section()
    assert inside == ["went on"]
