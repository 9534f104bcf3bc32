"""A flow run that a scheduler made ends as Skipped where the run before it still works."""

from pathlib import Path

from prefect import get_run_logger
from prefect.context import FlowRunContext
from prefect.states import Completed, State

from tasks.predecessor import unfinished_predecessor

SKIPPED = "Skipped"


def skipped(root: Path, run_id: str) -> State[None] | None:
    """The state to end the current flow run with; None where it is to go on.

    Only what a scheduler started from a deployment is judged: a person who starts a run means it.

    Args:
        root: storage root of the run; relative to the working folder of the flow.
        run_id: that the run of this flow run has, or will have.

    Raises OSError where the storage does not answer.
    """
    context = FlowRunContext.get()
    flow_run = context.flow_run if context else None
    if flow_run is None or not flow_run.auto_scheduled or flow_run.deployment_id is None:
        return None
    log = get_run_logger()
    working = unfinished_predecessor(root.expanduser(), str(flow_run.deployment_id), run_id, log.warning)
    if working is None:
        return None
    message = f"{working} of the same schedule still works: nothing was started"
    log.info(message)
    return Completed(name=SKIPPED, message=message)
