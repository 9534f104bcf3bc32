"""One look at the run folder and the jobs: facts only, for `cluster.decide`."""

from typing import Any

from cluster.decide import ROLES, Beat, Observation, Policy
from cluster.jobs import JobView, latest_job
from cluster.local_jobs import job_view
from cluster.submit import job_log
from slipstream.process import last_lines
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, read_json
from tasks.claim import superseded

WRITERS = {"server": "server-0", "learner": "learner", "rollout": "rollout"}
# Phases in which the learner loads; in any other it has begun to work.
LOADING = frozenset(
    {"starting", "loading", "waiting for the server", "loading the model", "probing the server", "delivering weights"}
)


def heartbeat(run: RunFolder, writer: str, attempt: int) -> dict[str, Any]:
    """The newest beat of `writer` in this attempt, or {}."""
    try:
        value = read_json(run.heartbeat_file(writer))
    except (ValueError, OSError):
        return {}
    return value if isinstance(value, dict) and value.get("attempt") == attempt else {}


def endpoint(run: RunFolder, attempt: int) -> dict[str, Any]:
    """The server's endpoint of this attempt, or {}."""
    value = read_json(run.endpoint_file())
    return value if isinstance(value, dict) and value.get("attempt") == attempt else {}


def cancel_request(run: RunFolder) -> str:
    value = read_json(run.cancel_file)
    return f"{value.get('who', 'somebody')}: {value.get('why', 'no reason given')}" if isinstance(value, dict) else ""


def _superseded(run: RunFolder, attempt: int) -> str:
    later = superseded(run, attempt)
    return f"attempt {later} has taken over" if later else ""


def policy_of(config: RunConfig) -> Policy:
    return Policy(
        server_startup_s=config.server.startup_timeout,
        learner_startup_s=config.learner.startup_timeout,
        step_s=config.learner.step_timeout,
        roles=("learner",) if config.server.url else ROLES,
    )


def _beat(value: dict[str, Any]) -> Beat:
    step = float(value.get("step") or 0)
    training = step > 0 or (value.get("phase") is not None and value["phase"] not in LOADING)
    return Beat(int(value.get("counter") or 0), (float(value.get("progress") or 0), step), training)


def observe(run: RunFolder, attempt: int, now: float) -> Observation:
    """The run as it stands on storage, at `now` of the observer's monotonic clock."""
    jobs: dict[str, JobView] = {}
    for role in ROLES:
        job = latest_job(run, attempt, role)
        if job is not None:
            jobs[role] = job_view(run, job)
    beats = {role: heartbeat(run, writer, attempt) for role, writer in WRITERS.items()}
    return Observation(
        now=now,
        jobs=jobs,
        beats={role: _beat(value) for role, value in beats.items() if value},
        endpoint=bool(endpoint(run, attempt)),
        result=(read_json(run.path / "result.json") or {}).get("attempt") == attempt,
        cancel=cancel_request(run) or _superseded(run, attempt),
    )


def evidence(run: RunFolder, attempt: int, role: str | None) -> tuple[str, str]:
    """(log file, last lines) that explain why `role` failed.

    What its leader recorded at its end; else the newer part of its log and of its job's own output.
    """
    if role is None:
        return "", ""
    job = latest_job(run, attempt, role)
    view = job_view(run, job) if job else None
    if view and view.last_lines:
        return view.log, view.last_lines
    logs = [run.log_file(role, attempt)] + ([job_log(run, job)] if job else [])
    texts = [(log, last_lines(log)) for log in logs]
    found = [(log, text) for log, text in texts if text.strip()]
    if not found:
        return str(logs[0]), ""
    return " and ".join(str(log) for log, _ in found), "\n".join(text for _, text in found)
