"""How often SLURM is asked, and what is made of its answers, with clients that are functions here."""

import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cluster.slurm_backend
import cluster.squeue
from cluster.clients import ClusterAway, call, client_environment
from cluster.jobs import JobRecord, JobState
from cluster.profile import ClusterError, ClusterProfile
from cluster.slurm_backend import SlurmBackend
from cluster.slurm_states import SlurmJob
from cluster.squeue import Queue, Snapshot
from slipstream.run_folder import RunFolder, append_jsonl, write_json
from tasks.origin import Origin, write_origin
from tasks.stored import all_jobs


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(cluster.squeue.tempfile, "tempdir", str(tmp_path / "tmp"))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path, "r")
    folder.begin_attempt(None, 0)
    return folder


class Asked:
    """Stands for squeue."""

    def __init__(self, *jobs: SlurmJob, error: str = "") -> None:
        self.jobs, self.error, self.count = jobs, error, 0

    def __call__(self, timeout_s: float) -> Snapshot:
        self.count += 1
        return Snapshot(time.monotonic(), time.time(), self.jobs, self.error)


def listed(state: str, job_id: str = "7", name: str = "slipstream-r-server", comment: str = "") -> SlurmJob:
    return SlurmJob(job_id, state, "None", "n1", name, comment)


def record(submitted: float = 0.0) -> JobRecord:
    return JobRecord("r", "server", 1, "aa", "slurm", "7", "login", 0.0, submitted, "start")


def backend(ask: Asked, poll_s: float = 3600) -> SlurmBackend:
    return SlurmBackend(ClusterProfile(executor="slurm"), queue=Queue(poll_s, 1, ask))


def test_many_supervisors_of_a_host_ask_once_in_an_interval() -> None:
    ask = Asked(listed("RUNNING"))
    queues = [Queue(3600, 1, ask) for _ in range(10)]
    assert {len(queue.snapshot().jobs) for queue in queues for _ in range(3)} == {1}
    assert ask.count == 1
    Queue(0.0, 1, ask).snapshot()
    assert ask.count == 2


def _look(folder: str, count: Any) -> None:
    cluster.squeue.tempfile.tempdir = folder

    def ask(timeout_s: float) -> Snapshot:
        with count.get_lock():
            count.value += 1
        time.sleep(0.2)
        return Snapshot(time.monotonic(), time.time())

    Queue(3600, 30, ask).snapshot()


