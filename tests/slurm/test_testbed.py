"""The test bed itself: a real SLURM, its faults on demand, and nothing left of it."""

import errno
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm.bed import Bed, BedError, description
from slurm.bed.machines import Process, inside, power_off, start_time
from tests.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.integration]

ROOT = Path(__file__).resolve().parents[2]
PYTHON = str(ROOT / ".venv" / "bin" / "python")


def sbatch(bed: Bed, script: str, *options: str, user: str = "bed1") -> str:
    """Submits a bash script from the login machine; returns the job's id."""
    call = ["sbatch", "--parsable", "--output=/dev/null", *options, "--wrap", script]
    return bed.run("login", call, user=user).strip()


def job(bed: Bed, job_id: str) -> dict[str, str]:
    """What scontrol says of a job."""
    return dict(re.findall(r"(\w+)=(\S*)", bed.command("scontrol", "show", "job", job_id)))


def wait_state(bed: Bed, job_id: str, state: str) -> dict[str, str]:
    return wait_until(lambda: (seen := job(bed, job_id))["JobState"] == state and seen, f"job {job_id} {state}")


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


# -- what jobs see -----------------------------------------------------------------------------------------------------


def test_a_job_of_an_unprivileged_user_through_submitit(bed: Bed) -> None:
    """The repository and its environment are readable, though this host may keep them in closed folders."""
    folder = bed.shared / "submitit"
    script = ROOT / "tests" / "standins" / "standin_slurm_submit.py"
    output = bed.run(
        "login", [PYTHON, str(script), str(folder)], user="bed1", env={"PYTHONPATH": str(ROOT)}, seconds=300
    )
    results = json.loads(output.splitlines()[-1])
    assert [result["rank"] for result in results] == [0, 1]
    assert {result["uid"] for result in results} == {bed.description.uid("bed1")}
    assert {result["devices"] for result in results} == {"0,1"}
    assert len({result["host"] for result in results}) == 2


def test_jobs_on_one_node_get_different_gpus(bed: Bed) -> None:
    script = 'echo $CUDA_VISIBLE_DEVICES > "$OUT/$SLURM_JOB_ID"; sleep 600'
    out = bed.shared / "gpus"
    out.mkdir(mode=0o777)
    out.chmod(0o777)
    options = ["--nodelist=n2", f"--export=ALL,OUT={out}", "--gres=gpu:3"]
    first, second = sbatch(bed, script, *options), sbatch(bed, script, *options, user="bed2")
    third = sbatch(bed, script, *options)
    wait_until(lambda: lines(out / first) and lines(out / second), "two jobs have written")
    devices = {(out / name).read_text().strip() for name in (first, second)}
    assert devices == {"0,1,2", "3,4,5"}
    wait_until(lambda: job(bed, third)["Reason"] == "Resources", "the third waits for GPUs")


def test_tmp_is_private_and_shared_storage_is_not(bed: Bed) -> None:
    for place in ("/tmp/mark", f"{bed.shared}/mark"):
        bed.run("n1", ["sh", "-c", f"hostname > {place}"], user="bed1")
    assert bed.run("n2", ["cat", f"{bed.shared}/mark"], user="bed2") == "n1\n"
    with pytest.raises(BedError, match="No such file"):
        bed.run("n2", ["cat", "/tmp/mark"], user="bed2")
    assert not Path("/tmp/mark").exists()


def test_users_cannot_read_each_other(bed: Bed) -> None:
    bed.run("n1", ["sh", "-c", "umask 077; echo secret > ~/secret"], user="bed1")
    assert bed.run("n3", ["sh", "-c", "cat ~/secret; whoami"], user="bed1") == "secret\nbed1\n"
    with pytest.raises(BedError, match="Permission denied"):
        bed.run("n1", ["cat", str(bed.description.home("bed1") / "secret")], user="bed2")
    with pytest.raises(BedError, match=r"Permission denied"):
        bed.run("n1", ["cat", str(bed.folder / "munge" / "munge.key")], user="bed1")


def test_what_a_job_left_running_is_killed_with_it(bed: Bed) -> None:
    if not bed.description.cgroup:
        pytest.skip("no freezer cgroup (cgroup v1) on this host: processes that leave their parent are not tracked")
    orphan = bed.shared / "orphan"
    job_id = sbatch(bed, f"setsid sh -c 'while date >> {orphan}; do sleep 0.1; done' & sleep 600", "--nodelist=n4")
    wait_until(lambda: lines(orphan) > 2, "the orphan writes")
    assert {one.machine for one in bed.processes("bed1")} == {"n4"}
    bed.run("login", ["scancel", job_id], user="bed1")
    wait_state(bed, job_id, "CANCELLED")
    wait_until(lambda: not bed.processes("bed1"), "the orphan is gone")


