"""What a sweep's flow run shows on its page: the table while it runs, the pictures once cells have ended, an event."""

import contextlib
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.events import emit_event

from flows.events import sweep_resource
from flows.page.sweep_text import PICTURES, TABLE, finished, pictures_text, table_text
from tasks.sweep import Look
from tasks.sweep_folder import SweepFolder
from tasks.sweep_report import report_of


class SweepPage:
    """The artifacts of one sweep, each with one id that is updated. Best effort: Prefect away costs a sweep nothing."""

    def __init__(self, sweep: SweepFolder, flow_run: str) -> None:
        self._sweep = sweep
        self._flow_run = flow_run
        self._ids: dict[str, UUID] = {}
        self._drawn: object = None
        self._shown = ""

    def show(self, look: Look) -> None:
        """Bring the page up to date."""
        with contextlib.suppress(Exception):
            report = report_of(self._sweep, self._sweep.spec(), look.results)
            text = table_text(self._sweep, report)
            if text != self._shown:
                self._put(TABLE, text, "The cells and their numbers.")
                self._shown = text
            ended = tuple(
                (result.id, result.state) for result in look.results if not look.states[result.id].phase.active
            )
            if ended != self._drawn and any(result.measured.steps for result in look.results):
                self._drawn = ended
                self._put(PICTURES, pictures_text(report), "Heat maps and the Pareto front.")

    def _put(self, key: str, text: str, description: str) -> None:
        known = self._known(key)
        if known is None:
            made = create_markdown_artifact(text, key=key, description=description)
            self._ids[key] = UUID(str(made))
            return
        with get_client(sync_client=True) as client:
            client.update_artifact(known, ArtifactUpdate(data=text, description=description))

    def _known(self, key: str) -> UUID | None:
        """The artifact of an earlier start of this flow run, or of this one."""
        if key not in self._ids:
            with get_client(sync_client=True) as client:
                body = {"artifacts": {"key": {"any_": [key]}}, "flow_runs": {"id": {"any_": [self._flow_run]}}}
                found = client.request("POST", "/artifacts/filter", json=body).json()
            if found:
                self._ids[key] = UUID(str(found[0]["id"]))
        return self._ids.get(key)

    def finished(self, look: Look, outcome: Mapping[str, Any]) -> None:
        """Tell that the sweep has ended, for automations that notify."""
        with contextlib.suppress(Exception):
            told = finished(self._sweep, look.results, outcome)
            emit_event(
                told.name,
                resource={
                    "prefect.resource.id": sweep_resource(self._sweep.sweep_id),
                    "prefect.resource.name": self._sweep.sweep_id,
                },
                related=[
                    {"prefect.resource.id": f"prefect.flow-run.{self._flow_run}", "prefect.resource.role": "flow-run"}
                ],
                payload=dict(told.payload),
                id=told.id,
            )
