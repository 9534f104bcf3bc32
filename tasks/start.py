"""Starting the jobs of a run. Which one counts is on storage before it is submitted, its id before anything waits on it."""

from pathlib import Path

from cluster.backend import Backend, JobRequest
from cluster.clients import ClusterAway
from cluster.decide import LEARNERS
from cluster.jobs import JobRecord, read_jobs
from slipstream.process import new_incarnation
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder
from tasks.interrupt import uninterrupted
from tasks.observe import newest_attempt
from tasks.records import assign, log_event
from tasks.stored import backend_for, origin, started_in, stored_config


def start_role(
    run: RunFolder, role: str, why: str = "", exclude: tuple[str, ...] = (), backend: Backend | None = None
) -> JobRecord:
    """Submit the job of `role`: "server", "learner" or "allocation".

    A learner (or an allocation) that is started again begins a new attempt, from the newest complete checkpoint.
    Raises ClusterError, OSError: the role then has no job; ClusterAway: it may have one.
    """
    config = stored_config(run)
    attempt = newest_attempt(run)
    with uninterrupted(deliver_after=True), origin(run):
        if role in LEARNERS and any(job.role in LEARNERS for job in read_jobs(run, attempt)):
            attempt, _ = next_attempt(run, config)
        request = JobRequest(
            role=role,
            attempt=attempt,
            incarnation=new_incarnation(),
            config=config,
            cwd=started_in(run),
            why=why or ("start" if attempt == 1 else "resume"),
            exclude=exclude,
        )
        assign(run, attempt, **{role: request.incarnation})
        try:
            job = (backend or backend_for(run)).submit(run, request)
        except ClusterAway:
            raise
        except BaseException:
            assign(run, attempt, **{role: None})
            raise
        left_out = f", not on {', '.join(exclude)}" if exclude else ""
        log_event(run, attempt, f"{role} submitted: job {job.job_id}{left_out}")
    return job


def next_attempt(run: RunFolder, config: RunConfig) -> tuple[int, list[str]]:
    """A new attempt from the newest complete checkpoint, and what is to be said of it. The old learner must be dead:
    checkpoints that are not complete are set aside. An external server is probed again."""
    from slipstream.learner.checkpoint import ledger_known, resume_point

    found, notes = resume_point(run)
    checkpoint, step = (str(Path(found[0]).relative_to(run.path)), found[1]) if found else (None, 0)
    attempt = run.begin_attempt(checkpoint, step, ledger_known(found[0]) if found else None)
    where = f"step {step} ({checkpoint})" if found else "the start: there is no complete checkpoint"
    notes.append(f"attempt {attempt} continues from {where}")
    for note in notes:
        log_event(run, attempt, note)
    if config.server.url:
        attach(run, attempt, config)
    return attempt, notes


def attach(run: RunFolder, attempt: int, config: RunConfig) -> None:
    """Probe the server that `server.url` names, and record its address. Raises ServerError, StartError."""
    from slipstream.serving.main import attach_external, required

    endpoint = attach_external(run, attempt, str(config.server.url), required(config), config.server.startup_timeout)
    log_event(run, attempt, f"using the server at {endpoint['url']}")


def start_server(run: RunFolder) -> JobRecord | None:
    """Submit the server; or probe the one that `server.url` names (no job then). Nothing where it has its job already."""
    config = stored_config(run)
    if config.server.url:
        attach(run, newest_attempt(run), config)
        return None
    role = "allocation" if config.cluster.shape == "one_allocation" else "server"
    return None if role in run.assignment() else start_role(run, role)


def start_learner(run: RunFolder) -> JobRecord | None:
    """Submit the learner; it waits for the server's address by itself, so both load at the same time. Nothing where it
    has its job already, or comes with the allocation."""
    one = stored_config(run).cluster.shape == "one_allocation"
    return None if one or "learner" in run.assignment() else start_role(run, "learner")
