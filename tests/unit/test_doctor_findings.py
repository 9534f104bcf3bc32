"""What doctor makes of facts."""

from typing import Any

import pytest

from cluster.findings import (
    Finding,
    Level,
    Partition,
    gpus_of,
    judge_accounting,
    judge_clients,
    judge_nodes,
    judge_partition,
    judge_preemption,
    judge_times,
    judge_visibility,
    minutes_of,
    partition_of,
    settings_of,
)
from cluster.profile import ClusterProfile
from cluster.slurm import Shape

SHOWN = (
    "PartitionName=low Default=NO MaxNodes=2 MaxTime=1-00:00:00 State=UP GraceTime=30 PriorityTier=1 PreemptMode=REQUEUE\n"
    "PartitionName=main Default=YES MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP PriorityTier=10 PreemptMode=OFF"
)
NODES = "n1 gpu:a:4(S:0-1)\nn2 gpu:a:4(S:0-1)\nn3 (null)\n"
PROFILE = ClusterProfile(executor="slurm")


def node(**changes: Any) -> dict[str, Any]:
    good = {
        "host": "n1", "python": "/py", "version": "3.11.2", "umask": 0o077, "secrets": {}, "bound": 4, "seen_s": {"here": 0.2},
        "address": {"address": "10.0.0.1"}, "ports": {"free": 900}, "scratch": {"path": "/tmp", "free_gb": 50.0},
        "learner": {"version": "2.9", "gpus": 4}, "vllm": {"version": "0.11"},
    }  # fmt: skip
    return {**good, **changes}


def bad(findings: list[Finding]) -> dict[str, tuple[Level, str]]:
    return {one.check: (one.level, one.text) for one in findings if one.level is not Level.OK}


def test_slurms_words() -> None:
    assert [minutes_of(text) for text in ("1-00:00:00", "30:30", "UNLIMITED", "90")] == [1440, 30.5, None, 90]
    assert [gpus_of(text) for text in ("gpu:8", "gpu:h100:8(S:0-1),gpu:a:2", "(null)", "shard:8")] == [8, 10, 0, 0]
    assert settings_of("Configuration data\nKillWait                = 30 sec\nX = a=b\n") == {
        "KillWait": "30 sec",
        "X": "a=b",
    }
    assert partition_of(SHOWN, "low") == Partition("low", "UP", 1440, 2, "REQUEUE", 30.0, outranked=True)
    default = partition_of(SHOWN, None, NODES)
    assert default is not None
    assert (default.name, default.max_minutes, default.gpus) == ("main", None, {"n1": 4, "n2": 4, "n3": 0})
    assert partition_of(SHOWN, "none") is None


@pytest.mark.parametrize(
    ("changes", "shape", "words"),
    [
        ({}, Shape(2, 4), ""),
        ({"state": "DOWN"}, Shape(1, 1), "main is DOWN"),
        ({"max_minutes": 60.0}, Shape(1, 1), "time_limit = 1440 min, but main allows 60"),
        ({"max_nodes": 1}, Shape(2, 1), "needs 2 nodes, main gives a job 1"),
        ({}, Shape(3, 4), "needs 3 nodes with 4 GPUs, main has 2"),
    ],
)
def test_the_partition_against_the_profile(changes: dict, shape: Shape, words: str) -> None:
    found = Partition(**{"name": "main", "gpus": {"n1": 4, "n2": 4, "n3": 0}, **changes})
    (finding,) = judge_partition(PROFILE, found, {"learner": shape})
    assert finding.level is (Level.PROBLEM if words else Level.OK)
    assert words in finding.text
    assert bool(finding.way_out) == bool(words)


def test_a_partition_that_is_not_there() -> None:
    (finding,) = judge_partition(ClusterProfile(executor="slurm", partition="x"), None, {})
    assert (finding.level, finding.text) == (Level.PROBLEM, "partition = 'x' does not exist")


