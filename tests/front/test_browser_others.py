"""Schedules and sweeps in the Prefect UI, in a real browser."""

from pathlib import Path
from typing import Any

import pytest

from tests.browser.session import prefect_ui
from tests.front_door import INSTANCE, Front
from tests.waiting import wait_until

pytestmark = pytest.mark.integration


def scheduled(front: Front, deployment: str) -> list[dict[str, Any]]:
    """Starts that Prefect has planned."""
    body = {"flow_runs": {"deployment_id": {"any_": [deployment]}, "state": {"type": {"any_": ["SCHEDULED"]}}}}
    return list(front.ask("POST", "flow_runs/filter", body))


def test_a_schedule_that_is_paused_and_resumed_keeps_its_parameters(front: Front, tmp_path: Path) -> None:
    name = f"{INSTANCE}.quick@at-three"
    words = [
        "--cron",
        "0 3 * * *",
        "--timezone",
        "Europe/Berlin",
        "--name",
        "at-three",
        "--set",
        "trainer.max_staleness=7",
    ]
    added = front.command("schedule", "add", str(front.preset), *words)
    assert added.returncode == 0, added.stderr
    try:
        deployment = front.find_deployment(f"train/{name}")["id"]
        wait_until(lambda: scheduled(front, deployment), "starts are planned")
        with prefect_ui(front.url, ":".join(front.auth), tmp_path) as ui:
            schedule = ui.deployment(name).schedule()
            assert schedule.active
            assert "03:00" in schedule.text
            schedule.pause()
            wait_until(lambda: not scheduled(front, deployment), "nothing is planned any more")
            assert "at-three  paused" in front.command("schedule", "list").stdout
            schedule.resume()
            again = wait_until(lambda: scheduled(front, deployment), "starts are planned again")
            assert {run["parameters"]["config"]["trainer"]["max_staleness"] for run in again} == {7}
            assert ui.deployment(name).custom_run().value("Trainer", "Staleness bound") == "7"
    finally:
        removed = front.command("schedule", "remove", "at-three")
    assert removed.returncode == 0, removed.stderr


def test_a_sweep_of_four_cells_is_filled_in_watched_and_read(front: Front, tmp_path: Path) -> None:
    front.plan()
    with prefect_ui(front.url, ":".join(front.auth), tmp_path) as ui:
        page = ui.deployment(f"{INSTANCE}.sweep")
        form = page.custom_run()
        form.fill("Name", value="four")
        form.fill("Base", value=str(front.preset))
        form.remove_items("Staleness bounds")
        for bound in (1, 4):
            form.add_item("Staleness bounds", value=bound)
        form.remove_items("Token budgets")
        for budget in (2048, 4096):
            form.add_item("Token budgets", value=budget)
        form.fill("Cells at once", value=2)
        form.fill("Metric", value="reward")
        parent = page.started(form.submit())
        parent.wait_state("Completed", seconds=420)
        parent.has_subflow_runs(4)
        assert parent.artifacts(2) == {"sweep-table": "markdown", "sweep-pictures": "markdown"}
        rows = parent.artifact("sweep-table").table()
        assert len(rows) == 4
        ui.flow_run(parent.flow_run_id).artifact("sweep-pictures").draws(at_least=3)
    (folder,) = front.root.glob("four-*/sweep.toml")
    assert (folder.parent / "report.html").is_file()
    assert (folder.parent / "best.toml").is_file()
