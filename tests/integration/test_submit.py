"""Real submitit jobs on this machine: what they inherit, how their state is seen, how they are ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster import entry
from cluster.intents import unrecorded_jobs
from cluster.jobs import JobRecord, JobState, exit_record, latest_job, read_jobs
from cluster.local_jobs import cancel_jobs, find_process, job_processes, job_view, started
from cluster.profile import ClusterError, ClusterProfile
from cluster.submit import check_profile, describe, job_log, submit
from slipstream.config_file import parse_config
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

STANDINS = Path(__file__).resolve().parents[1] / "standins"
LOCAL = ClusterProfile(executor="local")


def config_of(**server: Any) -> RunConfig:
    return parse_config(
        {
            "model": {"name": "m"},
            "data": {"source": "d"},
            "server": {"gpus": 0, **server},
            "learner": {"gpus": 0},
        }
    )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder.create(tmp_path, "r")
    folder.run_file.write_text("")
    folder.begin_attempt(None, 0)
    yield folder
    cancel_jobs(read_jobs(folder, 1), grace_s=0.1)


@pytest.fixture
def start(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., JobRecord]:
    """Submits a function of the stand-ins as a role."""
    monkeypatch.setenv("PYTHONPATH", str(STANDINS))

    def submit_standin(function: str, role: str = "server", profile: ClusterProfile = LOCAL, **env: str) -> JobRecord:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setitem(entry.LEADERS, role, f"standin_roles:{function}")
        return submit(profile, run, role, 1, config_of(), cwd=tmp_path, why="test")

    return submit_standin


def ended(run: RunFolder, job: JobRecord) -> bool:
    return job_view(run, job).state.ended


def test_a_job_inherits_no_secret_no_terminal_and_its_own_session(
    run: RunFolder, start: Callable[..., JobRecord], tmp_path: Path
) -> None:
    secret = "s3cret-value"
    job = start("print_environment", WANDB_API_KEY=secret, PREFECT_API_AUTH_STRING=secret, PLAIN="yes")
    wait_until(lambda: ended(run, job), "the job ends")
    facts = json.loads((run.path / "facts.json").read_text())
    assert facts["environment"]["PLAIN"] == "yes"
    assert secret not in facts["environment"].values()
    assert facts["session"] == facts["parent"] == int(job.job_id) != os.getsid(0)
    assert facts["cwd"] == str(tmp_path)
    assert facts["stdin"] == ""
    assert facts["interrupt_ignored"] is False


def test_the_record_is_on_storage_when_submit_returns(run: RunFolder, start: Callable[..., JobRecord]) -> None:
    job = start("server")
    assert latest_job(run, 1, "server") == job
    assert find_process(int(job.job_id), job.start_time) is not None
    assert job_view(run, job).state is JobState.RUNNING
    assert [path.name for path in (run.path / "intents").iterdir()] == [f"1-server-{job.incarnation}.json"]


def test_setup_lines_run_before_the_job_and_the_recorded_pid_is_the_controllers(
    run: RunFolder, start: Callable[..., JobRecord]
) -> None:
    job = start("print_environment", profile=ClusterProfile(executor="local", setup=("export FROM_SETUP='a b'",)))
    wait_until(lambda: ended(run, job), "the job ends")
    facts = json.loads((run.path / "facts.json").read_text())
    assert facts["environment"]["FROM_SETUP"] == "a b"
    assert facts["parent"] == int(job.job_id)


def test_cancel_lets_the_leader_leave_and_leaves_no_process(run: RunFolder, start: Callable[..., JobRecord]) -> None:
    job = start("server")
    wait_until(run.endpoint_file().exists, "the server stand-in is ready")
    family = job_processes(job)
    assert len(family) >= 3  # controller, leader, the leader's child
    assert cancel_jobs([job], grace_s=30) == [job]
    assert not job_processes(job)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
    view = job_view(run, job)
    assert (view.state, view.reason) == (JobState.FINISHED, "stopped by SIGTERM")
    assert cancel_jobs([job], grace_s=30) == []


def test_a_leader_deaf_to_term_is_killed(run: RunFolder, start: Callable[..., JobRecord]) -> None:
    job = start("server", STANDIN="server:deaf")
    wait_until(run.heartbeat_file("server-0").exists, "the stand-in has started")
    cancel_jobs([job], grace_s=0.5)
    assert not job_processes(job)
    assert job_view(run, job).state is JobState.FAILED


def test_a_child_that_left_the_session_is_found_and_killed(run: RunFolder, start: Callable[..., JobRecord]) -> None:
    job = start("with_orphan")
    facts = wait_until(
        lambda: (run.path / "orphan.json").exists() and json.loads((run.path / "orphan.json").read_text()), ""
    )
    os.kill(facts["leader"], signal.SIGKILL)
    wait_until(lambda: ended(run, job), "the controller ends")
    assert psutil.pid_exists(facts["pid"])
    cancel_jobs([job], grace_s=0.5)
    assert not psutil.pid_exists(facts["pid"]) or psutil.Process(facts["pid"]).status() == psutil.STATUS_ZOMBIE


def test_a_killed_controller_takes_its_leader_along(run: RunFolder, start: Callable[..., JobRecord]) -> None:
    job = start("server")
    wait_until(run.endpoint_file().exists, "the server stand-in is ready")
    os.kill(int(job.job_id), signal.SIGKILL)
    wait_until(lambda: not job_processes(job), "leader and child are gone")
    assert job_view(run, job).reason == "stopped by SIGTERM"


def test_a_killed_leader_ends_its_job_without_an_exit_record(run: RunFolder, start: Callable[..., JobRecord]) -> None:
    job = start("server", STANDIN="server:kill")
    wait_until(lambda: ended(run, job), "the job ends")
    view = job_view(run, job)
    assert view.state is JobState.FAILED
    assert "no exit record" in view.reason
    wait_until(lambda: not job_processes(job), "the leader's child dies with it")


def test_a_leader_that_raises_leaves_its_traceback(run: RunFolder, start: Callable[..., JobRecord]) -> None:
    job = start("server", STANDIN="server:raise")
    wait_until(lambda: ended(run, job), "the job ends")
    view = job_view(run, job)
    assert (view.returncode, view.reason) == (1, "RuntimeError: the server's leader is broken")
    assert "Traceback" in view.last_lines
    assert "Traceback" in job_log(run, job).read_text()


def test_a_recycled_pid_is_not_the_job(run: RunFolder) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        born = started(psutil.Process(other.pid))
        job = JobRecord("r", "server", 1, "abc", "local", str(other.pid), os.uname().nodename, born - 100, 0.0, "")
        assert job_view(run, job).state is JobState.FAILED
        assert cancel_jobs([job], grace_s=0.1) == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_job_of_another_host_is_unknown_and_left_alone(run: RunFolder) -> None:
    job = JobRecord("r", "server", 1, "abc", "local", str(os.getpid()), "elsewhere", 0.0, 0.0, "")
    assert job_view(run, job).state is JobState.UNKNOWN
    assert job_processes(job) == []


def test_an_exit_record_of_an_earlier_attempt_does_not_count(run: RunFolder) -> None:
    run.exit_file("server-0", "old").write_text(json.dumps({"attempt": 1, "returncode": 0, "time": 50.0}))
    job = JobRecord("r", "server", 2, "abc", "local", "0", "h", 0.0, 40.0, "")
    assert exit_record(run, job) is None
    run.exit_file("server-0", "new").write_text(json.dumps({"attempt": 2, "returncode": 4, "time": 60.0}))
    assert (exit_record(run, job) or {})["returncode"] == 4


def test_a_job_whose_record_was_lost_is_found_by_its_mark(run: RunFolder, start: Callable[..., JobRecord]) -> None:
    job = start("server")
    wait_until(run.endpoint_file().exists, "the server stand-in is ready")
    assert unrecorded_jobs(run) == []
    run.jobs_file(1).unlink()
    (lost,) = unrecorded_jobs(run)
    assert lost.incarnation == job.incarnation
    cancel_jobs([lost], grace_s=30)
    assert not job_processes(job)


def test_ctrl_c_in_the_terminal_does_not_reach_a_job(run: RunFolder, tmp_path: Path) -> None:
    """A submitting process in a group of its own gets INT as a terminal would send it: to the whole group."""
    script = tmp_path / "submitter.py"
    script.write_text(
        "import sys, time\n"
        "from pathlib import Path\n"
        "from cluster import entry\n"
        "from cluster.profile import ClusterProfile\n"
        "from cluster.submit import submit\n"
        "from slipstream.config_file import parse_config\n"
        "from slipstream.run_folder import RunFolder\n"
        "entry.LEADERS['server'] = 'standin_roles:server'\n"
        "config = parse_config({'model': {'name': 'm'}, 'data': {'source': 'd'}, 'server': {'gpus': 0}, "
        "'learner': {'gpus': 0}})\n"
        "submit(ClusterProfile(executor='local'), RunFolder(sys.argv[1]), 'server', 1, config, cwd=Path('.'), why='')\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(STANDINS), str(STANDINS.parents[1])))}
    submitter = subprocess.Popen(
        [sys.executable, str(script), str(run.path)], env=environment, start_new_session=True, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(run.endpoint_file().exists, "the server stand-in is ready")
        os.killpg(submitter.pid, signal.SIGINT)
        submitter.wait(60)
        job = latest_job(run, 1, "server")
        assert job is not None
        assert job_view(run, job).state is JobState.RUNNING
        assert len(job_processes(job)) >= 3
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(submitter.pid, signal.SIGKILL)


def test_what_this_machine_cannot_run_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"server\.nodes = 2"):
        check_profile(LOCAL, config_of(nodes=2, data_parallel_size=2))
    one = config_of()
    one.cluster.shape = "one_allocation"
    with pytest.raises(ClusterError, match="one_allocation"):
        check_profile(LOCAL, one)


def test_the_sbatch_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-value")
    monkeypatch.setenv("SLIPSTREAM_INSTANCE", "me")
    profile = ClusterProfile(
        executor="slurm", partition="gpu", account="lab", time_limit=60, host_interface="ib0", setup=("module load cuda",),
        sbatch=("--exclusive", "--reservation=mine"), memory_gb=64, cpus_per_task=8,
    )  # fmt: skip
    config = config_of(nodes=2, gpus=4, data_parallel_size=8)
    text = describe(profile, RunFolder(tmp_path / "r"), "server", 1, config)
    lines = (
        text.replace(str(tmp_path), "ROOT").replace(sys.executable, "PYTHON").replace(os.getcwd(), "REPO").splitlines()
    )
    assert [line for line in lines if line.startswith("#SBATCH")] == [
        "#SBATCH --account=lab",
        "#SBATCH --chdir=REPO",
        "#SBATCH --comment=slipstream:me:r:1:server:incarnation",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --dependency=singleton",
        "#SBATCH --exclusive",
        "#SBATCH --export=NONE",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --job-name=slipstream-r-server",
        "#SBATCH --kill-on-invalid-dep=yes",
        "#SBATCH --mem=65536MB",
        "#SBATCH --no-requeue",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=ROOT/r/jobs/submitit/%j_0_log.out",
        "#SBATCH --partition=gpu",
        "#SBATCH --reservation=mine",
        "#SBATCH --signal=USR2@180",
        "#SBATCH --time=60",
    ]
    assert "module load cuda" in lines
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "SLIPSTREAM_INTERFACE")
    assert {f"export {name}=ib0" for name in names} <= set(lines)
    command = "PYTHON -u -m cluster.entry ROOT/r --role server --attempt 1 --incarnation incarnation --leader"
    assert any(f"{command} slipstream.serving.main:run" in line for line in lines)
    assert "s3cret-value" not in text
    assert not (tmp_path / "r").exists()
