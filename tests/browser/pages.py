"""Prefect's UI as a person uses it: pages, found by their roles, labels and texts (the second UI of Prefect 3.9)."""

import contextlib
import json
import re
from typing import Any
from urllib.parse import urljoin

from playwright.sync_api import Locator, Page, expect

from tests.browser.form import RunForm, until_not_busy
from tests.waiting import wait_until

RELOADS = 20
# at one moment: the page may be drawing it again
ROWS = """table => {
  const names = [...table.tHead.querySelectorAll("th")].map(cell => cell.innerText.trim());
  const row = cells => Object.fromEntries(names.map((name, at) => [name, cells[at]?.innerText.trim() ?? ""]));
  return [...table.tBodies[0].rows].map(one => row(one.cells));
}"""
ENDS = ("Completed", "Failed", "Crashed", "Cancelled")


class Ui:
    """The UI of one server. `base`: its address without a path."""

    def __init__(self, page: Page, base: str) -> None:
        self.page = page
        self.base = base

    def login(self, auth: str) -> None:
        """Give the server's basic-auth string where it asks for one."""
        self.page.goto(self.base, wait_until="commit")
        box = self.page.get_by_placeholder("admin:pass")
        inside = self.page.get_by_role("link", name="Deployments")
        expect(box.or_(inside)).to_be_visible()
        if box.is_visible():
            box.fill(auth)
            self.page.get_by_role("button", name="Login").click()
        expect(inside).to_be_visible()

    def deployments(self) -> list[str]:
        """Names of the deployments on the first page of the list."""
        self._to_deployments()
        return self.page.get_by_role("main").locator("tbody tr").get_by_role("link").all_inner_texts()[::2]

    def deployment(self, name: str) -> "DeploymentPage":
        """Search the list for a deployment ("alice.demo") and open it."""
        self._to_deployments()
        self.page.get_by_placeholder("Search deployments").fill(name)
        link = self.page.get_by_role("main").get_by_role("link", name=name, exact=True)
        self.page.goto(f"{self.base}{link.get_attribute('href')}")  # a click is lost while the list is drawn again
        return DeploymentPage(self.page, name)

    def _to_deployments(self) -> None:
        self.page.get_by_role("link", name="Deployments", exact=True).first.click()
        expect(self.page.get_by_role("main").locator("tbody tr").first).to_be_visible()

    def flow_run(self, flow_run_id: str) -> "FlowRunPage":
        self.page.goto(f"{self.base}/v2/runs/flow-run/{flow_run_id}")
        return FlowRunPage(self.page)


class DeploymentPage:
    """A deployment: its runs, parameters and schedule."""

    def __init__(self, page: Page, name: str) -> None:
        self.page = page
        self.main = page.get_by_role("main")
        expect(self.main.get_by_label("breadcrumb").first).to_contain_text(name)
        expect(self.main.get_by_role("button", name="Run", exact=True)).to_be_visible()

    def custom_run(self) -> RunForm:
        self._run_menu("Custom run")
        return RunForm(self.page)

    def quick_run(self) -> "FlowRunPage":
        """Run it as it is. A deployment whose flow demands parameters shows them once more first."""
        return self.started(until_not_busy(self.page, self._quick_run))

    def _quick_run(self) -> None:
        self.page.keyboard.press("Escape")  # the question of a try before
        self._run_menu("Quick run")
        question = self.page.get_by_role("dialog")
        expect(question.or_(self._view_run()).first).to_be_visible()
        if question.is_visible():
            expect(question.locator("fieldset").first).to_be_visible()  # pressed earlier, it does nothing
            question.get_by_role("button", name="Run", exact=True).click()

    def _run_menu(self, item: str) -> None:
        self.main.get_by_role("button", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name=item).click()

    def started(self, flow_run_id: str) -> "FlowRunPage":
        """The page of a run that was just submitted, to which a message leads that passes after four seconds."""
        self.page.goto(urljoin(self.page.url, f"/v2/runs/flow-run/{flow_run_id}"))
        return FlowRunPage(self.page)

    def _view_run(self) -> Locator:
        return self.page.get_by_role("link", name="View run")

    def schedule(self) -> "Schedule":
        return Schedule(self.main.get_by_role("complementary"))


class Schedule:
    """The one schedule of a deployment, at the side of its page."""

    def __init__(self, side: Locator) -> None:
        self.toggle = side.get_by_role("switch", name=re.compile("^toggle "))
        expect(self.toggle).to_have_count(1)

    @property
    def text(self) -> str:
        """Like "At 02:00 AM"."""
        return (self.toggle.get_attribute("aria-label") or "").removeprefix("toggle ")

    @property
    def active(self) -> bool:
        return self.toggle.is_checked()

    def pause(self) -> None:
        self._set(False)

    def resume(self) -> None:
        self._set(True)

    def _set(self, on: bool) -> None:
        assert self.active is not on, "the schedule is so already"
        self.toggle.click()
        expect(self.toggle).to_be_checked(checked=on)


