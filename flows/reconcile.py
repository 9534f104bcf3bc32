"""The flow of reconciliation, for a deployment that runs every minute."""

from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger
from pydantic import Field

from flows.reconciliation import reconcile_all
from tasks.reconcile_policy import Act

ROOTS = Field(
    title="Storage roots", description="Folders whose runs are looked at. Empty: all that this instance has used."
)
DRY_RUN = Field(title="Dry run", description="Only say what would be done.")


@flow(name="reconcile", flow_run_name="reconcile", persist_result=False)
def reconcile(
    roots: Annotated[list[str], ROOTS] = [],  # noqa: B006
    dry_run: Annotated[bool, DRY_RUN] = False,
) -> list[dict[str, Any]]:
    """Make run folders, SLURM and Prefect agree, once.

    Args:
        roots: storage roots; empty: all that this instance has used.
        dry_run: only say what would be done.
    """
    log = get_run_logger()
    rows = reconcile_all([Path(root).expanduser() for root in roots] if roots else None, dry_run)
    for row in rows:
        did = row.act is not Act.NOTHING
        tell = log.warning if row.problem else log.info if did else log.debug
        tell("%s: %s (%s)%s", row.run, row.act, row.why, f": {row.problem}" if row.problem else "")
    return [row.record() for row in rows if row.act is not Act.NOTHING or row.problem]
