"""Runs from the Prefect UI, in a real browser: the form, the page, a refusal, a cancel."""

import tomllib
from pathlib import Path

import psutil
import pytest

from cluster.local_jobs import job_processes
from flows.names import runs_pool
from slipstream.run_folder import RunFolder, read_json
from tasks.origin import read_origin
from tasks.stored import all_jobs
from tests.browser.pages import Ui
from tests.browser.session import prefect_ui
from tests.front_door import INSTANCE, Front, alive, flow_processes, kill
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

QUICK = f"{INSTANCE}.quick"


def browser(front: Front, folder: Path):  # type: ignore[no-untyped-def]
    return prefect_ui(front.url, ":".join(front.auth), folder)


def jobs_of(run: RunFolder) -> list[int]:
    return [process.pid for job in all_jobs(run) for process in job_processes(job)]


def test_a_run_is_started_by_its_form_watched_and_read(front: Front, tmp_path: Path) -> None:
    front.plan()
    with browser(front, tmp_path) as ui:
        page = ui.deployment(QUICK)
        form = page.custom_run()
        assert form.value("Model", "Model") == "m", "the preset fills the form"
        form.fill("Name", value="by-hand")
        form.fill("Trainer", "Staleness bound", value=3)
        form.fill("Server", "KV cache", value="128M")  # was empty
        form.choose("Model", "Trainer dtype", option="bfloat16")
        form.switch("Data", "Shuffle", on=False)
        form.add_item("Reward", "Import paths", value=str(tmp_path))
        run_page = page.started(form.submit())
        run_page.wait_state("Running", "Completed")
        run_page.wait_state("Completed")
        run = front.run_of(run_page.flow_run_id)
        assert run.path.name == f"by-hand-{run_page.flow_run_id.replace('-', '')[-12:]}"
        config = tomllib.loads(run.run_file.read_text())
        assert config["trainer"]["max_staleness"] == 3
        assert config["server"]["kv_cache_memory"] == "128M"
        assert config["model"]["dtype"] == "bfloat16"
        assert config["data"]["shuffle"] is False
        assert config["reward"]["paths"] == [str(tmp_path)]
        shown = run_page.artifacts(at_least=4)
        assert shown["slipstream-run"] == "markdown"
        assert shown["slipstream-progress"] == "progress"
        run_page.artifact("slipstream-curves").draws(at_least=1)
        overview = ui.flow_run(run_page.flow_run_id).artifact("slipstream-run")
        overview.says(str(run.path))
        overview.says("finished")
        run_page = ui.flow_run(run_page.flow_run_id)
        shown = run_page.parameters()["config"]
        assert (shown["trainer"]["max_staleness"], shown["data"]["shuffle"]) == (3, False)


def test_a_bad_value_is_refused_in_the_form_and_starts_nothing(front: Front, tmp_path: Path) -> None:
    own = {"deployments": {"id": {"any_": [front.find_deployment()["id"]]}}}  # reconciliation has runs every minute
    before = front.ask("POST", "flow_runs/count", own)
    with browser(front, tmp_path) as ui:
        form = ui.deployment(QUICK).custom_run()
        form.fill("Trainer", "Staleness bound", value=-1)
        assert "greater than or equal to 0" in form.submit_refused("Trainer", "Staleness bound").field
        form.fill("Trainer", "Staleness bound", value=4)
        form.fill("Name", value="two words")
        refusal = form.submit_refused("Name")
        assert "'two words' does not match" in refusal.field
        assert "config.name" in refusal.toast
        assert front.ask("POST", "flow_runs/count", own) == before


def test_what_the_form_cannot_know_is_refused_on_the_run_s_page(front: Front, tmp_path: Path) -> None:
    """Within seconds, with the reason in the state's message and one problem a line in an artifact."""
    with browser(front, tmp_path) as ui:
        page = ui.deployment(QUICK)
        form = page.custom_run()
        form.fill("Learner", "GPUs", value=8)
        run_page = page.started(form.submit())
        run_page.wait_state("Failed")
        run_page.has_detail("State Message", "learner.processes_per_node")
        run_page.artifact("refused").says("differs from gpus = 8")
        assert run_page.flow_run_id not in [read_origin(run).flow_run for run in front.runs()]


def held(front: Front, ui: Ui, name: str):  # type: ignore[no-untyped-def]
    """A run, started in the UI, that stands still in the middle of its training: its page and its folder."""
    front.hold(name)
    run_page = ui.deployment(QUICK).quick_run()
    run = front.run_of(run_page.flow_run_id)
    wait_until((run.path / "events-test" / f"reached-{name}.json").exists, "the run trains")
    assert jobs_of(run)
    return run_page, run


def test_a_cancelled_run_leaves_no_job(front: Front, tmp_path: Path) -> None:
    with browser(front, tmp_path) as ui:
        run_page, run = held(front, ui, "cancelled")
        run_page.wait_state("Running")
        run_page.cancel()
        run_page.wait_state("Cancelled")
        assert jobs_of(run) == []
        assert (read_json(run.path / "outcome.json") or {})["kind"] == "cancelled"
        assert front.state(run_page.flow_run_id) == "CANCELLED"


def test_a_cancel_reaches_a_run_whose_worker_and_flow_are_dead(front: Front, tmp_path: Path) -> None:
    """Prefect would only wait, say Cancelled after five minutes, and leave the jobs; reconciliation ends them."""
    with browser(front, tmp_path) as ui:
        run_page, run = held(front, ui, "orphaned")
        run_page.wait_state("Running")
        jobs = jobs_of(run)
        for pid in [worker_of(front), *flow_processes(front.home)]:
            kill(pid)
        assert alive(jobs) == jobs
        run_page.cancel()
        run_page.wait_state("Cancelling", "Cancelled")
        run_page.wait_state("Cancelled", seconds=280)
        assert jobs_of(run) == []
        assert alive(jobs) == []
        assert (read_json(run.path / "outcome.json") or {})["kind"] == "cancelled"


def worker_of(front: Front) -> int:
    """The worker of the trainings."""
    assert front.process is not None
    children = psutil.Process(front.process.pid).children()
    (worker,) = [one.pid for one in children if one.cmdline()[-1] == runs_pool(INSTANCE)]
    return worker
