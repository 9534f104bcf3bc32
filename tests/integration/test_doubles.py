"""The doubles of learner and server under the supervisor that is, on this machine: what faults are later injected into."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import entry
from cluster.local_jobs import cancel_jobs, job_processes
from slipstream.config_file import parse_config
from slipstream.learner.checkpoint import complete_checkpoints
from slipstream.metrics.audit_records import audit_run, read_records
from slipstream.run_folder import RunFolder, read_json, write_json
from tasks.lease import release
from tasks.outcome import RunFailed
from tasks.prepare import all_jobs, prepare
from tasks.records import read_faults
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

    def start(*faults: dict[str, Any], max_restarts: int = 5, **trainer: Any) -> RunFolder:
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
                "recovery": {"max_restarts": max_restarts, "backoff": 0},
            }
        )
        run = prepare(config, "r").run
        started.append(run)
        return run

    yield start
    for run in started:
        release(run)
        cancel_jobs(all_jobs(run), grace_s=0.1)


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
    supervise(run, poll_s=0.1)
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
def test_what_a_fault_interrupts_goes_on(begin: Begin, fault: dict[str, Any]) -> None:
    run = begin({"id": "f", **fault})
    supervise(run, poll_s=0.1)
    assert (read_json(run.path / FOLDER / "reached-f.json") or {})["event"] == fault["event"]
    of_the_server = fault["event"].startswith("server")
    assert_whole(run, 1 if of_the_server else 2)
    assert [found.role for found in read_faults(run)] == ["server" if of_the_server else "learner"]
    if of_the_server:
        delivered = [line["pid"] for line in events_of(run) if line["event"] == "server.finish"]
        assert len(set(delivered)) == 2, "both servers got weights"
    else:
        row = audit_run(run).attempts[1]
        assert row.began_from == 4, "the newest complete checkpoint"
        assert 1 <= row.redone <= fault["where"]["step"] - 4


@pytest.mark.parametrize("deed", ["kill", "stop"])
def test_a_rollout_process_that_is_lost_is_respawned_in_place(begin: Begin, deed: str) -> None:
    run = begin({"id": "f", "event": "rollout.group", "count": 7, "deeds": [deed]}, rollout_worker_timeout=2.0)
    supervise(run, poll_s=0.1)
    assert_whole(run)
    assert names(run).count("rollout.respawn") == 1


def test_a_rollout_process_that_always_dies_ends_the_learner(begin: Begin) -> None:
    run = begin(
        {"id": "f", "event": "rollout.group", "deeds": ["kill"], "always": True},
        rollout_worker_restarts=2,
        max_restarts=0,
    )
    with pytest.raises(RunFailed, match="ended by SIGKILL, 2 restarts without a new group"):
        supervise(run, poll_s=0.1)
    assert names(run).count("rollout.start") == 3


def test_a_full_disk_is_final_and_leaves_the_checkpoint_before(begin: Begin) -> None:
    run = begin({"id": "f", "event": "save.middle", "where": {"step": 8}, "deeds": ["enospc"]})
    with pytest.raises(RunFailed, match="No space left on device"):
        supervise(run, poll_s=0.1)
    records = [read_json(path) or {} for path in (run.path / "exit").glob("learner-*.json")]
    assert [record["final"] for record in records] == [True]
    assert [step for step, _ in complete_checkpoints(run.output(1))] == [4]


def test_a_learner_whose_time_is_up_saves_and_is_resumed(begin: Begin) -> None:
    """TERM without a cancel request, as a preemption sends it."""
    run = begin({"id": "f", "event": "step", "where": {"step": 6}, "deeds": ["block"]})

    def preempt() -> None:
        wait_for(lambda: (run.path / FOLDER / "reached-f.json").exists(), "the sixth step")
        (learner,) = [job for job in all_jobs(run) if job.role == "learner"]
        leader = next(p for p in job_processes(learner) if "cluster.entry" in p.cmdline())
        leader.send_signal(signal.SIGTERM)
        wait_for(lambda: any((run.path / "signals").glob("*.json")), "the leader's word")
        (run.path / FOLDER / "go-f").touch()

    thread = threading.Thread(target=preempt)
    thread.start()
    supervise(run, poll_s=0.1)
    thread.join()
    assert_whole(run, 2)
    assert [found.kind for found in read_faults(run)] == ["left"]
    assert run.fence(2)["step"] == 6
    assert audit_run(run).redone == 0