def test_those_who_ask_at_the_same_time_wait_for_one_answer(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    count = context.Value("i", 0)
    processes = [context.Process(target=_look, args=(str(tmp_path / "tmp"), count)) for _ in range(5)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert count.value == 1


def test_a_folder_that_others_may_write_to_is_not_believed(tmp_path: Path) -> None:
    folder = tmp_path / "tmp" / f"slipstream-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    ask = Asked()
    for _ in range(2):
        Queue(3600, 1, ask).snapshot()
    assert ask.count == 2
    assert list(folder.iterdir()) == []


def test_no_answer_is_unknown_and_shared_too(run: RunFolder) -> None:
    ask = Asked(error="`squeue` did not answer within 60 s")
    for _ in range(2):
        view = backend(ask).look(run, [record()])["aa"]
        assert (view.state, view.reason) == (JobState.UNKNOWN, "`squeue` did not answer within 60 s")
    assert ask.count == 1


class Clients:
    """Stands for scontrol and sacct."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: str | Exception) -> None:
        self.answers, self.calls = answers, []
        monkeypatch.setattr(cluster.slurm_backend, "call", self)

    def __call__(self, argv: list[str], timeout_s: float = 60) -> str:
        self.calls.append(argv[0])
        answer = self.answers.get(argv[0], ClusterError("Invalid job id specified"))
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("answers", "state", "source"),
    [
        (
            {"scontrol": "JobId=7 JobName=slipstream-r-server JobState=TIMEOUT NodeList=n1"},
            JobState.TIMEOUT,
            "scontrol",
        ),
        ({"scontrol": ClusterAway("timed out")}, JobState.UNKNOWN, "scontrol"),
        ({"scontrol": ClusterError("slurm_load_jobs error: Invalid job id specified")}, JobState.GONE, "scontrol"),
        ({"scontrol": ClusterError("Job 7 not found")}, JobState.GONE, "scontrol"),
        ({"scontrol": "No jobs in the system"}, JobState.GONE, "scontrol"),
        ({"scontrol": ClusterError("Access/permission denied")}, JobState.UNKNOWN, "scontrol"),
        ({"scontrol": ClusterError("Protocol authentication error")}, JobState.UNKNOWN, "scontrol"),
        ({"scontrol": ClusterError("there is no `scontrol` on this machine")}, JobState.UNKNOWN, "scontrol"),
        ({"scontrol": ClusterError("exit code 1")}, JobState.UNKNOWN, "scontrol"),
        (
            {"scontrol": ClusterError("exit code 1"), "sacct": "7|RUNNING|n1|slipstream-r-server|"},
            JobState.UNKNOWN,
            "scontrol",
        ),
        (
            {"scontrol": ClusterError("exit code 1"), "sacct": "7|TIMEOUT|n1|slipstream-r-server|"},
            JobState.TIMEOUT,
            "sacct",
        ),
        (
            {"sacct": "7|NODE_FAIL|n1|slipstream-r-server|\n7|PREEMPTED|n1|slipstream-r-server|"},
            JobState.PREEMPTED,
            "sacct",
        ),
        ({"sacct": "7|COMPLETED|n1|another job|"}, JobState.GONE, "scontrol"),
        # it lags behind: the scheduler, which answers, does not know the job
        ({"sacct": "7|RUNNING|n1|slipstream-r-server|"}, JobState.GONE, "scontrol"),
        ({}, JobState.GONE, "scontrol"),
    ],
)
def test_a_job_that_squeue_does_not_list(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], state: JobState, source: str
) -> None:
    clients = Clients(monkeypatch, **answers)
    one = backend(Asked())
    view = one.look(run, [record()])["aa"]
    assert (view.state, view.source) == (state, source)
    calls = len(clients.calls)
    assert one.look(run, [record()])["aa"] == view
    assert len(clients.calls) == calls  # once for a snapshot


@pytest.mark.parametrize(
    ("state", "sinfo", "lost"),
    [
        ("NODE_FAIL", "n1|idle\nn2|idle\nn3|down*\nn4|mixed\n", ("n3",)),
        ("NODE_FAIL", "n1|idle\nn2|idle*\nn3|down\nn3|down\nn4|failing\n", ("n2", "n3", "n4")),
        ("NODE_FAIL", "n1|idle\nn2|idle\nn3|drained\nn4|idle\n", ()),
        ("NODE_FAIL", ClusterAway("timed out"), ()),
        ("FAILED", "n3|down*\n", ()),
    ],
)
def test_which_node_a_job_was_lost_with(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, state: str, sinfo: str | Exception, lost: tuple[str, ...]
) -> None:
    clients = Clients(monkeypatch, sinfo=sinfo)
    ask = Asked(replace(listed(state), nodes="n[1-4]"))
    one = backend(ask, poll_s=0)
    assert one.look(run, [record()])["aa"].lost == lost
    assert one.look(run, [record()])["aa"].lost == lost
    assert clients.calls == (["sinfo"] if state == "NODE_FAIL" else [])  # once


def test_squeue_is_believed_before_sacct(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = Clients(monkeypatch, sacct="7|NODE_FAIL|n1|slipstream-r-server|")
    assert backend(Asked(listed("PENDING"))).look(run, [record()])["aa"].state is JobState.PENDING
    assert clients.calls == []


def test_a_job_submitted_after_the_snapshot_is_pending_and_nobody_is_asked(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = Clients(monkeypatch)
    one = backend(Asked())
    one.look(run, [record()])
    clients.calls.clear()
    newer = replace(record(time.time() + 1), job_id="8", incarnation="bb")
    view = one.look(run, [newer])["bb"]
    assert (view.state, view.source, clients.calls) == (JobState.PENDING, "sbatch", [])


def test_a_young_job_that_nobody_knows_is_not_gone(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    Clients(monkeypatch)
    assert backend(Asked()).look(run, [record(time.time() - 5)])["aa"].state is JobState.PENDING


def test_a_final_state_outlives_slurms_memory_and_an_outage(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = Clients(monkeypatch)
    ask = Asked(listed("CANCELLED"))
    one = backend(ask, poll_s=0)
    assert one.look(run, [record()])["aa"].state is JobState.CANCELLED
    ask.jobs = ()
    assert one.look(run, [record()])["aa"].state is JobState.CANCELLED
    ask.error = "away"
    assert one.look(run, [record()])["aa"].state is JobState.CANCELLED
    assert clients.calls == []


def test_another_job_with_the_number_is_not_ours(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    Clients(monkeypatch)
    other = listed("RUNNING", name="another", comment="")
    assert backend(Asked(other)).look(run, [record()])["aa"].state is JobState.GONE
    renamed = listed("RUNNING", name="renamed", comment="slipstream:r:1:server:aa")
    assert backend(Asked(renamed), poll_s=0).look(run, [record()])["aa"].state is JobState.RUNNING


def test_a_job_of_another_instance_is_not_ours(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Number, name, run, attempt and incarnation are those of our job; whose it is, is not."""
    calls = Clients(monkeypatch).calls
    write_origin(run, Origin(instance="me"))
    job = listed("RUNNING", comment="slipstream:somebody:r:1:server:aa")
    assert backend(Asked(job), poll_s=0).look(run, [record()])["aa"].state is JobState.GONE
    assert backend(Asked(job), poll_s=0).cancel(run, [record()]) == []
    intent(run, 5)
    assert backend(Asked(job), poll_s=0).adopt(run) == []
    assert backend(Asked(job), poll_s=0).cancel(run, all_jobs(run)) == []
    assert not any(argv[0] == "scancel" for argv in calls)
    ours = listed("RUNNING", comment="slipstream:me:r:1:server:aa")
    assert backend(Asked(ours), poll_s=0).look(run, [record()])["aa"].state is JobState.RUNNING
    assert [found.job_id for found in backend(Asked(ours), poll_s=0).adopt(run)] == ["7"]


def intent(run: RunFolder, age_s: float, host: str = "elsewhere") -> None:
    value = {"role": "server", "attempt": 1, "incarnation": "aa", "executor": "slurm", "host": host, "why": "start"}
    write_json(
        run.path / "intents" / "1-server-aa.json", {**value, "time": time.time() - age_s, "pid": 0, "pid_started": 0}
    )


@pytest.mark.parametrize(("age_s", "host", "void"), [(5, "elsewhere", False), (90, "elsewhere", True), (5, "", True)])
def test_an_intent_without_a_job_is_void_once_that_is_certain(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, age_s: float, host: str, void: bool
) -> None:
    Clients(monkeypatch)
    intent(run, age_s, host or os.uname().nodename)
    assert backend(Asked()).adopt(run) == []
    assert (run.path / "intents" / "1-server-aa.void").exists() is void


def test_an_intent_whose_job_is_over_is_found_in_the_accounting(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clients(monkeypatch, sacct="9|FAILED|n1|slipstream-r-server|")
    intent(run, 90)
    assert [job.job_id for job in backend(Asked()).adopt(run)] == ["9"]


def test_where_a_site_takes_comments_away_the_name_finds_the_job(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clients(monkeypatch)
    intent(run, 5)
    assert [job.job_id for job in backend(Asked(listed("PENDING"))).adopt(run)] == ["7"]


def test_clients_see_no_settings_that_change_their_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "SQUEUE_FORMAT": "x",
        "SBATCH_EXPORT": "ALL",
        "SLURM_CONF": "/etc/s",
        "SLURM_JOB_ID": "3",
        "A": "1",
        "K_TOKEN": "s",
    }
    assert client_environment(given) == {"SLURM_CONF": "/etc/s", "A": "1", "LC_ALL": "C"}


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ("sleep 60", ClusterAway, "did not answer within 0.5 s"),
        ("echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1", ClusterAway, "Unable to contact"),
        (
            "echo 'Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1",
            ClusterAway,
            "timed out",
        ),
        ("echo 'Batch job submission failed: Invalid account' >&2; exit 1", ClusterError, "Invalid account"),
        ("exit 3", ClusterError, "exit code 3"),
    ],
)
def test_a_client_that_hangs_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, error: type[Exception], words: str
) -> None:
    client = tmp_path / "client"
    client.write_text(f"#!/bin/sh\n{script}\n")
    client.chmod(0o755)
    with pytest.raises(error, match=words) as caught:
        call([str(client)], 0.5 if script.startswith("sleep") else 30)
    assert type(caught.value) is error


