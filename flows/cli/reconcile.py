"""`slipstream reconcile`."""

import click

from flows.cli.plain import fail_plainly, not_empty


@click.command()
@click.option(
    "--root",
    "roots",
    multiple=True,
    metavar="FOLDER",
    callback=not_empty,
    help="Storage root; all that were used without.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be done; do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@fail_plainly
def reconcile(roots: tuple[str, ...], dry_run: bool, as_json: bool) -> int:
    """Make run folders, SLURM and Prefect agree, once; the exit code is 1 where something could not be done.

    A run without a leader gets one, what is left of a run that has ended is stopped, and Prefect is told the truth.
    """
    import json
    from pathlib import Path

    from flows.reconciliation import reconcile_all

    rows = reconcile_all([Path(root).expanduser() for root in roots] or None, dry_run)
    if as_json:
        click.echo(json.dumps([row.record() for row in rows], indent=1))
    else:
        for row in rows:
            problem = f": {row.problem}" if row.problem else ""
            click.echo(f"{row.run or '-'}: {row.act}{f' to {row.state}' if row.state else ''} ({row.why}){problem}")
        if not rows:
            click.echo("no run is open")
    return 1 if any(row.problem for row in rows) else 0
