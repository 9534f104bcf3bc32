"""The training flow: prepare → start server → start learner → supervise → finish.

The tasks are thin over `tasks/`; the run folder, not Prefect, remembers the run. No task is cached: a cached one would
hand a resumed run the job of a dead one. No result is persisted.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from cluster.clients import ClusterAway
from cluster.decide import Decision, Kind, Observation
from cluster.jobs import JobRecord
from flows.masking import mask_of, masking_failures
from flows.run_page import showing
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder
from tasks import finish as finishing
from tasks import lease as leasing
from tasks import prepare as preparing
from tasks import start as starting
from tasks import stop as stopping
from tasks import supervise as supervising
from tasks.interrupt import uninterrupted
from tasks.outcome import Outcome, outcome_of

OPTIONS: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}


@task(name="prepare", **OPTIONS)
def prepare(config: RunConfig, run_id: str | None) -> str:
    prepared = preparing.prepare(config, run_id)
    get_run_logger().info("run folder %s", prepared.run.path)
    for note in prepared.notes:
        get_run_logger().warning(note)
    return str(prepared.run.path)


@task(name="prepare resume", **OPTIONS)
def prepare_resume(run_dir: str) -> str:
    prepared = preparing.resume_prepare(run_dir)
    for note in prepared.notes:
        get_run_logger().info(note)
    return str(prepared.run.path)


@task(name="start server", **OPTIONS)
def start_server(run_dir: str) -> str | None:
    return _job_id(lambda: starting.start_server(RunFolder(run_dir)))


@task(name="start learner", **OPTIONS)
def start_learner(run_dir: str) -> str | None:
    return _job_id(lambda: starting.start_learner(RunFolder(run_dir)))


def _job_id(start: Callable[[], JobRecord | None]) -> str | None:
    """None where there is no job to start, or where the scheduler is away: the supervisor goes on trying."""
    try:
        job = start()
    except ClusterAway as error:
        get_run_logger().warning("%s", error)
        return None
    return job.job_id if job else None


@task(name="supervise", **OPTIONS)
def supervise(run_dir: str) -> Outcome:
    run = RunFolder(run_dir)
    log, mask = get_run_logger(), mask_of(run)
    said = ""

    def tell(_seen: Observation, decision: Decision) -> None:
        nonlocal said
        if decision.reason != said:
            said = decision.reason
            log.info(mask(said))

    with masking_failures(run):
        return supervising.supervise(run, tell)


@task(name="finish", **OPTIONS)
def finish(run_dir: str) -> str:
    return str(finishing.finish(RunFolder(run_dir)))


def _run_attempt(run_dir: str) -> str:
    """The body of both flows. Whatever ends it, no job of the run is left."""
    with showing(RunFolder(run_dir)):
        return _led(run_dir)


def _led(run_dir: str) -> str:
    run = RunFolder(run_dir)
    try:
        start_server(run_dir)
        start_learner(run_dir)
        supervise(run_dir)
    except BaseException as error:
        with uninterrupted():
            ended = outcome_of(error)
            if ended.kind is Kind.CANCELLED:
                stopping.request_cancel(run, "flow", ended.reason)
            stopping.stop_jobs(run)
            finishing.finish_failed(run, error)
            leasing.release(run)
        raise
    leasing.release(run)
    finish(run_dir)
    return run_dir


def _flow_run_name() -> str:
    """The run's id where it is known before the run; else the configuration's name."""
    given = flow_run.parameters
    if given.get("run_dir"):
        return Path(str(given["run_dir"])).name
    config = given.get("config")
    return str(given.get("run_id") or getattr(config, "name", None) or "run")


@flow(name="train", flow_run_name=_flow_run_name, persist_result=False)
def train(config: RunConfig, run_id: str | None = None) -> str:
    """Train a model with asynchronous reinforcement learning.

    Args:
        config: everything about the run.
        run_id: name of the run's folder; empty: made from the configuration's name, the time and a random part.

    Returns the run folder. Raises ConfigError, RunFolderError, RunFailed, RunCancelled.
    """
    return _run_attempt(prepare(config, run_id))


@flow(name="resume", flow_run_name=_flow_run_name, persist_result=False)
def resume(run_dir: str) -> str:
    """Continue a run: take over its jobs where only its supervisor died, else start again from its newest checkpoint.

    Args:
        run_dir: the run folder; a path, absolute or relative to where the flow runs.

    Returns the run folder. Raises what `train` raises, and NothingToResume.
    """
    return _run_attempt(prepare_resume(str(Path(run_dir).absolute())))