def test_a_command_started_on_a_machine_ends_with_its_helper(bed: Bed) -> None:
    process = bed.popen("login", ["sleep", "600"], user="bed1")
    pid = wait_until(lambda: inside(process.pid), "it runs")
    wait_until(
        lambda: Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:2] == ["sleep", "600"], "it is the command itself"
    )
    process.kill()
    assert process.wait() != 0
    wait_until(lambda: not bed.processes("bed1"), "the command has ended too")


# -- faults ------------------------------------------------------------------------------------------------------------


def test_power_off_fails_the_job_and_requeues_it_elsewhere(bed: Bed) -> None:
    job_id = sbatch(bed, "sleep 600", "--requeue", "--gres=gpu:8")
    node = wait_state(bed, job_id, "RUNNING")["NodeList"]
    bed.run(node, ["touch", "/tmp/lost"])
    bed.power_off(node)
    with pytest.raises(BedError, match=f"{node} is off: .*power-on"):
        bed.run(node, ["true"])
    wait_until(lambda: job(bed, job_id)["Restarts"] == "1", "requeued")
    assert wait_state(bed, job_id, "RUNNING")["NodeList"] != node
    states = bed.run("login", ["sacct", "-nXD", "-j", job_id, "-o", "state"], user="bed1").split()
    assert "NODE_FAIL" in states
    assert bed.node_states()[node] == "down*"
    bed.power_on(node)
    bed.wait_nodes("idle", [node], 60)
    assert "lost" not in bed.run(node, ["ls", "/tmp"])


def test_partition_and_heal(bed: Bed) -> None:
    """The cut-off half of a job goes on writing to the shared storage; SLURM gives the node up, and takes it back."""
    trace = bed.shared / "partition"
    job_id = sbatch(bed, f"while echo $(hostname) >> {trace}; do sleep 0.1; done", "--no-requeue")
    node = wait_state(bed, job_id, "RUNNING")["NodeList"]
    wait_until(lambda: lines(trace) > 2, "the job writes")
    bed.partition(node)
    with pytest.raises(BedError):
        bed.run("login", ["bash", "-c", f"exec 3<>/dev/tcp/{bed.description.address(node)}/6818"], seconds=20)
    bed.wait_nodes("down*", [node], 120)
    assert wait_state(bed, job_id, "NODE_FAIL")["Restarts"] == "0"
    before = lines(trace)
    wait_until(lambda: lines(trace) > before + 5, "the cut-off job still writes")
    bed.heal(node)
    bed.wait_nodes("idle", [node], 120)
    wait_until(lambda: not bed.processes("bed1"), "SLURM ended the old copy")


def test_preemption(bed: Bed) -> None:
    requeued = sbatch(bed, "sleep 600", "--partition=low", "--nodes=3", "--exclusive", "--requeue")
    cancelled = sbatch(bed, "sleep 600", "--partition=spot", "--nodes=3", "--exclusive", user="bed2")
    for job_id in (requeued, cancelled):
        wait_state(bed, job_id, "RUNNING")
    urgent = sbatch(bed, "sleep 600", "--nodes=6", "--exclusive")
    wait_state(bed, urgent, "RUNNING")
    assert wait_state(bed, requeued, "PENDING")["Restarts"] == "1"
    assert wait_state(bed, cancelled, "PREEMPTED")["Restarts"] == "0"


def test_drain_and_resume(bed: Bed) -> None:
    bed.drain("5", reason="fan is loud")
    job_id = sbatch(bed, "sleep 600", "--nodelist=n5")
    wait_until(lambda: job(bed, job_id)["Reason"] not in ("None", "Priority"), "it waits for its node")
    seen = job(bed, job_id)
    assert seen["JobState"] == "PENDING"
    assert bed.node_states()["n5"] == "drained"
    assert "fan is loud" in bed.command("sinfo", "-R")
    bed.resume("n5")
    wait_state(bed, job_id, "RUNNING")


