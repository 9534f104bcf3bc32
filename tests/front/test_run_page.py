"""The run's page on a real Prefect server, also as a browser shows it."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, sync_playwright

from flows import events
from flows.page.content import COMPLETIONS, CURVES, JOBS, KEYS, PROGRESS, RECOVERIES, RUN
from flows.page.run import showing
from slipstream.run_folder import RunFolder, read_json
from tests.browser.install import unusable
from tests.browser.session import launch
from tests.page_runs import EVIL, breaks, completes, ends, learns, new_run
from tests.prefect_server import (
    PASSWORD,
    PATIENCE_S,
    ROOT,
    STANDINS,
    PrefectServer,
    ask,
    environment,
    password,
    request,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    server = PrefectServer(tmp_path_factory.mktemp("prefect-server"), ui=True)
    try:
        yield server.start()
    finally:
        server.kill()


Start = Callable[[RunFolder, str], subprocess.Popen[bytes]]


@pytest.fixture
def start(server: PrefectServer, tmp_path: Path) -> Iterator[Start]:
    """Starts processes of a flow run, and ends what is left of them."""
    started: list[subprocess.Popen[bytes]] = []

    def one(run: RunFolder, flow_run_id: str) -> subprocess.Popen[bytes]:
        settings = {
            "PREFECT_HOME": str(tmp_path / "home"),
            "PREFECT_API_URL": server.url,
            "PREFECT_API_AUTH_STRING": PASSWORD,
            "PREFECT_CLIENT_MAX_RETRIES": "1",
            "SLIPSTREAM_INSTANCE": "tester",
        }
        with open(tmp_path / "log", "ab") as out:
            command = [sys.executable, str(STANDINS / "page_flow.py"), str(run.path), flow_run_id]
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment(**settings), stdout=out, stderr=out))
        return started[-1]

    yield one
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def call(server: PrefectServer, route: str, body: dict[str, Any]) -> Any:
    return request("POST", f"{server.url}/{route}", body, password())


def new_flow_run(server: PrefectServer, name: str) -> str:
    flow = call(server, "flows/", {"name": "train"})
    return str(call(server, "flow_runs/", {"flow_id": flow["id"], "name": name, "tags": ["mine"]})["id"])


def artifacts(server: PrefectServer, flow_run_id: str) -> dict[str, dict[str, Any]]:
    found = ask(server.url, "artifacts/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}})
    keys = [one["key"] for one in found]
    assert len(keys) == len(set(keys)), keys
    return {one["key"]: one for one in found}


def told(server: PrefectServer, flow_run_id: str) -> list[dict[str, Any]]:
    """Our events of a flow run, oldest first."""
    related = {"id": [f"prefect.flow-run.{flow_run_id}"]}
    asked = {
        "event": {"prefix": ["slipstream."]},
        "related": related,
        "occurred": {"since": "2023-01-01T00:00:00Z"},
        "order": "ASC",
    }
    return list(call(server, "events/filter", {"filter": asked, "limit": 50})["events"])


def names(server: PrefectServer, flow_run_id: str) -> list[str]:
    return sorted(event["event"] for event in told(server, flow_run_id))


def log_of(run: RunFolder) -> str:
    return (run.path.parent / "log").read_text(errors="replace")


@pytest.fixture(scope="module")
def browser_page(server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser that is logged in."""
    if reason := unusable():
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = launch(playwright, tmp_path_factory.mktemp("browser"))
        context = browser.new_context(viewport={"width": 1500, "height": 1400})
        context.set_default_timeout(PATIENCE_S * 1000)
        page = context.new_page()
        page.goto(f"{server.url.removesuffix('/api')}/v2/login")
        page.get_by_placeholder("admin:pass").fill(PASSWORD)
        page.get_by_role("button", name="Login").click()
        page.wait_for_url("**/dashboard**")
        yield page
        browser.close()


