"""Starting the two jobs of a run. Their ids are on storage before anything waits on them."""

from cluster.jobs import JobRecord
from cluster.profile import load_profile
from cluster.submit import submit
from slipstream.run_folder import RunFolder
from tasks.interrupt import uninterrupted
from tasks.prepare import log_event, origin, started_in, stored_config


def start_role(run: RunFolder, attempt: int, role: str) -> JobRecord:
    """Submit the job of `role` ("server" or "learner"). Raises ClusterError, OSError."""
    config = stored_config(run)
    with uninterrupted(deliver_after=True), origin(run):
        profile = load_profile(config.cluster.profile)
        why = "start" if attempt == 1 else "resume"
        job = submit(profile, run, role, attempt, config, cwd=started_in(run), why=why)
        log_event(run, attempt, f"{role} submitted: job {job.job_id}")
    return job


def start_server(run: RunFolder, attempt: int) -> JobRecord | None:
    """Submit the server; or probe the one that `server.url` names and record its address (no job then)."""
    config = stored_config(run)
    if not config.server.url:
        return start_role(run, attempt, "server")
    from slipstream.serving.main import attach_external, required

    endpoint = attach_external(run, attempt, config.server.url, required(config), config.server.startup_timeout)
    log_event(run, attempt, f"using the server at {endpoint['url']}")
    return None


def start_learner(run: RunFolder, attempt: int) -> JobRecord:
    """Submit the learner; it waits for the server's address by itself, so both load at the same time."""
    return start_role(run, attempt, "learner")