class FlowRunPage:
    """The page of a run."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.main = page.get_by_role("main")
        expect(self.main.get_by_role("tab", name="Artifacts")).to_be_visible()
        found = re.search(r"/flow-run/([0-9a-f-]{36})", page.url)
        assert found, page.url
        self.flow_run_id = found[1]

    @property
    def name(self) -> str:
        return self.main.get_by_label("breadcrumb").first.locator("[aria-current=page]").last.inner_text()

    def _head(self) -> Locator:
        """The line under the name: the state, since when, how long."""
        return self.main.get_by_label("breadcrumb").first.locator("xpath=following-sibling::*[1]")

    @property
    def state(self) -> str:
        """Name of the state, as it is shown now."""
        return self._head().inner_text().split("\n")[0].strip()

    def wait_state(self, *names: str, seconds: float = 180) -> str:
        """Watch the page, which refreshes itself, until it shows one of these states; another that is an end fails."""
        ends = "|".join({*names, *ENDS})
        expect(self._head()).to_have_text(re.compile(f"^({ends})"), timeout=seconds * 1000)
        state = self.state
        assert state in names, f"{state}: {self.detail('State Message')}"
        return state

    def tab(self, name: str) -> Locator:
        self.main.get_by_role("tab", name=name, exact=True).click()
        panel = self.main.get_by_role("tabpanel", name=name, exact=True)
        expect(panel).to_be_visible()
        return panel

    def detail(self, term: str) -> str:
        """A value of the Details tab, like "State Message" or "Run Count", as it stands now; "" where there is none."""
        found = self._detail(term)
        return found.inner_text() if found.count() else ""

    def has_detail(self, term: str, text: str) -> None:
        """A value of the Details tab contains this text."""
        expect(self._detail(term)).to_contain_text(text, use_inner_text=True)

    def _detail(self, term: str) -> Locator:
        return self.tab("Details").locator(f'xpath=.//dt[normalize-space()="{term}"]/following-sibling::dd[1]')

    def parameters(self) -> dict[str, Any]:
        """The run's parameters, by the button that copies them: the page itself draws only what fits."""
        self.tab("Parameters").get_by_role("button", name="Copy parameters").click()
        copied = wait_until(lambda: self.page.evaluate("navigator.clipboard.readText()"), "the parameters are copied")
        return dict(json.loads(copied))

    def has_subflow_runs(self, count: int) -> None:
        """This run has started so many."""
        expect(self.tab("Subflow Runs").locator('a[href*="/runs/flow-run/"]')).to_have_count(count)

    def artifacts(self, at_least: int = 1) -> dict[str, str]:
        """Type of each artifact by its key, once there are so many. This tab does not refresh itself."""
        for _ in range(RELOADS):
            cards = self.tab("Artifacts").get_by_role("link")
            with contextlib.suppress(AssertionError):
                expect(cards.nth(at_least - 1)).to_be_visible(timeout=5000)
                break
            self.page.reload()
        expect(cards.nth(at_least - 1)).to_be_visible()
        texts = [card.inner_text().split() for card in cards.all()]
        return {words[1]: words[0].lower() for words in texts}

    def artifact(self, key: str) -> "ArtifactPage":
        heading = self.page.get_by_role("heading", name=key, exact=True)
        self.tab("Artifacts").get_by_role("link").filter(has=heading).click()
        return ArtifactPage(self.page, key)

    def cancel(self) -> None:
        """Through the page's menu, and its question."""
        self._menu("Cancel")
        question = self.page.get_by_role("alertdialog", name="Cancel Flow Run")
        question.get_by_role("button", name="Cancel Flow Run").click()
        expect(question).to_be_hidden()

    def retry(self) -> None:
        """Through the page's menu, and its question."""
        self._menu("Retry")
        question = self.page.get_by_role("alertdialog").or_(self.page.get_by_role("dialog"))
        question.get_by_role("button", name=re.compile("^Retry")).click()
        expect(question).to_be_hidden()

    def _menu(self, item: str) -> None:
        self.main.get_by_role("button", name="Open menu").first.click()
        self.page.get_by_role("menuitem", name=item, exact=True).click()


class ArtifactPage:
    """One artifact."""

    def __init__(self, page: Page, key: str) -> None:
        self.page = page
        self.panel = page.get_by_role("main").get_by_role("tabpanel", name="Artifact", exact=True)
        expect(page.get_by_role("main").get_by_label("breadcrumb").first).to_contain_text(key)
        expect(self.panel).to_be_visible()

    def says(self, text: str) -> None:
        """A markdown artifact shows this text: it is drawn, and drawn again, a little later than its panel."""
        expect(self.panel).to_contain_text(text, use_inner_text=True)

    def table(self) -> list[dict[str, str]]:
        """The first table's rows, as they are shown, once it is drawn."""
        table = self.panel.locator("table").first
        expect(table.locator("tbody tr td").last).to_be_visible()
        return list(table.evaluate(ROWS))

    def draws(self, at_least: int) -> None:
        """So many pictures were really drawn, those of the description too."""
        drawn = "[...document.querySelectorAll('main img[src]')].filter(one => one.complete && one.naturalWidth)"
        self.page.wait_for_function(f"{drawn}.length >= {at_least}")
