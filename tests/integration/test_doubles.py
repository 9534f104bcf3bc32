"""The doubles of learner and server under the supervisor that is, on this machine: what faults are later injected into."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster import entry
from cluster.local_jobs import cancel_jobs, job_processes
from slipstream.config_file import parse_config
from slipstream.learner.checkpoint import complete_checkpoints
from slipstream.metrics.audit_records import audit_run, read_records
from slipstream.run_folder import RunFolder, read_json, read_jsonl, write_json
from tasks.outcome import RunFailed
from tasks.prepare import all_jobs, prepare, resume_prepare
from tasks.start import start_learner, start_server
from tasks.supervise import supervise
from tests.doubles.cli import LEADERS
from tests.doubles.events import FOLDER, PLAN, events_of

pytestmark = pytest.mark.integration

PROMPTS = 12
EPOCHS = 2
PATIENCE_S = 90.0
Begin = Callable[..., RunFolder]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Starts both doubles of a new run, with a plan of faults; every process is gone afterwards."""
    for role, leader in LEADERS.items():
        monkeypatch.setitem(entry.LEADERS, role, leader)
    monkeypatch.setattr("slipstream.preflight.check", lambda config: [])
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(PROMPTS)))
    started: list[RunFolder] = []

    def start(*faults: dict[str, Any], **trainer: Any) -> RunFolder:
        write_json(tmp_path / PLAN, list(faults))
        settings = {"num_train_epochs": EPOCHS, "num_generations": 3, "save_steps": 4, "save_total_limit": 2}
        config = parse_config(
            {
                "model": {"name": "m"},
                "data": {"source": str(data)},
                "server": {"gpus": 0},
                "learner": {"gpus": 0, "processes_per_node": 2},
                "trainer": settings | trainer,
                "storage": {"root": str(tmp_path)},
            }
        )
        run = prepare(config, "r").run
        started.append(run)
        begin_attempt(run, 1)
        return run

    yield start
    for run in started:
        cancel_jobs(all_jobs(run), grace_s=0.1)


def begin_attempt(run: RunFolder, attempt: int) -> None:
    start_server(run, attempt)
    start_learner(run, attempt)


def resumed(run: RunFolder) -> int:
    attempt = resume_prepare(run.path).attempt
    begin_attempt(run, attempt)
    return attempt


def wait_for(condition: Callable[[], object], what: str) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.02)
    return value


def names(run: RunFolder) -> list[str]:
    return [line["event"] for line in events_of(run)]


def assert_whole(run: RunFolder, attempts: int = 1) -> None:
    """Every prompt settled once, and no process left."""
    found = audit_run(run)
    assert found.findings == ()
    assert (found.finished, found.settled, len(found.attempts)) == (True, PROMPTS * EPOCHS, attempts)
    assert not [process for job in all_jobs(run) for process in job_processes(job)]


def test_a_run_without_faults(begin: Begin) -> None:
    run = begin(save_steps=1, save_total_limit=100)
    supervise(run, 1, poll_s=0.1)
    assert_whole(run)
    events = events_of(run)
    assert {"server.ready", "learner.start", "resume", "save.middle", "sync.middle", "rollout.group"} <= set(names(run))
    assert {line["rank"] for line in events if line["event"] == "rank.step"} == {1}
    steps = (read_json(run.path / "result.json") or {})["steps"]
    assert steps >= 10
    assert len(complete_checkpoints(run.output(1))) == steps
    assert any(checkpoint.held for checkpoint in read_records(run).checkpoints), "a checkpoint splits a group"
    lines = list(run.merged_records("ledger.jsonl"))
    assert {reason for line in lines for reason in line["outcomes"]} >= {"trained", "zero_std", "oversize_prompt"}
    assert max(line["versions"][0] for line in lines if line["versions"]) > 5, "what is trained late was generated late"


@pytest.mark.parametrize(
    "fault",
    [
        {"event": "step", "where": {"step": 6}, "deeds": ["kill"]},
        {"event": "rank.step", "where": {"step": 6}, "deeds": ["kill"]},
        {"event": "save.middle", "where": {"step": 8}, "deeds": ["kill"]},
        {"event": "save.end", "where": {"step": 8}, "deeds": ["truncate", "kill"]},
        {"event": "sync.middle", "where": {"step": 6}, "deeds": ["kill"]},
        {"event": "server.generate", "count": 9, "deeds": ["kill"]},
    ],
    ids=lambda fault: f"{fault['event']}-{fault['deeds'][0]}",
)
def test_what_a_fault_interrupts_is_resumed(begin: Begin, fault: dict[str, Any]) -> None:
    run = begin({"id": "f", **fault})
    with pytest.raises(RunFailed):
        supervise(run, 1, poll_s=0.1)
    assert (read_json(run.path / FOLDER / "reached-f.json") or {})["event"] == fault["event"]
    attempt = resumed(run)
    supervise(run, attempt, poll_s=0.1)
    assert_whole(run, 2)
    row = audit_run(run).attempts[1]
    if "where" in fault:
        assert row.began_from == 4, "the newest complete checkpoint"
        assert 1 <= row.redone <= fault["where"]["step"] - 4


@pytest.mark.parametrize("deed", ["kill", "stop", "hang"])
def test_a_rollout_process_that_is_lost_is_respawned_in_place(begin: Begin, deed: str) -> None:
    run = begin({"id": "f", "event": "rollout.group", "count": 7, "deeds": [deed]}, rollout_worker_timeout=2.0)
    supervise(run, 1, poll_s=0.1)
    assert_whole(run)
    assert names(run).count("rollout.respawn") == 1


