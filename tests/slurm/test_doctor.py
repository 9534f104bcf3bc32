"""`slipstream doctor` on a real SLURM, by an unprivileged user on the login machine."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm.bed import Bed
from slurm.bed.machines import inside

pytestmark = [pytest.mark.slurm, pytest.mark.integration]

ROOT = Path(__file__).resolve().parents[2]
SLIPSTREAM = [str(ROOT / ".venv" / "bin" / "python"), "-c", "from flows.cli.main import main; main()"]
SECRET = "planted-77aa-secret"
NO_SERVER = ["--set", "server.url=http://elsewhere:1"]  # so that vLLM is not imported
LATER = {"sbatch": ["--begin=now+1hour"]}


class Doctor:
    """Calls by bed1 on the login machine."""

    def __init__(self, bed: Bed, folder: Path) -> None:
        self.bed, self.folder = bed, folder
        folder.mkdir()
        uid = bed.description.uid("bed1")
        os.chown(folder, uid, uid)

    def start(self, profile: dict[str, Any], *options: str) -> "subprocess.Popen[str]":
        file = self.folder / "profile.toml"
        values = {"executor": "slurm", "shared": str(self.folder), "time_limit": 30, "client_timeout": 20, **profile}
        file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
        file.chmod(0o644)
        env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_TOKEN": SECRET}
        command = [*SLIPSTREAM, "doctor", str(file), *options]
        pipe = subprocess.PIPE
        return self.bed.popen("login", command, user="bed1", cwd=str(ROOT), env=env, stdout=pipe, stderr=pipe)

    def __call__(self, profile: dict[str, Any], *options: str) -> tuple[int, str]:
        """(exit code, what it printed); and it must have left nothing."""
        process = self.start(profile, *options)
        output, errors = process.communicate(timeout=300)
        self.nothing_left()
        return process.returncode, output + errors

    def nothing_left(self) -> None:
        end = time.monotonic() + 30
        while self.bed.command("squeue", "-h", "-u", "bed1") or self.bed.processes("bed1"):
            assert time.monotonic() < end, self.bed.processes("bed1")
            time.sleep(0.2)
        assert [path.name for path in self.folder.iterdir()] == ["profile.toml"]


@pytest.fixture
def doctor(bed: Bed, request: pytest.FixtureRequest) -> Iterator[Doctor]:
    name = re.sub(r"\W+", "-", request.node.name)[:30]
    yield Doctor(bed, bed.shared / f"{name}-{time.time_ns() % 10**6}")
    bed.command("scancel", "--user", "bed1")


def level_of(text: str, check: str) -> str:
    return re.findall(rf"^(ok|warning|problem) +{check}\b", text, re.MULTILINE)[-1]


def test_a_profile_that_works(doctor: Doctor) -> None:
    code, text = doctor({"port_range": "20000-20099", "host_interface": "eth0", "sbatch": ["--exclude=n1,n2,n5,n6"]})
    assert code == 0, text
    found = {line.split()[1] for line in text.splitlines() if line.startswith(("ok", "warning"))}
    assert found >= {
        "clients", "controller", "partition", "accounting", "times", "preemption", "storage", "submission", "visible",
        "interpreters", "interface", "ports", "scratch", "GPUs", "privacy",
    }, text  # fmt: skip
    for check in ("visible", "interpreters", "interface", "ports", "privacy", "accounting", "preemption"):
        assert level_of(text, check) == "ok", text
    assert re.search(r"visible +from here to n3, n4 and between them: there and back within", text), text
    assert re.search(r"interpreters +Python 3\S+, torch 2\S+, vLLM \d", text), text
    assert re.search(r"ports +100 of 20000-20099 free", text), text


def test_a_wrong_interface_and_a_secret_that_arrives(bed: Bed, doctor: Doctor) -> None:
    file = bed.shared / "token-of-the-site"
    file.write_text(SECRET)
    file.chmod(0o644)
    code, text = doctor({"host_interface": "ib9", "setup": [f"export HF_TOKEN=$(cat {file})"]}, *NO_SERVER)
    assert code == 1, text
    assert (level_of(text, "interface"), level_of(text, "privacy")) == ("problem", "problem"), text
    assert "'ib9'" in text
    assert "HF_TOKEN" in text
    assert SECRET not in text


def test_an_interpreter_that_is_not_there(doctor: Doctor) -> None:
    code, text = doctor({"python": "/nowhere/python"}, *NO_SERVER)
    assert (code, level_of(text, "job")) == (1, "problem"), text
    assert "/nowhere/python" in text


def test_what_slurm_would_refuse_is_not_tried(bed: Bed, doctor: Doctor) -> None:
    code, text = doctor({"partition": "nowhere"}, *NO_SERVER)
    assert (code, level_of(text, "partition"), level_of(text, "job")) == (1, "problem", "warning"), text
    bed.command("scontrol", "update", "PartitionName=main", "MaxTime=20")
    try:
        code, text = doctor({}, "--no-job", *NO_SERVER)
    finally:
        bed.command("scontrol", "update", "PartitionName=main", "MaxTime=INFINITE")
    assert code == 1
    assert "time_limit = 30 min, but main allows 20" in text


def test_storage_that_cannot_be_written(bed: Bed, doctor: Doctor) -> None:
    code, text = doctor({"shared": str(bed.readonly)}, *NO_SERVER)
    assert (code, level_of(text, "storage")) == (1, "problem"), text
    assert "Read-only file system" in text


def test_a_job_that_waits_is_given_up_and_ctrl_c_ends_it(bed: Bed, doctor: Doctor) -> None:
    code, text = doctor(LATER, "--wait", "2", *NO_SERVER)
    assert (code, level_of(text, "job")) == (0, "warning"), text
    assert "BeginTime" in text
    process = doctor.start(LATER, *NO_SERVER)
    end = time.monotonic() + 60
    while not bed.command("squeue", "-h", "-u", "bed1"):
        assert time.monotonic() < end
        time.sleep(0.1)
    os.kill(inside(process.pid), signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    doctor.nothing_left()
