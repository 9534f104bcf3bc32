"""Is a node fit to train on: what nvidia-smi's answers mean, and what is said of the host."""

import os
import socket
from pathlib import Path

import pytest

from slipstream import node_check
from slipstream.learner.failure import first_failure, record_failure
from slipstream.learner.rank_check import absent
from slipstream.node_check import (
    Gpu,
    GpuProcess,
    NodeFault,
    check_node,
    complaints,
    foreign,
    gpu_problems,
    host_problems,
    parse_gpus,
    parse_processes,
    select,
    unhealthy,
)
from slipstream.nodes import blamed
from slipstream.run_folder import RunFolder

ZERO = "GPU-4f0a1f62-9d9c-8f4e-6b1c-000000000000"
ONE = "GPU-8a6bd2a0-1b5c-7c42-94d5-111111111111"
GPUS = f"0, {ZERO}, 81559\n1, {ONE}, 81559\n"
LOST = (
    "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover this GPU\n"
)
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n\n"
)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (GPUS, [Gpu("0", ZERO, 81559.0), Gpu("1", ONE, 81559.0)]),
        (f"0, {ZERO}, [N/A]\n", [Gpu("0", ZERO, None)]),
        (LOST + f"1, {ONE}, 81559\n", [Gpu("1", ONE, 81559.0)]),
        (NO_DRIVER, []),
        ("", []),
    ],
)
def test_gpus(output: str, expected: list[Gpu]) -> None:
    assert parse_gpus(output) == expected


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (f"{ZERO}, 4711, 1234\n{ONE}, 12, [N/A]\n", [GpuProcess(ZERO, 4711, 1234.0), GpuProcess(ONE, 12, None)]),
        ("No running processes found\n", []),
        ("", []),
    ],
)
def test_processes(output: str, expected: list[GpuProcess]) -> None:
    assert parse_processes(output) == expected


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (GPUS, []),
        (LOST, ["GPU is lost"]),
        (NO_DRIVER, ["NVIDIA-SMI has failed"]),
        ("Failed to initialize NVML: Driver/library version mismatch\n", ["version mismatch"]),
        ("No devices were found\n", ["No devices were found"]),
    ],
)
def test_complaints(output: str, words: list[str]) -> None:
    found = complaints(output)
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found, strict=True))


HEALTH = ("ecc.errors.uncorrected.volatile.total", "remapped_rows.pending", "remapped_rows.failure")


@pytest.mark.parametrize(
    ("output", "names", "expected"),
    [
        (f"{ZERO}, 0, No, No\n", HEALTH, []),
        (f"{ZERO}, 0, 0, 0\n", HEALTH, []),
        (f"{ZERO}, [N/A], [N/A], [N/A]\n", HEALTH, []),
        (f"{ZERO}, [Not Supported], [Not Supported], [Not Supported]\n", HEALTH, []),
        (f"{ZERO}, 3, No, No\n", HEALTH, [f"GPU {ZERO} has ecc.errors.uncorrected.volatile.total = 3"]),
        (f"{ZERO}, 0, Yes, No\n", HEALTH, [f"GPU {ZERO} has remapped_rows.pending = Yes"]),
        (f"{ONE}, 3, Yes, Yes\n", HEALTH, []),  # somebody else's
        (f"{ZERO}, None\n", ("gpu_recovery_action",), []),
        (f"{ZERO}, Reset\n", ("gpu_recovery_action",), [f"GPU {ZERO} has gpu_recovery_action = Reset"]),
    ],
)
def test_health(output: str, names: tuple[str, ...], expected: list[str]) -> None:
    assert unhealthy(output, names, [ZERO]) == expected


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, "01"), ("0,1", "01"), ("1", "1"), ("", ""), ("1,0", "10"), ("GPU-8a6b", "1"), (ONE, "1"), ("7", "")],
)
def test_which_gpus_are_ours(visible: str | None, indices: str) -> None:
    assert "".join(gpu.index for gpu in select(parse_gpus(GPUS), visible)) == indices


@pytest.mark.parametrize(
    ("process", "words"),
    [
        (GpuProcess(ZERO, 99, 40_000.0), ["process 99", "GPU 0", "40000 MiB"]),
        (GpuProcess(ZERO, 99, None), ["process 99"]),
        (GpuProcess(ZERO, 99, 300.0), []),  # a desktop
        (GpuProcess(ONE, 99, 40_000.0), []),  # not our GPU
        (GpuProcess(ZERO, 7, 40_000.0), []),  # the run's own server
    ],
)
def test_processes_of_others(process: GpuProcess, words: list[str]) -> None:
    found = foreign([process], [Gpu("0", ZERO, 81559.0)], {7})
    assert len(found) == bool(words)
    assert all(word in found[0] for word in words)