def test_a_machine_without_slurm() -> None:
    with pytest.raises(ClusterError, match="there is no `no-such-client`"):
        call(["no-such-client"])


@pytest.mark.parametrize("comment", ["slipstream:me:r:1:server:aa", "slipstream:r:1:server:aa", ""])
def test_a_job_without_a_record_is_stopped_too(run: RunFolder, monkeypatch: pytest.MonkeyPatch, comment: str) -> None:
    """Whoever submitted it died before its record was written, or the disk was full."""
    write_origin(run, Origin(instance="me"))
    intent(run, 5)
    (run.path / "intents" / "1-learner-cc.json").write_text("{")
    append_jsonl(run.jobs_file(1), {"role": "learner", "of": "another version"})
    ask = Asked(listed("RUNNING", comment=comment), listed("RUNNING", "8", "another job"))
    calls = []

    def call(argv: list[str], timeout_s: float = 60) -> str:
        calls.append(argv)
        if argv[:2] == ["scancel", "--signal=TERM"]:
            ask.jobs = (listed("CANCELLED", comment=comment),)
        return ""

    monkeypatch.setattr(cluster.slurm_backend, "call", call)
    assert [job.job_id for job in backend(ask).cancel(run, all_jobs(run))] == ["7"]
    assert ["scancel", "--signal=TERM", "7"] in calls
    assert not any("8" in argv for argv in calls)


def test_a_number_that_is_given_again_brings_no_state_with_it(run: RunFolder) -> None:
    ask = Asked(listed("FAILED"))
    one = backend(ask, poll_s=0)
    assert one.look(run, [record()])["aa"].state is JobState.FAILED
    ask.error = "`squeue` did not answer"
    assert one.look(run, [replace(record(), incarnation="bb")])["bb"].state is JobState.UNKNOWN
