"""`slipstream reconcile`."""

import click

from flows.cli.plain import fail_plainly


@click.command()
@fail_plainly
def reconcile() -> int:
    """Make run folders, SLURM and Prefect agree, once."""
    raise click.ClickException("not there yet")
