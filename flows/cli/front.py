"""`slipstream up`, `slipstream down` and `slipstream deploy`: the Prefect server, and what we have on it."""

import click

from flows.cli.plain import fail_plainly


@click.command()
@fail_plainly
def up() -> int:
    """Start a local Prefect server, its workers and our deployments, and print the address."""
    raise click.ClickException("not there yet")


@click.command()
@fail_plainly
def down() -> int:
    """End what `slipstream up` started; runs go on."""
    raise click.ClickException("not there yet")


@click.command()
@fail_plainly
def deploy() -> int:
    """Register our deployments, pools, limits and blocks on a Prefect server."""
    raise click.ClickException("not there yet")
