"""What is to be done about one run, from what its folder, its cluster and Prefect say of it. Pure: no clock, no I/O.

The run's truth is its folder and its jobs; Prefect is made to agree with that. What a person asked of Prefect, a cancel or
another start, is made to happen.
"""

from dataclasses import dataclass
from enum import StrEnum

from cluster.decide import Kind

SETTLE_S = 30.0  # a flow that has given its run free tells Prefect within this
TOLD_S = 10.0  # a worker tells of a dead process twice; the later word undoes what was set in between
PENDING_S = 300.0  # a worker that has taken a flow run has started it within this
LATE_S = 600.0  # and takes one that waits within this, where one runs
LOST_S = 900.0  # a flow that has been started has its run folder within this
TRUTH = {Kind.FINISH: "COMPLETED", Kind.FAIL: "FAILED", Kind.CANCELLED: "CANCELLED"}
CANCELS = ("CANCELLING", "CANCELLED")
TERMINAL = ("COMPLETED", "FAILED", "CRASHED")


class Leader(StrEnum):
    """Who leads the run, as far as the observer can tell."""

    NONE = "nobody"
    RELEASED = "nobody any more"  # whoever led has given it free, and may still tell Prefect so
    UNSURE = "somebody on another host, who must give a sign of life"
    LIVES = "somebody"


class Act(StrEnum):
    NOTHING = "nothing"
    ASK_TO_STOP = "ask its leader to stop"
    ASK_CELLS = "ask its cells to stop"
    CANCEL = "stop its jobs, and end it as cancelled"
    STOP_JOBS = "stop its jobs"
    FAIL = "stop its jobs, and end it as failed"
    LEAD_BY_FLOW = "start its flow run again"
    LEAD_HERE = "start a supervisor here"
    SET_STATE = "set its state in Prefect"


@dataclass(frozen=True)
class FlowState:
    """A flow run in Prefect.

    Attributes:
        state: type of its state. at: when it was set, in seconds since the epoch.
        startable: it belongs to a deployment, so that a worker can start it again.
        age_s: seconds since, by the observer's clock; only for patience.
        cancelled: when a person cancelled it, if nobody has started it since, whatever state was forced on it; else 0.
    """

    state: str
    at: float = 0.0
    age_s: float = 3600.0
    startable: bool = True
    cancelled: float = 0.0


@dataclass(frozen=True)
class Facts:
    """One run, or one sweep, whose folder has a leader and an end as a run has.

    Attributes:
        others: why it is not this instance's; "": it is.
        flow_run: id of its flow run, or "".
        answers: whether there is a Prefect that answers. flow: the flow run there; None where it knows none.
        prepared: it has a configuration.
        outcome: how it ended, or None; reason: in words; age_s: seconds since.
        leader: who leads it; who: in words.
        live: its jobs that have not ended, in words. jobs_known: the scheduler answers.
        elsewhere: host whose processes they are, where they cannot be seen here; "".
        batch: its own SLURM job leads it, and is queued or runs.
        cancel: who asked it to stop, and why; "".
        sweep: of a cell: why its sweep was cancelled, where nobody has resumed the cell since; "".
        cells: of a sweep: those that have begun and not ended. unasked: those of them that nobody has asked to stop.
        resumed_at: when a person last resumed it, in seconds since the epoch.
        leads: how often a leader was started for it without a new step; max_leads: how often may be; lead_age_s: seconds
            since the newest, only for patience.
        seen_s: how long the observer has seen leader and Prefect's state as they are.
    """

    others: str = ""
    flow_run: str = ""
    answers: bool = True
    flow: FlowState | None = None
    prepared: bool = True
    outcome: Kind | None = None
    reason: str = ""
    age_s: float = 0.0
    leader: Leader = Leader.NONE
    who: str = ""
    live: tuple[str, ...] = ()
    jobs_known: bool = True
    elsewhere: str = ""
    batch: bool = False
    cancel: str = ""
    sweep: str = ""
    cells: tuple[str, ...] = ()
    unasked: tuple[str, ...] = ()
    resumed_at: float = 0.0
    leads: int = 0
    max_leads: int = 5
    lead_age_s: float = 3600.0
    seen_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    """One act, and why.

    Attributes:
        state: type of the state that SET_STATE sets.
        settled: the run has ended, and all agree.
        person: only a person can help.
    """

    act: Act
    why: str
    state: str = ""
    settled: bool = False
    person: bool = False