def test_the_page_of_a_run_over_a_kill(server: PrefectServer, start: Start, browser_page: Page, tmp_path: Path) -> None:
    run = new_run(tmp_path, "paged", log_completions=True)
    flow_run = new_flow_run(server, "paged")
    process = start(run, flow_run)

    def shows(key: str, words: str) -> Any:
        assert process.poll() is None, log_of(run)
        return words in artifacts(server, flow_run).get(key, {}).get("description", "")

    wait_until(lambda: shows(JOBS, "(Resources)"), "the page shows the jobs")
    for step in (1, 2, 3, 4):
        learns(run, step)
    completes(run, 4)
    breaks(run, 4, "i0", f"gone: {EVIL}")
    wait_until(lambda: shows(RUN, "step 4 of 10") and shows(RECOVERIES, "1 · "), "the page shows the step")
    wait_until(lambda: shows(CURVES, "![Reward](data:image/svg+xml;base64,"), "the page shows curves")
    before = {key: one["id"] for key, one in artifacts(server, flow_run).items()}
    assert before.keys() == set(KEYS)
    assert artifacts(server, flow_run)[PROGRESS]["data"] == 40.0
    _look(browser_page, server, flow_run, tmp_path)

    process.kill()
    process.wait()
    learns(run, 5)
    process = start(run, flow_run)
    wait_until(lambda: shows(RUN, "step 5 of 10"), "the flow run that was started again shows the step")
    wait_until(lambda: events.RECOVERED in names(server, flow_run), "the recovery is told")
    process.kill()
    process.wait()
    process = start(run, flow_run)
    learns(run, 6)
    wait_until(lambda: shows(RUN, "step 6 of 10"), "and once more")
    ends(run, "finish")
    (run.path / "go").touch()
    assert process.wait(PATIENCE_S) == 0, log_of(run)
    found = artifacts(server, flow_run)
    assert {key: one["id"] for key, one in found.items()} == before
    assert (found[PROGRESS]["data"], found[RUN]["description"].split("\n")[0]) == (100.0, "**finished**")
    wait_until(lambda: events.FINISHED in names(server, flow_run), "the end is told")
    once = [name for name in names(server, flow_run) if name != events.HEARTBEAT]
    assert once == [events.FINISHED, events.RECOVERED, events.STARTED]
    assert events.HEARTBEAT in names(server, flow_run)
    (recovered,) = [one for one in told(server, flow_run) if one["event"] == events.RECOVERED]
    assert recovered["payload"]["step"] == 5
    tags = {one["prefect.resource.id"] for one in recovered["related"]}
    assert tags >= {"prefect.tag.mine", "prefect.tag.slipstream", "prefect.tag.slipstream:tester"}


def _look(page: Page, server: PrefectServer, flow_run: str, folder: Path) -> None:
    """What a person sees, in both of Prefect's interfaces."""
    base = server.url.removesuffix("/api")
    ids = {key: one["id"] for key, one in artifacts(server, flow_run).items()}
    page.goto(f"{base}/v2/runs/flow-run/{flow_run}?tab=Artifacts")
    for key in KEYS:
        page.get_by_text(key, exact=True).wait_for()
    wait_until(lambda: _drawn(page) >= 4, "the curves are drawn on the card")
    page.screenshot(path=folder / "artifacts.png")
    for interface in ("/v2", ""):
        page.goto(f"{base}{interface}/artifacts/artifact/{ids[CURVES]}")
        wait_until(lambda: _drawn(page) >= 4, "the curves are drawn")
        page.goto(f"{base}{interface}/artifacts/artifact/{ids[COMPLETIONS]}")
        page.get_by_text("[link](http://evil.test)").first.wait_for()
        _inert(page)
        page.screenshot(path=folder / f"completions{interface.replace('/', '-')}.png")
        page.goto(f"{base}{interface}/artifacts/artifact/{ids[RECOVERIES]}")
        page.get_by_text("[link](http://evil.test)").first.wait_for()
        _inert(page)
        page.goto(f"{base}{interface}/artifacts/artifact/{ids[RUN]}")
        page.get_by_role("cell", name="held-out reward").wait_for()
        page.screenshot(path=folder / f"run{interface.replace('/', '-')}.png")


def _drawn(page: Page) -> int:
    """Images with a size that came with the page."""
    script = "[...document.images].filter(i => i.src.startsWith('data:image/svg') && i.naturalWidth > 100).length"
    return int(page.evaluate(script))


