"""One look at the run folder and the jobs: facts only, for `cluster.decide`."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.backend import roles_of
from cluster.decide import Beat, Observation, Policy
from cluster.jobs import JobRecord, JobState, JobView
from cluster.queue import hopeless
from slipstream.process import last_lines
from slipstream.run_config import RunConfig
from slipstream.run_folder import DamagedFile, RunFolder, read_object, write_json
from tasks.records import assignment, read_faults, run_step

US = "supervisor"  # who asks a learner to leave

OVER = frozenset({"ended", "finished", "left"})


def newest_attempt(run: RunFolder) -> int:
    return (run.attempts() or [0])[-1]


def heartbeat(run: RunFolder, writer: str, incarnation: str | None = None) -> dict[str, Any]:
    """The newest beat of `writer`, or {}; with `incarnation` only one of that job."""
    try:
        value = read_object(run.heartbeat_file(writer), "step", "max_steps", "counter", "attempt", "time", "progress")
    except (ValueError, OSError):
        return {}
    if incarnation is not None and value.get("incarnation") != incarnation:
        return {}
    return value


def counting_heartbeat(run: RunFolder, writer: str) -> dict[str, Any]:
    """The newest beat of `writer`, if it is of a job that counts, or {}; where nobody supervises, of the newest attempt."""
    beat, named = heartbeat(run, writer), run.assignment()
    if not named:
        return beat if beat.get("attempt") == newest_attempt(run) else {}
    role = "server" if writer.startswith("server") else "learner"
    return beat if beat.get("incarnation") == (named.get(role) or named.get("allocation")) else {}


def endpoint(run: RunFolder) -> dict[str, Any]:
    """The address of the server that counts, or {}. Raises OSError."""
    named = assignment(run)
    incarnation = named.get("server") or named.get("allocation")
    value = read_object(run.endpoint_file())
    if incarnation is not None:
        return value if value.get("incarnation") == incarnation else {}
    return value if value.get("attempt") == newest_attempt(run) else {}


def cancel_request(run: RunFolder) -> str:
    """Who asked the run to stop, and why; ''. A damaged request is one all the same."""
    try:
        value = read_object(run.cancel_file)
    except DamagedFile as error:
        return f"somebody: {error}"
    return f"{value.get('who', 'somebody')}: {value.get('why', 'no reason given')}" if value else ""


def policy_of(config: RunConfig) -> Policy:
    recovery = config.recovery
    return Policy(
        server_startup_s=config.server.startup_timeout,
        learner_startup_s=config.learner.startup_timeout,
        step_s=config.learner.step_timeout,
        sync_s=config.learner.sync_timeout,
        save_s=config.learner.save_timeout,
        roles=roles_of(config),
        max_restarts=recovery.max_restarts,
        backoff_s=recovery.backoff,
        backoff_max_s=recovery.backoff_max,
        max_idle_s=60 * recovery.max_idle_gpu_minutes,
        heartbeat_s=recovery.heartbeat_timeout,
    )


def read_beat(value: Mapping[str, Any]) -> Beat:
    """What of a heartbeat file decides."""
    step = int(value.get("step") or 0)
    phase = str(value.get("phase") or "")
    return Beat(
        counter=int(value.get("counter") or 0),
        work=(float(value.get("progress") or 0), float(step)),
        training=bool(value.get("begun")) or phase == "training",
        phase=phase,
        step=step,
        host=str(value.get("host") or ""),
        ended=phase in OVER,
    )


def beats(run: RunFolder, incarnations: Mapping[str, str]) -> dict[str, Beat]:
    """The heartbeats that the run's jobs have written, by writer."""
    found: dict[str, Beat] = {}
    for path in sorted((run.path / "heartbeats").glob("*.json")):
        writer = path.stem
        role = "server" if writer.startswith("server") else "learner"
        owner = incarnations.get("allocation") or incarnations.get(role)
        if writer != "supervisor" and owner is not None and (value := heartbeat(run, writer, owner)):
            found[writer] = read_beat(value)
    return found


def observe(
    run: RunFolder,
    jobs: Mapping[str, JobRecord],
    views: Mapping[str, JobView],
    missing: Sequence[str],
    now: float,
    time: float,
) -> Observation:
    """The run as it stands on storage.

    Args:
        jobs: the job of each role that counts.
        views: what the scheduler and exit records say of them, by incarnation.
        missing: roles whose job counts but was never recorded: it may run.
        now, time: the observer's monotonic clock, and seconds since the epoch.

    Raises OSError where the storage does not answer.
    """
    attempt = newest_attempt(run)
    incarnations = {role: job.incarnation for role, job in jobs.items()}
    seen = {role: views.get(job.incarnation, JobView(JobState.UNKNOWN)) for role, job in jobs.items()}
    for role in missing:
        incarnations[role] = str(assignment(run).get(role, ""))
        seen[role] = JobView(JobState.UNKNOWN)
    whys = {role: hopeless(view.queue_reason) for role, view in seen.items() if view.state is JobState.PENDING}
    return Observation(
        now=now,
        time=time,
        jobs=seen,
        incarnations=incarnations,
        beats=beats(run, incarnations),
        endpoint=bool(endpoint(run)),
        result=_result_of(run) == attempt,
        cancel=cancel_request(run),
        hopeless={role: why for role, why in whys.items() if why},
        step=run_step(run),
        attempt=attempt,
        faults=read_faults(run),
        told_to_leave=frozenset(role for role, job in jobs.items() if _told_to_leave(run, job.incarnation)),
    )


def states_of(jobs: Mapping[str, JobRecord], views: Mapping[str, JobView]) -> dict[str, dict[str, Any]]:
    """What the scheduler said of each job, by incarnation, as the supervisor's heartbeat carries it: whoever shows a run
    reads it there, and asks no scheduler."""
    seen = {job.incarnation: (role, views[job.incarnation]) for role, job in jobs.items() if job.incarnation in views}
    return {
        incarnation: {
            "role": role,
            "state": str(view.state),
            "nodes": list(view.nodes),
            "reason": view.queue_reason or view.reason,
        }
        for incarnation, (role, view) in seen.items()
    }


def _result_of(run: RunFolder) -> Any:
    """The attempt that wrote the run's result. A damaged one is written again by the next attempt."""
    with contextlib.suppress(DamagedFile):
        return read_object(run.path / "result.json").get("attempt")
    return None


def ask_to_leave(run: RunFolder, job: JobRecord, why: str, now: float) -> None:
    """Tell a learner to save and leave, once."""
    if not run.leave_file(job.incarnation).exists():
        write_json(run.leave_file(job.incarnation), {"signal": US, "why": why, "time": now})


def _told_to_leave(run: RunFolder, incarnation: str) -> bool:
    with contextlib.suppress(DamagedFile):
        return read_object(run.leave_file(incarnation)).get("signal") == US
    return False


def evidence(run: RunFolder, job: JobRecord | None, view: JobView | None, job_log: Any) -> tuple[str, str]:
    """(log file, last lines) that explain why a job failed.

    What its leader recorded at its end; else its log and its job's own output (`job_log`: path of that).
    """
    if job is None:
        return "", ""
    if view and view.last_lines:
        return view.log, view.last_lines
    logs = [run.log_file(job.role, job.attempt), job_log]
    texts = [(log, last_lines(log)) for log in logs]
    found = [(log, text) for log, text in texts if text.strip()]
    if not found:
        return str(logs[0]), ""
    return " and ".join(str(log) for log, _ in found), "\n".join(text for _, text in found)
