"""The training flow: prepare → start server → start learner → supervise → finish.

The run folder, not Prefect, remembers the run (`flows.steps`). What a worker starts is in `flows.deployed`.
"""

from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from flows import steps
from flows.deployed import here, lead
from flows.page.run import showing
from flows.refused import refusing
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder
from tasks import finish as finishing
from tasks import lease as leasing
from tasks.interrupt import uninterrupted


def _run_attempt(run_dir: str) -> str:
    """The body of both flows where no worker runs them. Whatever ends it, no job of the run is left."""
    with showing(RunFolder(run_dir)):
        return _led(run_dir)


def _led(run_dir: str) -> str:
    run = RunFolder(run_dir)
    try:
        steps.start_server(run_dir)
        steps.start_learner(run_dir)
        steps.supervise(run_dir)
    except BaseException as error:
        with uninterrupted():
            finishing.end_with(run, error, "flow")
        raise
    leasing.release(run)
    steps.finish(run_dir)
    return run_dir


def _flow_run_name() -> str:
    """The run's id where it is known before the run; else the configuration's name."""
    given = flow_run.parameters
    if given.get("run_dir"):
        return Path(str(given["run_dir"])).name
    config = given.get("config")
    name = config.get("name") if isinstance(config, dict) else getattr(config, "name", None)
    if given.get("run_id"):
        return str(given["run_id"])
    start = here() if name else None
    return start.run_id(str(name)) if start is not None else str(name or "run")


CONFIG = Field(title="Run", description="Everything about the run: model, data, training, server and cluster.")
RUN_ID = Field(
    title="Run id",
    description="Name of the run's folder. Empty: made from the run's name and the id of this flow run.",
)


@flow(name="train", flow_run_name=_flow_run_name, persist_result=False)
def train(config: Annotated[RunConfig, CONFIG], run_id: Annotated[str, RUN_ID] = "") -> Any:
    """Train a model with asynchronous reinforcement learning.

    Args:
        config: everything about the run.
        run_id: name of the run's folder; empty: made from the configuration's name and, under a worker, the id of the
            flow run, so that one that is started again finds its run; else the time and a random part.

    Returns the run folder. Raises ConfigError, RunFolderError, RunFailed, RunCancelled; under a worker the flow run's
    state says the same.
    """
    start = here()
    return _run_attempt(steps.prepare(config, run_id or None)) if start is None else lead(config, run_id, start)


@flow(name="resume", flow_run_name=_flow_run_name, persist_result=False)
def resume(run_dir: str) -> str:
    """Continue a run: take over its jobs where only its supervisor died, else start again from its newest checkpoint.

    Args:
        run_dir: the run folder; a path, absolute or relative to where the flow runs.

    Returns the run folder. Raises what `train` raises, and NothingToResume.
    """
    return _run_attempt(steps.prepare_resume(str(Path(run_dir).absolute())))


refusing(train)
