"""SLURM's words: states, lists of its clients, host lists, reasons of the queue. Outputs as SLURM 22.05 printed them."""

import pytest

from cluster.jobs import JobState
from cluster.queue import HOPELESS, hopeless
from cluster.slurm_states import STATES, expand_hosts, parse_sacct, parse_scontrol, parse_squeue, state_of, view_of

SQUEUE = """\
7|RUNNING|None|n[1-2]|slipstream-r1-server|slipstream:r1:1:server:aa11|end
8|PENDING|JobHeldUser||slipstream-r1-learner|slipstream:r1:1:learner:bb22|end
9|CANCELLED|JobHeldUser||x||end
10|PENDING|ReqNodeNotAvail, UnavailableNodes:n[3-4]||y|a|b|end
"""
SCONTROL = (
    "JobId=1 JobName=my job UserId=bed1(58001) GroupId=bed1(58001) MCS_label=N/A Priority=4294901759 Nice=0 Account=(null) "
    "QOS=normal JobState=FAILED Reason=NonZeroExitCode Dependency=(null) Requeue=1 Restarts=0 ExitCode=2:0 "
    "TimeLimit=365-00:00:00 SubmitTime=2026-11-29T22:08:45 Partition=main AllocNode:Sid=login:0 ReqNodeList=(null) "
    "ExcNodeList=(null) NodeList=n[1-2] BatchHost=n1 NumNodes=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=2,node=2,billing=2 "
    "Command=/shared/job.sh WorkDir=/home/bed1 Comment=slipstream:run-1:1:server:abcd  StdErr=/shared/o-1.log "
    "StdIn=/dev/null StdOut=/shared/o-1.log Power= \n"
    "JobId=2 JobName=x JobState=PENDING Reason=Resources NodeList=(null) Comment=(null) Power=\n"
)
SACCT = """\
5|NODE_FAIL|n3|slipstream-r-server|
5|COMPLETED|n4|slipstream-r-server|
6|CANCELLED by 58001|None assigned|slipstream-r-learner|
"""


@pytest.mark.parametrize(
    ("word", "reason", "state"),
    [
        ("PENDING", "Priority", JobState.PENDING),
        ("PENDING", "JobHeldUser", JobState.HELD),
        ("PENDING", "JobHeldAdmin", JobState.HELD),
        ("PENDING", "job_requeued_in_held_state", JobState.HELD),
        ("REQUEUE_HOLD", "", JobState.HELD),
        ("SPECIAL_EXIT", "", JobState.HELD),
        ("RESV_DEL_HOLD", "", JobState.HELD),
        ("REQUEUED", "", JobState.PENDING),
        ("CONFIGURING", "", JobState.PENDING),
        ("RUNNING", "JobHeldUser", JobState.RUNNING),
        ("RESIZING", "", JobState.RUNNING),
        ("SIGNALING", "", JobState.RUNNING),
        ("SUSPENDED", "", JobState.SUSPENDED),
        ("STOPPED", "", JobState.SUSPENDED),
        ("COMPLETING", "", JobState.COMPLETING),
        ("STAGE_OUT", "", JobState.COMPLETING),
        ("COMPLETED", "", JobState.FINISHED),
        ("FAILED", "", JobState.FAILED),
        ("CANCELLED by 58001", "", JobState.CANCELLED),
        ("CANCELLED+", "", JobState.CANCELLED),
        ("REVOKED", "", JobState.CANCELLED),
        ("PREEMPTED", "", JobState.PREEMPTED),
        ("NODE_FAIL", "", JobState.NODE_FAIL),
        ("TIMEOUT", "", JobState.TIMEOUT),
        ("OUT_OF_MEMORY", "", JobState.OUT_OF_MEMORY),
        ("BOOT_FAIL", "", JobState.BOOT_FAIL),
        ("DEADLINE", "", JobState.DEADLINE),
        ("SOMETHING_NEW", "", JobState.UNKNOWN),
        ("", "", JobState.UNKNOWN),
    ],
)
def test_states(word: str, reason: str, state: JobState) -> None:
    assert state_of(word, reason) is state


def test_every_state_of_ours_but_gone_and_unknown_comes_from_slurm() -> None:
    assert {*STATES.values(), JobState.GONE, JobState.UNKNOWN} == set(JobState)


