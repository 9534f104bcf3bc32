"""The flow of reconciliation, for a deployment that runs every minute."""

import contextlib
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.runtime import deployment, flow_run
from prefect.states import Completed
from pydantic import Field

from flows.prefect_rest import PrefectAway
from flows.reconciliation import prefect_here, reconcile_all
from flows.up.engine import log_file
from tasks.reconcile_policy import Act

ROOTS = Field(
    title="Storage roots", description="Folders whose runs are looked at. Empty: all that this instance has used."
)
UNEVENTFUL = "Uneventful"  # name of the state of a pass that found all in agreement
KEPT = 10  # flow runs of such passes
REMOVED = 50  # at most, by one pass
DRY_RUN = Field(title="Dry run", description="Only say what would be done.")


@flow(name="reconcile", flow_run_name="reconcile", persist_result=False)
def reconcile(
    roots: Annotated[list[str], ROOTS] = [],  # noqa: B006
    dry_run: Annotated[bool, DRY_RUN] = False,
) -> Any:
    """Make run folders, SLURM and Prefect agree, once.

    Args:
        roots: storage roots; empty: all that this instance has used.
        dry_run: only say what would be done.

    Returns what was done. Of a deployment a pass that did nothing ends as Completed with the name "Uneventful", and
    deletes all but the newest flow runs of such passes: there is one every minute.
    """
    log = get_run_logger()
    rows = reconcile_all([Path(root).expanduser() for root in roots] if roots else None, dry_run)
    for row in rows:
        did = row.act is not Act.NOTHING
        tell = log.warning if row.problem or row.person else log.info if did else log.debug
        tell("%s: %s (%s)%s", row.run, row.act, row.why, f": {row.problem}" if row.problem else "")
    eventful = [row.record() for row in rows if row.act is not Act.NOTHING or row.problem]
    if eventful or not deployment.id:
        return eventful
    _remove_uneventful(str(deployment.id))
    if any(row.person for row in rows):
        return Completed(name=UNEVENTFUL, message="nothing was to be done; a person has to look: see the logs")
    with contextlib.suppress(OSError):  # nothing is in it that anybody would look for
        log_file(str(flow_run.id)).unlink()
    return Completed(name=UNEVENTFUL, message="nothing was to be done")


def _remove_uneventful(own: str) -> None:
    """Best effort. `own`: id of the deployment."""
    if (rest := prefect_here()) is None:
        return
    try:
        rest.remove_ended(own, UNEVENTFUL, KEPT, REMOVED)
    except PrefectAway as error:
        get_run_logger().debug("flow runs of earlier passes stay: %s", error)
    finally:
        rest.close()