def test_a_rollout_process_that_always_dies_ends_the_learner(begin: Begin) -> None:
    run = begin({"id": "f", "event": "rollout.group", "deeds": ["kill"], "always": True}, rollout_worker_restarts=2)
    with pytest.raises(RunFailed, match="ended by SIGKILL, 2 restarts without a new group"):
        supervise(run, 1, poll_s=0.1)
    assert names(run).count("rollout.start") == 3


def test_a_stopped_rank_stops_the_others_and_their_progress(begin: Begin) -> None:
    """As in a collective: life without work, which only the supervisor's deadline ends."""
    run = begin({"id": "f", "event": "rank.step", "where": {"step": 5}, "deeds": ["stop"]})
    wait_for(lambda: (run.path / FOLDER / "reached-f.json").exists(), "the fault")
    first = wait_for(lambda: _standing(run), "rank 0 at its step")
    later = wait_for(lambda: _beats_after(run, first["counter"] + 1), "two more beats")
    assert (later["step"], later["progress"]) == (first["step"], first["progress"]) == (4, later["progress"])
    reached = read_json(run.path / FOLDER / "reached-f.json") or {}
    psutil.Process(reached["pid"]).send_signal(signal.SIGCONT)
    supervise(run, 1, poll_s=0.1)
    assert_whole(run)


def _standing(run: RunFolder) -> dict[str, Any] | None:
    beat = read_json(run.heartbeat_file("learner")) or {}
    return beat if beat.get("step") == 4 and beat.get("phase") == "training" else None


def _beats_after(run: RunFolder, counter: int) -> dict[str, Any] | None:
    beat = read_json(run.heartbeat_file("learner")) or {}
    return beat if beat["counter"] > counter else None


def test_a_full_disk_is_final_and_leaves_the_checkpoint_before(begin: Begin) -> None:
    run = begin({"id": "f", "event": "save.middle", "where": {"step": 8}, "deeds": ["enospc"]})
    with pytest.raises(RunFailed, match="No space left on device"):
        supervise(run, 1, poll_s=0.1)
    records = [read_json(path) or {} for path in (run.path / "exit").glob("learner-*.json")]
    assert [record["final"] for record in records] == [True]
    assert [step for step, _ in complete_checkpoints(run.output(1))] == [4]


def test_a_learner_whose_time_is_up_saves_and_leaves(begin: Begin) -> None:
    run = begin({"id": "f", "event": "step", "where": {"step": 6}, "deeds": ["block"]})
    wait_for(lambda: (run.path / FOLDER / "reached-f.json").exists(), "the sixth step")
    (learner,) = [job for job in all_jobs(run) if job.role == "learner"]
    (leader,) = [
        process
        for process in job_processes(learner)
        if any("run_role" in word or "_submit" in word for word in process.cmdline())
    ][-1:]
    leader.send_signal(signal.SIGTERM)
    wait_for(lambda: any((run.path / "signals").glob("*.json")), "the leader's word")
    (run.path / FOLDER / "go-f").touch()
    (path,) = wait_for(lambda: list((run.path / "exit").glob("learner-*.json")), "the end of the learner")
    record = read_json(path) or {}
    assert (record["returncode"], record["left"]) == (0, 6)
    assert not (run.path / "result.json").exists()
    assert [step for step, _ in complete_checkpoints(run.output(1))][-1] == 6
    attempt = resumed(run)
    supervise(run, attempt, poll_s=0.1)
    assert_whole(run, 2)
    assert audit_run(run).redone == 0


def test_a_new_server_of_the_attempt_gets_the_weights_again(begin: Begin) -> None:
    """Leaders started by hand, with an assignment as a supervisor writes it: the server is replaced under the learner."""
    run = begin({"id": "f", "event": "step", "where": {"step": 5}, "deeds": ["block"]})
    wait_for(lambda: (run.path / FOLDER / "reached-f.json").exists(), "the fifth step")
    (server,) = [job for job in all_jobs(run) if job.role == "server"]
    learner = read_json(run.heartbeat_file("learner")) or {}
    old = read_json(run.endpoint_file()) or {}
    (process,) = [p for p in job_processes(server) if "tests.doubles.server" in p.cmdline()]
    process.kill()
    wait_for(lambda: list((run.path / "exit").glob("server-*.json")), "the end of the server")
    second = start_server(run, 1)
    assert second is not None
    new = wait_for(lambda: _other(run, old["incarnation"]), "the new server")
    write_json(run.assignment_file, {"attempt": 1, "server": new["incarnation"], "learner": learner["incarnation"]})
    (run.path / FOLDER / "go-f").touch()
    supervise(run, 1, poll_s=0.1)
    assert_whole(run)
    delivered = [line["pid"] for line in events_of(run) if line["event"] == "server.finish"]
    assert len(set(delivered)) == 2, "both servers got weights"


def _other(run: RunFolder, incarnation: str) -> dict[str, Any] | None:
    endpoint = read_json(run.endpoint_file()) or {}
    return endpoint if endpoint.get("incarnation") != incarnation else None


def test_events_are_told_with_who_and_when(begin: Begin) -> None:
    run = begin(max_steps=3)
    supervise(run, 1, poll_s=0.1)
    steps = [line for line in events_of(run) if line["event"] == "step"]
    assert [(line["who"], line["attempt"], line["step"]) for line in steps] == [("rank-0", 1, n) for n in (1, 2, 3)]
    assert read_jsonl(run.records(1) / "metrics.jsonl")
