"""The page of a run or a sweep whose flow is gone, once more. It does without prefect, which takes seconds to import.

Import this module only where there is something to show.
"""

import logging
from collections.abc import Sequence
from typing import Any

from flows import events
from flows.page.run import show_once
from flows.page.sweep_text import PICTURES, TABLE, finished, pictures_text, table_text
from flows.prefect_rest import FlowRun, PrefectAway, PrefectRest
from slipstream.run_folder import RunFolder
from tasks.sweep_folder import SweepFolder, is_sweep
from tasks.sweep_report import read_results, report_of

MISSING = 404

logger = logging.getLogger(__name__)


class RestPage:
    """What `flows.page.api.PageApi` is, over a connection without prefect. Every method raises PrefectAway."""

    def __init__(self, rest: PrefectRest) -> None:
        self._rest = rest

    def artifacts(self, flow_run_id: str, keys: Sequence[str]) -> dict[str, str]:
        """Ids of the flow run's artifacts by key; of several of one key the oldest."""
        body = {"artifacts": {"key": {"any_": list(keys)}}, "flow_runs": {"id": {"any_": [flow_run_id]}}}
        found = self._rest.call("POST", "artifacts/filter", body)
        return {one["key"]: str(one["id"]) for one in sorted(found, key=lambda one: str(one["created"]), reverse=True)}

    def create(self, flow_run_id: str, key: str, kind: str, data: Any, description: str) -> str:
        """Make an artifact; its id."""
        body = {"key": key, "type": kind, "data": data, "description": description, "flow_run_id": flow_run_id}
        return str(self._rest.call("POST", "artifacts/", body)["id"])

    def update(self, artifact_id: str, data: Any, description: str) -> bool:
        """Change an artifact in place; False where the server does not have it."""
        try:
            self._rest.call("PATCH", f"artifacts/{artifact_id}", {"data": data, "description": description})
        except PrefectAway as error:
            if error.status == MISSING:
                return False
            raise
        return True

    def emit(self, events: Sequence[dict[str, Any]]) -> None:
        self._rest.call("POST", "events", list(events))


def show_end(rest: PrefectRest, run: RunFolder, flow: FlowRun) -> bool:
    """Bring the page up to date and tell how the run or the sweep ended, once; whether that worked. Raises nothing."""
    api, shown = RestPage(rest), events.FlowRun(flow.id, flow.called, flow.tags)
    if not is_sweep(run):
        return show_once(run, shown, api)
    try:
        _show_sweep(api, SweepFolder(run.path), shown)
    except Exception as error:  # the page is for looking at
        logger.warning("the page of %s is not up to date: %s: %s", run.run_id, type(error).__name__, error)
        return False
    return True


def _show_sweep(api: RestPage, sweep: SweepFolder, flow_run: events.FlowRun) -> None:
    spec, outcome = sweep.spec(), sweep.outcome()
    results = read_results(sweep, spec)
    if outcome.get("kind") in ("finish", "fail"):  # who has cancelled it knows
        told, resource = finished(sweep, results, outcome), events.sweep_resource(sweep.sweep_id)
        api.emit([events.as_json(told, resource, sweep.sweep_id, flow_run, flow_run.tags)])
    report = report_of(sweep, spec, results)
    known = api.artifacts(flow_run.id, (TABLE, PICTURES))
    texts = {TABLE: (table_text(sweep, report), "The cells and their numbers.")}
    if any(result.measured.steps for result in results):
        texts[PICTURES] = (pictures_text(report), "Heat maps and the Pareto front.")
    for key, (text, description) in texts.items():
        if key not in known or not api.update(known[key], text, description):
            api.create(flow_run.id, key, "markdown", text, description)