def smi(folder: Path, gpus: str, health: str = "", action: str = "", apps: str = "", code: int = 0) -> str:
    """A stand-in for nvidia-smi; an answer '' to a health question is that of a driver which does not know the field."""
    for name, text in (("gpus", gpus), ("health", health), ("action", action), ("apps", apps)):
        (folder / name).write_text(text)
    unknown = "echo 'Field is not a valid field to query.'; exit 2"
    program = folder / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        f"cd {folder}\n"
        'case "$1" in\n'
        f"*index,uuid*) cat gpus; exit {code};;\n"
        f"*recovery*) [ -s action ] || {{ {unknown}; }}; cat action;;\n"
        f"*ecc*) [ -s health ] || {{ {unknown}; }}; cat health;;\n"
        "*compute-apps*) cat apps;;\n"
        "esac\n"
    )
    program.chmod(0o755)
    return str(program)


def test_healthy_gpus(tmp_path: Path) -> None:
    program = smi(tmp_path, GPUS, f"{ZERO}, 0, No, No\n{ONE}, 0, No, No\n", f"{ZERO}, None\n{ONE}, None\n")
    assert gpu_problems(2, {"CUDA_VISIBLE_DEVICES": "0,1"}, set(), program) == []
    assert gpu_problems(2, {}, set(), smi(tmp_path, GPUS)) == []


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    program = smi(tmp_path, LOST + GPUS, f"{ZERO}, 2, No, No\n", "", f"{ONE}, 99, 70000\n", code=15)
    found = gpu_problems(3, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, set(), program)
    assert [word in line for word, line in zip(["lost", "lists 2 GPUs", "ecc", "process 99"], found, strict=True)] == [
        True
    ] * 4


def test_a_failure_without_words_that_are_known_is_quoted(tmp_path: Path) -> None:
    found = gpu_problems(1, {}, set(), smi(tmp_path, "segmentation fault\n", code=3))
    assert any("segmentation fault" in problem for problem in found)


def test_an_nvidia_smi_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(node_check, "SMI_TIMEOUT_S", 0.2)
    assert gpu_problems(1, {}, set(), str(program)) == ["nvidia-smi does not answer within 0.2 s"]


@pytest.mark.parametrize(
    ("gpus", "visible", "words"),
    [(0, "", ""), (2, "0,1", ""), (2, None, ""), (2, "0", "2 GPUs are needed"), (1, "", "1 GPUs"), (1, "MIG-1", "")],
)
def test_without_nvidia_smi_the_clusters_own_choice_is_counted(gpus: int, visible: str | None, words: str) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = gpu_problems(gpus, environment, set(), None)
    assert len(found) == bool(words)
    assert not words or words in found[0]


def test_the_host(tmp_path: Path) -> None:
    assert host_problems(1, str(tmp_path)) == []
    assert "too little for 1000000 processes" in host_problems(1_000_000, str(tmp_path))[0]
    assert "cannot be used" in host_problems(1, str(tmp_path / "missing"))[0]


def test_little_room_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check, "TEMPORARY_SPACE", 2**80)
    assert "(TMPDIR)" in host_problems(1, str(tmp_path))[0]


def test_a_fault_blames_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    check_node(0, 1)
    monkeypatch.setattr(node_check, "host_problems", lambda ranks, temporary: ["one", "two"])
    with pytest.raises(NodeFault) as caught:
        check_node(0, 1)
    assert str(caught.value) == f"node {socket.gethostname()}: one; two"
    assert blamed(str(caught.value)) == socket.gethostname()


def test_the_runs_own_server_is_no_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.getpid() in node_check.own_processes(tmp_path / "token")


@pytest.mark.parametrize(
    ("present", "hosts", "expected"),
    [
        ({0: "n1", 1: "n1"}, ["n1", "n2"], "node n2: rank 2 on n2, rank 3 on n2"),
        ({0: "n1", 1: "n1", 2: "n2"}, ["n1", "n2"], "node n2: rank 3 on n2"),
        ({0: "n1"}, ["n1", ""], "node number 1: rank 1 on n1, rank 2 on number 1, rank 3 on number 1"),
    ],
)
def test_ranks_that_did_not_come(present: dict[int, str], hosts: list[str], expected: str) -> None:
    found = absent(4, 2, present, hosts)
    assert blamed(found) == ("n2" if hosts[1] else "")
    assert found.replace("of 4 ranks these did not come to the first all-reduce: ", "") == expected


def test_the_leader_hands_on_a_blame_as_it_is(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "run")
    record_failure(run, 1, 3, NodeFault("node n2: rank 3 did not come"))
    found = first_failure(run, 1, tmp_path / "no.log")
    assert found is not None
    assert found.reason == "node n2: rank 3 did not come"
