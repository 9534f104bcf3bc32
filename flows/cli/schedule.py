"""`slipstream schedule`."""

import click

from flows.cli.plain import fail_plainly


@click.command()
@fail_plainly
def schedule() -> int:
    """Schedule a preset or a sweep."""
    raise click.ClickException("not there yet")
