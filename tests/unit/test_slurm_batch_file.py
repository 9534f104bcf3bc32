"""Batch files, the command in them, and what a node makes of its place."""

import os
import sys
from pathlib import Path

import pytest

from cluster.node import NodeError, address, load_environment, place, slurm_place
from cluster.profile import ClusterError, ClusterProfile
from cluster.slurm import job_command, job_comment, parse_comment, sbatch_text, shape_of
from cluster.slurm_backend import SlurmBackend
from slipstream.config_file import parse_config
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, write_json

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).resolve().parents[2]
FULL = ClusterProfile(
    executor="slurm", partition="gpu", account="lab", qos="high", reservation="mine", constraint="h100", time_limit=120,
    signal_lead=300, exclusive=True, cpus_per_task=16, memory_gb=200, host_interface="ib0", port_range="20000-20999",
    scratch="/scratch/$SLURM_JOB_ID", python="/opt/py/bin/python", vllm_python="/opt/vllm/bin/python",
    container=("apptainer", "exec", "--nv", "--bind", "{mounts}", "/images/s.sif"), mounts=("/models",),
    setup=(". /etc/profile", "module load cuda"), sbatch=("--mail-type=FAIL",),
)  # fmt: skip


def config_of(**sections: dict) -> RunConfig:
    return parse_config({"model": {"name": "m"}, "data": {"source": "d"}, **sections})


FOUR = config_of(
    server={"nodes": 2, "gpus": 8, "tensor_parallel_size": 8, "data_parallel_size": 2},
    learner={"nodes": 2, "gpus": 4, "processes_per_node": 4},
    cluster={"shape": "one_allocation"},
)  # fmt: skip


@pytest.fixture(autouse=True)
def instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_INSTANCE", "me")


@pytest.mark.parametrize(("name", "role"), [("server", "server"), ("learner", "learner"), ("allocation", "allocation")])
def test_batch_files(tmp_path: Path, name: str, role: str) -> None:
    run = RunFolder(tmp_path / "r")
    text = sbatch_text(FULL, run, role, 3, "aa11", FOUR, Path("/work"), run.path / "jobs" / "submitit")
    text = text.replace(str(tmp_path), "STORAGE").replace(str(ROOT), "REPO")
    golden = GOLDEN / f"sbatch_{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_one_allocation_has_the_nodes_of_both_and_the_larger_number_of_gpus() -> None:
    assert (shape_of(FOUR, "allocation").nodes, shape_of(FOUR, "allocation").gpus) == (4, 8)
    assert (shape_of(FOUR, "learner").nodes, shape_of(FOUR, "learner").gpus) == (2, 4)


def test_the_place_of_a_node() -> None:
    assert [place("allocation", node, 5, 2) for node in range(5)] == [
        ("learner", 0, 2),
        ("learner", 1, 2),
        ("server", 0, 3),
        ("server", 1, 3),
        ("server", 2, 3),
    ]
    assert place("server", 1, 2, 1) == ("server", 1, 2)
    assert slurm_place({"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "9"}) == (1, 2)
    assert slurm_place({}) == (0, 1)


def test_the_address_of_a_node() -> None:
    assert address("lo") == "127.0.0.1"
    assert address(None)
    with pytest.raises(NodeError, match=r"host_interface = 'no0'.*lo \(127"):
        address("no0")


def test_a_comment_names_the_job_whole() -> None:
    assert parse_comment("slipstream:me:r-1:2:learner:ab") == ("me", "r-1", 2, "learner", "ab")
    assert parse_comment(job_comment("me", "r-1", 2, "learner", "ab")) == ("me", "r-1", 2, "learner", "ab")
    for other in (
        "",
        "slipstream",
        "slipstream:me:r:x:learner:ab",
        "slipstream:r:x:learner:ab",
        "other:r:1:learner:ab",
    ):
        assert parse_comment(other) is None


def test_a_comment_of_before_there_were_instances_is_understood() -> None:
    assert parse_comment("slipstream:r-1:2:learner:ab") == ("", "r-1", 2, "learner", "ab")
    assert job_comment("", "r-1", 2, "learner", "ab") == "slipstream:r-1:2:learner:ab"


def test_the_command_stands_where_the_container_wants_it(tmp_path: Path) -> None:
    profile = ClusterProfile(
        executor="slurm", container=("sh", "-c", "exec", "{command}", "--", "{mounts}"), mounts=("/m",)
    )
    command = job_command(profile, RunFolder(tmp_path / "r"), "server", 1, "aa", FOUR)
    assert command.startswith(f"sh -c exec {sys.executable} -u -m cluster.entry ")
    assert command.endswith(f"-- /m,{tmp_path},{ROOT}")


@pytest.mark.parametrize(
    ("scratch", "mounts"),
    [
        (None, ["/m"]),
        ("/scratch/$SLURM_JOB_ID", ["/m", "/scratch"]),
        ("/local/tmp/${USER}/run-$SLURM_JOB_ID", ["/m", "/local/tmp"]),
        ("/local/job-$SLURM_JOB_ID", ["/m", "/local"]),
        ("/local/tmp/", ["/m", "/local/tmp"]),
        ("/m/$SLURM_JOB_ID", ["/m"]),
        ("/$SLURM_JOB_ID", ["/m"]),  # nothing of it is known before; `mounts` may name it
    ],
)
def test_the_container_sees_the_scratch(tmp_path: Path, scratch: str | None, mounts: list[str]) -> None:
    profile = ClusterProfile(executor="slurm", container=("c", "--bind={mounts}"), mounts=("/m",), scratch=scratch)
    command = job_command(profile, RunFolder(tmp_path / "r"), "server", 1, "aa", FOUR)
    assert command.split()[1] == f"--bind={','.join([*mounts, str(tmp_path), str(ROOT)])}"


def test_the_submitters_variables_reach_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path)
    monkeypatch.setattr(os, "environ", {"PYTHONPATH": "/own", "HF_HOME": "/login", "KEPT": "1"})
    monkeypatch.setattr(sys, "path", ["/own"])
    load_environment(run)
    write_json(run.path / "secrets" / "environment.json", {"HF_HOME": "/hub", "PYTHONPATH": "/own:/theirs"})
    load_environment(run)
    assert os.environ == {"PYTHONPATH": "/own:/own:/theirs", "HF_HOME": "/hub", "KEPT": "1"}
    assert sys.path == ["/own", "/theirs"]


@pytest.mark.parametrize(
    ("profile", "sections", "words"),
    [
        ({"shared": "/shared"}, {"storage": {"root": "/home/me"}}, "storage.root = '/home/me'.*/shared"),
        ({}, {"cluster": {"shape": "one_allocation"}, "server": {"url": "http://h:1"}}, "one_allocation.*server.url"),
    ],
)
def test_what_this_cluster_cannot_run(profile: dict, sections: dict, words: str) -> None:
    backend = SlurmBackend(ClusterProfile(executor="slurm", **profile))
    with pytest.raises(ClusterError, match=words):
        backend.check_values(config_of(**sections))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"time_limit": 5}, "signal_lead = 180 s is more than half of time_limit = 5 min"),
        ({"sbatch": ("--export=ALL",)}, "--export=ALL is not for the profile to set"),
        ({"port_range": "9000-8000"}, 'port_range = "9000-8000"'),
        ({"scratch": '/a"; rm -rf /'}, "scratch"),
    ],
)
def test_a_profile_that_cannot_work(values: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ClusterProfile(executor="slurm", **values)
