"""`slipstream sweep --prefect`: a worker of a Prefect server does it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click


def run_on_server(path: Path, overrides: Sequence[str], at_once: int | None) -> int:
    """Start a flow run of the sweep's deployment and print where to look. Raises ConfigError, PrefectUnavailable."""
    from flows.connection import connect

    connection = connect()
    from prefect.client.orchestration import get_client
    from prefect.deployments import run_deployment
    from prefect.exceptions import ObjectNotFound

    from flows.names import deployment_name
    from flows.sweep import parameters_of
    from slipstream.instance import instance_id

    parameters = parameters_of(path, overrides)
    if at_once is not None:
        parameters["settings"]["cells_at_once"] = at_once
    name = f"sweep/{deployment_name(instance_id(), 'sweep')}"
    try:
        started: Any = run_deployment(name, parameters=parameters, timeout=0, as_subflow=False)
    except ObjectNotFound:
        raise click.ClickException(
            f"there is no deployment {name} at {connection.url}: register it with `slipstream deploy`, or start "
            "`slipstream up`"
        ) from None
    with get_client(sync_client=True) as client:
        ui = str(client.api_url).rstrip("/").removesuffix("/api")
    click.echo(f"flow run {started.name}: {ui}/runs/flow-run/{started.id}")
    return 0