def test_jobs_outlive_slurmd_slurmctld_and_slurmdbd(bed: Bed) -> None:
    trace = bed.shared / "daemons"
    job_id = sbatch(bed, f"while date >> {trace}; do sleep 0.1; done", "--nodelist=n6")
    wait_until(lambda: lines(trace) > 2, "the job writes")

    bed.restart_slurmd("n6")
    bed.stop_dbd()
    with pytest.raises(BedError):
        bed.run("login", ["sacct"], user="bed1")
    other = sbatch(bed, "true")
    wait_state(bed, other, "COMPLETED")
    bed.stop_controller()
    with pytest.raises(BedError):
        bed.run("login", ["squeue"], user="bed1")
    before = lines(trace)
    wait_until(lambda: lines(trace) > before + 5, "the job goes on without a controller")
    bed.start_dbd()
    bed.start_controller()

    assert wait_state(bed, job_id, "RUNNING")["Restarts"] == "0"
    accounted = ["sacct", "-nX", "-j", other, "-o", "state"]
    wait_until(lambda: "COMPLETED" in bed.run("login", accounted, user="bed1"), "what was missed is accounted")


def test_jobs_outlive_a_power_cut_of_the_controller(bed: Bed) -> None:
    trace = bed.shared / "controller"
    job_id = sbatch(bed, f"while date >> {trace}; do sleep 0.1; done", "--nodelist=n1")
    wait_until(lambda: lines(trace) > 2, "the job writes")
    wait_state(bed, job_id, "RUNNING")
    written, state = time.time(), bed.folder / "state" / "job_state"
    sbatch(bed, "true")  # a change, so that there is something to save
    wait_until(lambda: state.stat().st_mtime > written, "slurmctld has saved both, which it does within seconds")
    listed = ["sacct", "-nX", "-o", "jobid"]
    wait_until(lambda: job_id in bed.run("login", listed, user="bed1"), "it is accounted")
    bed.power_off("ctl")
    with pytest.raises(BedError):
        bed.run("login", ["squeue"], user="bed1", seconds=5)
    before = lines(trace)
    wait_until(lambda: lines(trace) > before + 5, "the job goes on")
    bed.power_on("ctl")
    assert wait_state(bed, job_id, "RUNNING")["Restarts"] == "0"
    wait_state(bed, sbatch(bed, "true"), "COMPLETED")
    assert job_id in bed.run("login", listed, user="bed1")


@pytest.mark.parametrize(("name", "number"), [("limited", errno.ENOSPC), ("readonly", errno.EROFS)])
def test_storage_to_fail_on(bed: Bed, name: str, number: int) -> None:
    """The same storage on every machine, and on this host; changed for all at once."""
    size = (bed.description.limited_mb + 1) * 2**20
    place = bed.folder / name / "file"
    write = f"""import os
f = os.open({str(place)!r}, os.O_CREAT | os.O_WRONLY)
n = {size}
while n > 0:
    n -= os.write(f, b"x" * 2**20)"""
    python = [PYTHON, "-c", write]
    with pytest.raises(BedError, match=rf"Errno {number}\]"):
        bed.run("n1", python, user="bed1")
    other = "readonly" if name == "limited" else "limited"
    if name == "limited":
        assert bed.run("n2", ["stat", "-c", "%u", str(place)]).strip() == str(bed.description.uid("bed1"))
    else:
        bed.storage(name, "rw")
    bed.storage(name, str(2 * bed.description.limited_mb))
    bed.run("n3", python, user="bed1")
    assert place.stat().st_size == size
    place.unlink()
    bed.storage(name, "ro")
    with pytest.raises(BedError, match="Read-only file system"):
        bed.run("n2", ["touch", str(place)], user="bed1")
    with pytest.raises(BedError, match="limited or readonly"):
        bed.storage("shared", "ro")
    with pytest.raises(BedError, match="'half'"):
        bed.storage(other, "half")


# -- beds --------------------------------------------------------------------------------------------------------------


def remains(bed: Bed, ran: list[Process]) -> dict[str, list[str]]:
    """What of a bed is on this host; `ran` are its processes from when it was up."""
    index = bed.description.index
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return {
        "processes": [one.command for one in ran if start_time(one.pid) == one.started],
        "mounts": [line for line in mounts if str(bed.folder) in line],
        "links": [
            link.name for link in Path("/sys/class/net").iterdir() if re.match(rf"slb(ed)?{index}(-|$)", link.name)
        ],
        "cgroups": [str(path) for path in Path("/sys/fs/cgroup/freezer").glob(f"slipstream-bed-{index}*")],
        "files": [str(path) for path in (bed.folder,) if path.exists()],
    }


