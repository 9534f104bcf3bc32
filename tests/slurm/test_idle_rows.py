"""GPUs that would idle are given back: another user's job holds the nodes that one part of a run is queued for."""

from dataclasses import replace

import pytest

from cluster import recovery
from slipstream.process import REPLACED
from slipstream.run_folder import RunFolder, read_json, read_jsonl
from slurm.bed import Bed
from tasks.records import read_faults
from tests.chaos.drive import RUN_ID, SETTINGS, run_scenario
from tests.chaos.faults import BY_NAME, SEPARATE, End
from tests.chaos.plan import Injection, Scenario, scenario_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.integration]

FREE = 1
IDLE_MINUTES = 0.4


@pytest.fixture
def full(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> Bed:
    """A bed with one free node; the others are another user's for longer than the run may last."""
    monkeypatch.setitem(SETTINGS, "recovery", {**SETTINGS["recovery"], "max_idle_gpu_minutes": IDLE_MINUTES})
    nodes = len(bed.description.node_names) - FREE
    command = ["sbatch", f"-N{nodes}", "--exclusive", "-t", "120", "-o", "/dev/null", "--wrap", "sleep 3600"]
    bed.run("login", command, user="bed2")
    wait_until(lambda: "RUNNING" in bed.command("squeue", "-h", "-u", "bed2", "-o", "%T"), "another user's job")
    return bed


def scenario(fault: str, server_nodes: int, learner_nodes: int) -> Scenario:
    """Nodes come back once the fault's event was met, and something given back."""
    plan = {"id": "first", "event": BY_NAME[fault].event, "where": {}, "deeds": [], "always": False}
    injection = Injection("first", fault, plan, BY_NAME[fault].act, End.FINISHED)
    drawn = scenario_of("rank 0 killed", SEPARATE)
    return replace(drawn, server_nodes=server_nodes, learner_nodes=learner_nodes, injections=(injection,))


def run_of(bed: Bed, found: Scenario) -> RunFolder:
    return RunFolder(bed.shared / "chaos" / f"seed-{found.seed}" / "runs" / RUN_ID)


def test_a_server_whose_learner_is_queued_is_released_and_comes_back_with_it(full: Bed) -> None:
    planned = scenario("no nodes for the learner", server_nodes=1, learner_nodes=1 + FREE)
    result = run_scenario(full, planned, keep=True)
    assert result.problems == []
    run = run_of(full, planned)
    first, *_ = read_faults(run)
    assert (first.role, first.kind, first.step) == ("server", recovery.RELEASED, 0)
    assert "for a learner that is queued" in first.reason
    said = [line["event"] for line in read_jsonl(run.records(1) / "supervisor.jsonl")]
    assert "waiting for the cluster: the server starts once the learner's nodes are there" in said


def test_a_learner_whose_server_is_queued_leaves_and_comes_back_after_it(full: Bed) -> None:
    planned = scenario("no nodes for the server", server_nodes=1 + FREE, learner_nodes=1)
    result = run_scenario(full, planned, keep=True)
    assert result.problems == []
    run = run_of(full, planned)
    first, *_ = read_faults(run)
    assert (first.role, first.kind, first.step) == ("learner", recovery.RELEASED, 0)
    record = read_json(run.exit_file("learner", first.job))
    assert record is not None
    assert (record["returncode"], record["left"]) == (0, 0)
    assert record["reason"] != REPLACED
    said = [line["event"] for line in read_jsonl(run.records(1) / "supervisor.jsonl")]
    assert "waiting for the cluster: the learner starts once the server's nodes are there" in said
