"""`slipstream sweep`."""

import click

from flows.cli.plain import fail_plainly


@click.command()
@fail_plainly
def sweep() -> int:
    """Run a sweep."""
    raise click.ClickException("not there yet")