def test_a_second_bed_without_accounting_and_nothing_left_of_it(bed: Bed, bed_folder: Path) -> None:
    other = Bed.up(bed_folder, nodes=2, gpus=1, accounting=False)
    assert other.description.index != bed.description.index
    theirs, ours = sbatch(other, "sleep 600", "--nodelist=n1"), sbatch(bed, "sleep 600", "--nodelist=n1")
    wait_state(other, theirs, "RUNNING")
    wait_state(bed, ours, "RUNNING")
    with pytest.raises(BedError, match="accounting storage is disabled"):
        other.run("login", ["sacct"], user="bed1")
    with pytest.raises(BedError, match="without accounting"):
        other.stop_dbd()
    with pytest.raises(BedError, match="a bed runs in"):
        Bed.up(bed_folder)
    ran = other.processes()
    there = remains(other, ran)
    assert len(there["processes"]) > 8
    assert all(there[kind] for kind in ("mounts", "links", "files")), there

    other.down()
    assert not any(remains(other, ran).values()), remains(other, ran)
    assert wait_state(bed, ours, "RUNNING")["Restarts"] == "0"
    with pytest.raises(BedError, match="no bed in"):
        Bed.attach(bed_folder)


def test_a_killed_bed_is_cleaned_at_the_next_start(bed_folder: Path) -> None:
    small = {"nodes": 1, "gpus": 1, "accounting": False}
    first = Bed.up(bed_folder, **small)  # type: ignore[arg-type]
    sbatch(first, "sleep 600")
    ran = first.processes()
    power_off(list(first.machines_on().values()))
    assert remains(first, ran)["links"], "the bridge is still there"
    with pytest.raises(BedError, match="does not run"):
        Bed.attach(bed_folder)
    second = Bed.up(bed_folder, **small)  # type: ignore[arg-type]
    assert not remains(first, ran)["processes"]
    wait_state(second, sbatch(second, "true"), "COMPLETED")


def test_a_start_that_was_killed_is_cleaned_at_the_next(bed_folder: Path) -> None:
    # with the accounting it has seconds to go when it is killed
    call = [sys.executable, str(ROOT / "slurm" / "testbed"), "up", "--dir", str(bed_folder), "--nodes", "1"]
    starting = subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: (bed_folder / "log" / "munged-ctl.log").exists(), "the machines are there")
    finally:
        starting.kill()
        starting.wait()
    assert not description.load(bed_folder).ready
    done = subprocess.run(call, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^n1 .* idle$", done.stdout, re.MULTILINE)


def test_a_bed_whose_owner_ended_is_removed_by_the_next_start(bed_folder: Path, tmp_path: Path) -> None:
    owner = subprocess.Popen(["sleep", "600"])
    try:
        orphan = Bed.up(bed_folder, nodes=1, accounting=False, owner=owner.pid)
    finally:
        owner.kill()
        owner.wait()
    ran = orphan.processes()
    other = Bed.up(tmp_path / "other", nodes=1, accounting=False)
    try:
        assert not remains(orphan, ran)["processes"]
        assert not bed_folder.exists()
        assert other.node_states() == {"n1": "idle"}
    finally:
        other.down()


def test_a_folder_with_other_things_in_it_is_left_alone(bed_folder: Path) -> None:
    bed_folder.mkdir()
    (bed_folder / "thesis.tex").write_text("years of work")
    with pytest.raises(BedError, match="not empty and no bed"):
        Bed.up(bed_folder)
    subprocess.run([sys.executable, str(ROOT / "slurm" / "testbed"), "down", "--dir", str(bed_folder)], check=True)
    assert (bed_folder / "thesis.tex").read_text() == "years of work"


def test_the_command_line(bed: Bed) -> None:
    def testbed(*arguments: str, status: int = 0) -> str:
        call = [sys.executable, str(ROOT / "slurm" / "testbed"), *arguments]
        done = subprocess.run(
            call, text=True, capture_output=True, env={"PATH": "/usr/bin:/usr/sbin", **folder}, timeout=120
        )
        assert done.returncode == status, done.stderr
        return done.stdout if status == 0 else done.stderr

    folder = {"SLIPSTREAM_TESTBED": str(bed.folder)}
    assert testbed("exec", "2", "--user", "bed2", "--", "sh", "-c", "hostname; whoami") == "n2\nbed2\n"
    exports = testbed("env")
    shell = subprocess.run(["bash", "-c", f"{exports}\nsinfo -h -o %D"], text=True, capture_output=True)
    assert shell.stdout == "6\n", shell.stderr
    testbed("partition", "2")
    assert re.search(r"^n2 .* cut ", testbed("status"), re.MULTILINE)
    testbed("heal", "2")
    assert not re.search(r"^n2 .* cut ", testbed("status"), re.MULTILINE)
    assert "no node 'n9' in this bed: n1 to n6" in testbed("power-off", "n9", status=1)
    assert "is on" in testbed("power-on", "n1", status=1)
    assert testbed("check") == "a bed can run here\n"