def nothing(why: str, settled: bool = False, person: bool = False) -> Plan:
    return Plan(Act.NOTHING, why, settled=settled, person=person)


def reconcile(run: Facts) -> Plan:
    """The next act for the run; NOTHING where all agree, or where only time or a person can help."""
    if run.others:
        return nothing(run.others)
    if run.flow_run and run.answers and run.flow is None:
        left = f"this Prefect does not know its flow run {run.flow_run}: left alone, its jobs too"
        if run.outcome is None and run.leader in (Leader.NONE, Leader.RELEASED):
            return nothing(f"{left}; nobody leads it: `slipstream supervise` or `slipstream stop` it", person=True)
        return nothing(left)
    if run.leader in (Leader.LIVES, Leader.UNSURE):
        return _led(run)
    return _open(run) if run.outcome is None else _ended(run)


def cancel_is_new(run: Facts) -> bool:
    """A person has cancelled the flow run, and has not resumed the run since."""
    return run.flow is not None and run.flow.cancelled > run.resumed_at


def _why_to_stop(run: Facts) -> str:
    if cancel_is_new(run):
        return "its flow run was cancelled in Prefect"
    if run.cancel:
        return f"asked to stop by {run.cancel}"
    return f"its sweep was cancelled: {run.sweep}" if run.sweep else ""


def _led(run: Facts) -> Plan:
    if run.outcome is None and not run.cancel and (why := _why_to_stop(run)):
        return Plan(Act.ASK_TO_STOP, why)
    if run.leader is Leader.UNSURE:
        return nothing(f"{run.who} is to give a sign of life")
    wrong = run.flow is not None and run.flow.state in TERMINAL and not cancel_is_new(run)
    if run.outcome is None and not run.cancel and run.flow is not None and wrong:
        return Plan(Act.SET_STATE, f"Prefect says {run.flow.state}, but {run.who} leads it", "RUNNING")
    return nothing(f"{run.who} leads it")


def _ended(run: Facts) -> Plan:
    assert run.outcome is not None
    if run.elsewhere:
        return nothing(f"it has ended; its jobs can only be seen on {run.elsewhere}")
    if not run.jobs_known:
        return nothing("it has ended; the scheduler does not say whether its jobs have")
    if run.live:
        return Plan(Act.STOP_JOBS, f"it has ended, and {', '.join(run.live)} still runs")
    said = f"{run.outcome}: {run.reason}"
    if run.flow is None:
        return nothing(said, settled=not run.flow_run)  # of a Prefect that is away nothing is known
    truth, state = TRUTH[run.outcome], run.flow.state
    if state == truth or state == "CANCELLED":
        return nothing(said, settled=True)
    if state == "CANCELLING":
        return Plan(Act.SET_STATE, said, "CANCELLED")
    if state == "SCHEDULED" and run.outcome is not Kind.FINISH:
        return nothing(f"{said}; its flow run is to start again")
    if state == "PENDING" and run.seen_s < PENDING_S:
        return nothing(f"{said}; a worker starts its flow run")
    if state == "PENDING" and run.outcome is not Kind.FINISH:  # a person's retry, which the worker died over
        return Plan(Act.SET_STATE, f"{said}; no worker has started its flow run for {run.seen_s:.0f} s", "SCHEDULED")
    if state in ("RUNNING", "PAUSED") and min(run.age_s, run.flow.age_s) < SETTLE_S:
        return nothing(f"{said}; its flow is to tell it, or has just been started")
    return Plan(Act.SET_STATE, said, truth)


