"""`slipstream clean`."""

import click

from flows.cli.plain import fail_plainly


@click.command()
@fail_plainly
def clean() -> int:
    """Remove old runs."""
    raise click.ClickException("not there yet")