def test_clients_accounting_times_preemption() -> None:
    assert bad(judge_clients({"sinfo": "slurm 22", "sbatch": "error: gone"})) == {
        "clients": (Level.PROBLEM, "sbatch: gone")
    }
    assert judge_accounting("accounting_storage/slurmdbd", "").level is Level.OK
    assert judge_accounting("accounting_storage/none", "").level is Level.WARNING
    assert judge_accounting("accounting_storage/slurmdbd", "it failed").level is Level.WARNING
    assert bad(judge_times(PROFILE, {"KillWait": "30 sec"})) == {}
    assert "KillWait = 3 s" in bad(judge_times(PROFILE, {"KillWait": "3 sec"}))["times"][1]
    assert bad(judge_times(ClusterProfile(executor="slurm", signal_lead=60), {"KillWait": "30 sec"}))
    of = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
    levels = [
        judge_preemption(Partition("p", preempt_mode=mode, grace_s=grace, outranked=True), of).level
        for mode, grace in (("REQUEUE", 300), ("REQUEUE", 0), ("SUSPEND", 300), ("OFF", 0))
    ]
    assert judge_preemption(Partition("p", preempt_mode="REQUEUE"), of).level is Level.OK
    assert levels == [Level.OK, Level.WARNING, Level.WARNING, Level.OK]


@pytest.mark.parametrize(
    ("changes", "check", "level", "words"),
    [
        ({"umask": 0o022}, "privacy", Level.PROBLEM, "umask 022 on n1"),
        ({"secrets": {"HF_TOKEN": "aa"}}, "privacy", Level.PROBLEM, "HF_TOKEN of your environment"),
        ({"learner": {"error": "No module named torch"}}, "interpreters", Level.PROBLEM, "No module named torch"),
        ({"vllm": {"error": "no vllm"}}, "interpreters", Level.PROBLEM, "no vllm"),
        ({"address": {"error": "host_interface = 'ib0' …"}}, "interface", Level.PROBLEM, "ib0"),
        ({"ports": {"free": 3}}, "ports", Level.PROBLEM, "3 ports of 20000-20999"),
        (
            {"scratch": {"path": "/s", "error": "Read-only", "free_gb": 0}},
            "scratch",
            Level.PROBLEM,
            "/s is not writable",
        ),
        ({"scratch": {"path": "/s", "free_gb": 1.0}}, "scratch", Level.WARNING, "1.0 GB free"),
        ({"bound": 0}, "GPUs", Level.PROBLEM, "0 of 4 GPUs"),
        ({"learner": {"version": "2", "gpus": 0}}, "GPUs", Level.WARNING, "torch sees 0"),
    ],
)
def test_what_a_node_may_lack(changes: dict, check: str, level: Level, words: str) -> None:
    profile = ClusterProfile(executor="slurm", port_range="20000-20999")
    judged = {"gpus": 4, "secrets": {"HF_TOKEN": "aa", "OTHER": "bb"}, "need_vllm": True}
    assert bad(judge_nodes(profile, [node()], **judged)) == {}
    found = bad(judge_nodes(profile, [node(), node(**changes)], **judged))
    assert list(found) == [check]
    assert found[check][0] is level
    assert words in found[check][1]


def test_a_secret_of_the_nodes_own_is_none_of_the_submitters() -> None:
    assert bad(judge_nodes(PROFILE, [node(secrets={"SITE_TOKEN": "cc"})], 4, {"HF_TOKEN": "aa"}, True)) == {}


def test_who_sees_whose_files() -> None:
    assert judge_visibility([node()]).level is Level.OK
    assert judge_visibility([node(seen_s={"here": 30.0})]).level is Level.WARNING
    lost = judge_visibility([node(), node(seen_s={"here": 0.1, "node 0": None})])
    assert (lost.level, lost.text) == (Level.PROBLEM, "n1 was not seen by node 0")


@pytest.mark.parametrize(
    "text", ["", "garbage", "a=b c", "\0|||\n= =", "PartitionName=x PriorityTier=?\nPriorityTier=1"]
)
def test_what_is_no_partition_is_none(text: str) -> None:
    assert partition_of(text, None) is None
    assert partition_of(text, "y") is None