def _inert(page: Page) -> None:
    """Nothing of what the model said has become markup."""
    assert "PWNED" not in page.title()
    sources = page.evaluate("[...document.images].map(i => i.getAttribute('src') || '')")
    links = page.evaluate("[...document.links].map(l => l.href)")
    made = [one for one in [*sources, *links] if ".test" in one or one == "x"]
    assert not made
    assert page.evaluate("[...document.querySelectorAll('h1')].filter(h => h.innerText.includes('out')).length") == 0


def test_a_server_that_goes_away_costs_the_run_nothing(server: PrefectServer, start: Start, tmp_path: Path) -> None:
    run = new_run(tmp_path, "alone")
    flow_run = new_flow_run(server, "alone")
    process = start(run, flow_run)
    wait_until(lambda: JOBS in artifacts(server, flow_run), "the page is there")
    server.kill()
    learns(run, 1)
    wait_until(lambda: "is not up to date" in log_of(run), "the flow says that its page is not up to date")
    learns(run, 2)
    ends(run, "finish")
    (run.path / "go").touch()
    wait_until(lambda: read_json(run.path / "left.json"), "the body is left")
    process.wait(PATIENCE_S)
    server.start()
    assert log_of(run).count("is not up to date") == 1
    assert "step 2" not in artifacts(server, flow_run)[RUN]["description"]
    # whoever looks after the run later brings its page up to date
    script = (
        "import sys\nfrom flows.events import FlowRun\nfrom flows.page.run import show_once\n"
        "from slipstream.run_folder import RunFolder\n"
        "sys.exit(0 if show_once(RunFolder(sys.argv[1]), FlowRun(sys.argv[2])) else 1)\n"
    )
    settings = {
        "PREFECT_API_URL": server.url,
        "PREFECT_API_AUTH_STRING": PASSWORD,
        "PREFECT_HOME": str(tmp_path / "home"),
    }
    command = [sys.executable, "-c", script, str(run.path), flow_run]

    def brought_up_to_date() -> bool:
        return subprocess.run(command, cwd=ROOT, env=environment(**settings), check=False).returncode == 0

    wait_until(brought_up_to_date, "the page is brought up to date")
    assert artifacts(server, flow_run)[RUN]["description"].startswith("**finished**")


def test_no_secret_is_on_the_page_of_a_run_that_fails(server: PrefectServer, tmp_path: Path) -> None:
    command = [sys.executable, str(STANDINS / "standin_page.py"), "train", "examples/demo.toml"]
    command += ["--set", f"storage.root={tmp_path}", "--set", "name=leaky", "--set", "recovery.max_restarts=0"]
    settings = {
        "PREFECT_HOME": str(tmp_path / "home"),
        "PREFECT_API_URL": server.url,
        "PREFECT_API_AUTH_STRING": PASSWORD,
        "STANDIN": "learner:die",
        "PLANTED": f"the auth string is {PASSWORD}",
        "HF_TOKEN": "planted-hf-value",
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment(**settings), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (path,) = tmp_path.glob("leaky*")
    (flow_run,) = [one for one in ask(server.url, "flow_runs/filter", {}) if one["name"] == path.name]
    page = artifacts(server, flow_run["id"])
    assert page[RUN]["description"].startswith("**failed**")
    assert "the last line" in page[RUN]["data"]
    assert f"{path}/logs/learner-1.log" in page[JOBS]["data"]
    wait_until(lambda: events.FAILED in names(server, flow_run["id"]), "the failure is told")
    of_it = {"flow_runs": {"id": {"any_": [flow_run["id"]]}}}
    places: dict[str, Any] = {
        "artifacts": page,
        "events": told(server, flow_run["id"]),
        "flow run": flow_run,
        "task runs": ask(server.url, "task_runs/filter", of_it),
        "logs": ask(server.url, "logs/filter", {"logs": {"flow_run_id": {"any_": [flow_run["id"]]}}}),
    }
    assert "the last line" in json.dumps(places["task runs"])
    token = RunFolder(path).token_file.read_text().strip()
    for secret in (token, "planted-hf-value", PASSWORD.partition(":")[2]):
        assert secret in (path / "logs" / "learner-1.log").read_text()
        assert secret in (path / "outcome.json").read_text()
        assert not [place for place, value in places.items() if secret in json.dumps(value)], secret


def test_outside_a_flow_run_nothing_is_done(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with showing(run):
        learns(run, 1)
    assert not (run.path / "prefect.json").exists()
