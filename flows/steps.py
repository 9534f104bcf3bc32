"""The steps of a run as Prefect tasks, thin over `tasks/`.

None is cached: a cached one would hand a resumed run the job of a dead one. No result is persisted.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from cluster.clients import ClusterAway
from cluster.decide import Decision, Observation
from cluster.jobs import JobRecord
from flows.deploy.profile_blocks import with_profile_file
from flows.masking import mask_of, masking_failures
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder
from tasks import finish as finishing
from tasks import prepare as preparing
from tasks import start as starting
from tasks import supervise as supervising
from tasks.origin import Origin
from tasks.outcome import Outcome

P = ParamSpec("P")
R = TypeVar("R")


class Step(Generic[P, R]):
    """A task that is shown by Prefect, and done without it.

    What the body returned or raised counts, whatever Prefect says of it: a server that is away for an hour must cost a
    run nothing.
    """

    def __init__(self, name: str, body: Callable[P, R]) -> None:
        self._body = body
        self._ended: list[tuple[bool, Any]] = []

        @wraps(body)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                value = body(*args, **kwargs)
            except BaseException as error:
                self._ended.append((False, error))
                raise
            self._ended.append((True, value))
            return value

        self.task = task(name=name, cache_policy=NO_CACHE, persist_result=False)(recorded)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        self._ended.clear()
        try:
            return self.task(*args, **kwargs)
        except Exception as error:
            if not self._ended:
                get_run_logger().warning("Prefect does not take this step (%s): it is done without", error)
                return self._body(*args, **kwargs)
            done, value = self._ended[0]
            if done:
                get_run_logger().warning("Prefect was not told how this step ended (%s)", error)
                return value
            raise value from value.__cause__


def step(name: str) -> Callable[[Callable[P, R]], Step[P, R]]:
    return lambda body: Step(name, body)


@step("prepare")
def prepare(config: RunConfig, run_id: str | None, whence: Origin | None = None) -> str:
    prepared = preparing.prepare(with_profile_file(config), run_id, whence)
    get_run_logger().info("run folder %s", prepared.run.path)
    for note in prepared.notes:
        get_run_logger().warning(note)
    return str(prepared.run.path)


@step("prepare resume")
def prepare_resume(run_dir: str) -> str:
    prepared = preparing.resume_prepare(run_dir)
    for note in prepared.notes:
        get_run_logger().info(note)
    return str(prepared.run.path)


@step("start server")
def start_server(run_dir: str) -> str | None:
    return _job_id(lambda: starting.start_server(RunFolder(run_dir)))


@step("start learner")
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


@step("supervise")
def supervise(run_dir: str, yields_to: tuple[type[BaseException], ...] = ()) -> Outcome:
    run = RunFolder(run_dir)
    log, mask = get_run_logger(), mask_of(run)
    said = ""

    def tell(_seen: Observation, decision: Decision) -> None:
        nonlocal said
        if decision.reason != said:
            said = decision.reason
            log.info(mask(said))

    with masking_failures(run):
        return supervising.supervise(run, tell, yields_to=yields_to)


@step("finish")
def finish(run_dir: str) -> str:
    return str(finishing.finish(RunFolder(run_dir)))
