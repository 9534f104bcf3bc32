"""A run that is refused says why on its flow run's page: in the state's message, and one problem a line in an artifact."""

import contextlib
import logging
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.runtime import flow_run

from slipstream.config_file import ConfigError, parse_config
from slipstream.config_schema import format_value

KEY = "refused"
SOURCE = "the form"


def refusal_text(error: Exception) -> str:
    """The problems as Markdown, one a line; their values are quoted, so that they cannot be anything but text."""
    if not isinstance(error, ConfigError):
        return f"## Refused\n\n{_inert(str(error))}\n"
    lines = ["## Refused", "", "Nothing was started. Change this and submit the form again:", ""]
    for problem in error.problems:
        shown = f"`{problem.key}`" if problem.key else ""
        if problem.key and problem.value is not None:
            shown = f"`{problem.key} = {format_value(problem.value).replace('`', chr(39))}`"
        lines.append(f"- {shown}{': ' if shown else ''}{_inert(problem.message)}")
    return "\n".join(lines) + "\n"


def _inert(text: str) -> str:
    for sign in "\\`*_[]<>|":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("\n", "  \n")


def show_refusal(error: Exception) -> None:
    """Make the artifact `refused` of the current flow run, and say it in its log. Without a flow run, or where Prefect is
    away, nothing happens."""
    with contextlib.suppress(Exception):
        if identity := flow_run.get_id():
            whose = {"flow_run_id": str(identity), "flow_run_name": flow_run.get_name()}
            logging.getLogger("prefect.flow_runs").error("refused: %s", error, extra=whose)
            artifact = ArtifactCreate(
                key=KEY,
                type="markdown",
                description="Why this run was refused.",
                data=refusal_text(error),
                flow_run_id=UUID(str(identity)),
            )
            with get_client(sync_client=True) as client:
                client.create_artifact(artifact)


def refusing(flow: Flow[..., Any]) -> Flow[..., Any]:
    """Let a flow whose `config` is a RunConfig refuse a form in the words of a refused file, with the artifact.

    Without this Prefect would fail the run with pydantic's own words, before the flow's body could say anything.
    """
    validate = flow.validate_parameters

    def validate_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
        given = parameters.get("config")
        if isinstance(given, dict):
            try:
                parameters = {**parameters, "config": parse_config(given, source=SOURCE)}
            except ConfigError as error:
                show_refusal(error)
                raise
        return validate(parameters)

    flow.validate_parameters = validate_parameters  # type: ignore[method-assign]
    return flow