def _open(run: Facts) -> Plan:
    """Nobody leads it, and it has not ended."""
    if run.elsewhere:
        why = f"nobody leads it, and its jobs can only be seen on {run.elsewhere}: resume it there"
        return nothing(why, person=True)
    if why := _why_to_stop(run):
        if run.unasked:
            return Plan(Act.ASK_CELLS, why)
        if run.cells:
            return nothing(f"{why}; {', '.join(run.cells)} must end first")
        return Plan(Act.CANCEL, why)
    if run.batch:
        return nothing("its own SLURM job leads it")
    act, why = _who_is_to_lead(run)
    if act is Act.LEAD_HERE and not run.prepared:
        return nothing(f"{why}, and it was never prepared: remove its folder", person=True)
    if (
        act is not Act.NOTHING and run.lead_age_s < SETTLE_S
    ):  # a worker may tell of the death of the one before once more
        return nothing("a leader has just been asked for")
    if act is not Act.NOTHING and run.leads >= run.max_leads:
        return Plan(Act.FAIL, exhausted(run.leads))
    return Plan(act, why)


def _who_is_to_lead(run: Facts) -> tuple[Act, str]:
    flow = run.flow
    if flow is None:
        away = "its Prefect does not answer" if run.flow_run else "it has no flow run"
        return Act.LEAD_HERE, f"nobody leads it, and {away}"
    if flow.state in CANCELS or flow.cancelled:
        return Act.LEAD_HERE, "nobody leads it; its flow run was cancelled before it was resumed"
    if not flow.startable:
        return Act.LEAD_HERE, "nobody leads it, and no worker starts its flow run"
    if flow.state == "PAUSED":
        return Act.NOTHING, "its flow run is paused"
    if flow.state == "SCHEDULED":
        if run.seen_s < LATE_S or not run.prepared:
            return Act.NOTHING, "its flow run waits for a worker"
        return Act.LEAD_HERE, f"nobody leads it, and no worker has taken its flow run for {run.seen_s:.0f} s"
    if flow.state == "CRASHED" and flow.age_s < TOLD_S:
        return Act.NOTHING, "its process has just died, and its worker may tell of it once more"
    if flow.state == "RUNNING" and flow.age_s < SETTLE_S:
        return Act.NOTHING, "its flow run has just been started"
    if flow.state == "RUNNING" and run.leader is Leader.RELEASED and run.seen_s < SETTLE_S:
        return Act.NOTHING, "its flow has just given it free, and is to tell Prefect"
    if flow.state == "PENDING" and run.seen_s < PENDING_S:
        return Act.NOTHING, "a worker starts its flow run"
    return Act.LEAD_BY_FLOW, f"nobody leads it, and Prefect says {flow.state}"


def exhausted(leads: int) -> str:
    return (
        f"whoever led it died, {leads} times without a new step in between: look at logs/supervise.log, at the flow run's "
        "log and at the memory of the machine that leads runs"
    )


def without_folder(flow: FlowState, seen_s: float, starts: int, max_starts: int) -> Plan:
    """What is to be done about a flow run that was started and has no run folder; `seen_s`: for how long that was seen."""
    if flow.cancelled or not flow.startable:
        return nothing("it never had a run")
    patience = {"CRASHED": 0.0, "PENDING": PENDING_S}.get(flow.state, LOST_S)
    if seen_s < patience:
        return nothing("its run is being prepared")
    if flow.state == "CRASHED" and flow.age_s < TOLD_S:
        return nothing("its process has just died, and its worker may tell of it once more")
    if starts > max_starts:
        return nothing(f"started {starts} times, and never came to a run folder: look at its log", person=True)
    return Plan(Act.LEAD_BY_FLOW, f"it has no run folder, and Prefect says {flow.state}")