def test_squeue() -> None:
    running, held, cancelled, waiting = (view_of(job, "squeue") for job in parse_squeue(SQUEUE))
    assert (running.state, running.nodes, running.queue_reason, running.reason) == (
        JobState.RUNNING,
        ("n1", "n2"),
        "",
        "",
    )
    assert (held.state, held.queue_reason, held.nodes) == (JobState.HELD, "JobHeldUser", ())
    assert (cancelled.state, cancelled.queue_reason) == (JobState.CANCELLED, "")
    assert waiting.queue_reason == "ReqNodeNotAvail, UnavailableNodes:n[3-4]"
    assert parse_squeue(SQUEUE)[3].comment == "a|b"


def test_other_jobs_of_the_user_do_not_hide_ours() -> None:
    rows = [
        "7+0|RUNNING|None|n1|het|",
        "7+1|RUNNING|None|n2|het|",
        "8_[1-3%2]|PENDING|Resources||array|",
        "9_1|RUNNING|None|n3|array|two\n10|lines",
        "11|RUNNING|None|n4|ours|slipstream:x",
    ]
    text = "CLUSTER: one\n" + "".join(f"{row}|end\n" for row in rows)
    jobs = parse_squeue(text)
    assert [job.job_id for job in jobs] == ["7+0", "7+1", "8_[1-3%2]", "9_1", "11"]
    assert [job.comment for job in jobs[3:]] == ["two\n10|lines", "slipstream:x"]
    assert parse_squeue("") == []


@pytest.mark.parametrize(
    "text",
    [
        "slurm_load_jobs error: Unable to contact",
        "1|RUNNING|None",
        "1|RUNNING|None|end",
        "x|RUNNING|None|n1|a|b|end",
        "1|RUNNING|None|n1|a|b|end\n2|RUNNING|No",
    ],
)
def test_what_is_no_list_is_not_read_as_an_empty_one(text: str) -> None:
    with pytest.raises(ValueError, match="squeue"):
        parse_squeue(text)


def test_scontrol() -> None:
    first, second = parse_scontrol(SCONTROL)
    assert (first.job_id, first.state, first.reason) == ("1", "FAILED", "NonZeroExitCode")
    assert (first.nodes, first.name, first.comment) == ("n[1-2]", "my job", "slipstream:run-1:1:server:abcd")
    assert (second.nodes, second.comment) == ("", "")
    view = view_of(first, "scontrol")
    assert view.reason == "SLURM: FAILED (NonZeroExitCode)"


def test_of_a_job_with_several_records_sacct_tells_the_newest() -> None:
    requeued, cancelled = parse_sacct(SACCT)
    assert (requeued.state, requeued.nodes) == ("COMPLETED", "n4")
    assert (view_of(cancelled, "sacct").state, cancelled.nodes) == (JobState.CANCELLED, "")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("(null)", ()),
        ("n1", ("n1",)),
        ("n[1-3,07],login", ("n1", "n2", "n3", "n07", "login")),
        ("gpu[008-010]", ("gpu008", "gpu009", "gpu010")),
        ("r[1-2]n[3,5]-ib", ("r1n3-ib", "r1n5-ib", "r2n3-ib", "r2n5-ib")),
        ("a1,b[2-3]", ("a1", "b2", "b3")),
    ],
)
def test_host_lists(text: str, names: tuple[str, ...]) -> None:
    assert expand_hosts(text) == names


@pytest.mark.parametrize("reason", [*HOPELESS, "(PartitionTimeLimit)", "QOSMaxLicensePerJob"])
def test_hopeless_reasons_say_why(reason: str) -> None:
    assert len(hopeless(reason)) > 30


@pytest.mark.parametrize(
    "reason",
    [
        "", "None", "Resources", "Priority", "Dependency", "BeginTime", "JobHeldUser", "AssocMaxJobsLimit",
        "QOSMaxJobsPerUserLimit",
        "AssocGrpGRES", "QOSGrpCpuLimit", "ReqNodeNotAvail, UnavailableNodes:n1", "PartitionDown", "Licenses", "Reservation",
        "NodeDown", "QOSMaxGRESPerUser", "Cleaning",
    ],
)  # fmt: skip
def test_what_may_still_start_is_not_hopeless(reason: str) -> None:
    assert hopeless(reason) == ""
