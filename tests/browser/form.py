"""The form of a custom run. A field is named by its titles, from the outermost section to it."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from playwright.sync_api import Locator, Page, expect

BUSY, TRIES = 503, 5
CREATES = re.compile("/create_flow_run$")


def until_not_busy(page: Page, start: Callable[[], None]) -> str:
    """Start a run, again where the server was busy: it says so in a message, and has made none. The flow run's id."""
    for _ in range(TRIES):
        with page.expect_response(CREATES) as answer:
            start()
        if answer.value.status != BUSY:
            assert answer.value.ok, answer.value.text()
            return str(answer.value.json()["id"])
        page.wait_for_timeout(1000)
    raise AssertionError(f"the server was busy {TRIES} times")


def _title(text: str) -> str:
    quote = "'" if '"' in text else '"'
    return f"normalize-space()={quote}{text}{quote} or normalize-space()={quote}{text} (Optional){quote}"


@dataclass(frozen=True)
class Refusal:
    """What a form said: the message that names the field, and the one at the foot of the page ("" where it has none)."""

    field: str
    toast: str


class RunForm:
    """Prefect's form for a run of a deployment with parameters of its own."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.form = page.locator("form")
        self._said: Locator | None = None
        expect(self.form.locator("fieldset").first).to_be_visible()

    def field(self, *titles: str) -> Locator:
        """What stands under a title: one control, or a section with all its fields."""
        found = self.form
        for title in titles:
            label = f"(.//label[{_title(title)}])[1]/ancestor::div[following-sibling::fieldset][1]"
            found = found.locator(f"xpath={label}/following-sibling::fieldset[1]")
        return found

    def titles(self, *section: str) -> list[str]:
        """Titles of all fields and sections in a section, outermost first."""
        return [text.removesuffix(" (Optional)") for text in self.field(*section).locator("label").all_inner_texts()]

    def description(self, *titles: str) -> str:
        header = self.field(*titles).locator("xpath=preceding-sibling::div[1]")
        paragraph = header.get_by_role("paragraph")
        return paragraph.first.inner_text() if paragraph.count() else ""

    def rename(self, name: str) -> None:
        """The run's name on Prefect's pages."""
        self.form.get_by_label("Run Name").fill(name)

    def fill(self, *titles: str, value: str | int | float) -> None:
        """Type a text or a number; a field that is empty ("None") is opened first."""
        self._control(*titles).fill(str(value))

    def value(self, *titles: str) -> str:
        return self._control(*titles).input_value()

    def _control(self, *titles: str) -> Locator:
        field = self.field(*titles)
        expect(field.locator("input, textarea, [role=tab]").first).to_be_visible()
        tabs = field.get_by_role("tab")
        if tabs.count():  # the types that it may have; the last is None
            tabs.first.click()
        return field.locator("input, textarea").first

    def choose(self, *titles: str, option: str) -> None:
        """Pick one of a list of values."""
        self.field(*titles).get_by_role("button").first.click()
        self.page.get_by_role("option", name=option, exact=True).click()

    def switch(self, *titles: str, on: bool) -> None:
        self.field(*titles).get_by_role("switch").first.set_checked(on)

    def items(self, *titles: str) -> list[str]:
        """What is in a list of texts or numbers."""
        return [item.input_value() for item in self._items(*titles).all()]

    def add_item(self, *titles: str, value: str | int | float) -> None:
        """Append one text or number to a list."""
        items = self._items(*titles)
        before = items.count()
        self.field(*titles).get_by_role("button", name="Add item").click()
        expect(items).to_have_count(before + 1)
        items.last.fill(str(value))

    def remove_items(self, *titles: str) -> None:
        """Empty a list."""
        items = self._items(*titles)
        while left := items.count():
            self.field(*titles).get_by_role("button", name="Open menu").last.click()
            self.page.get_by_role("menuitem", name="Delete").click()
            expect(items).to_have_count(left - 1)

    def _items(self, *titles: str) -> Locator:
        field = self.field(*titles)
        expect(field.get_by_role("button", name="Add item")).to_be_visible()
        return field.locator("input, textarea")

    def submit(self) -> str:
        """Press Submit and wait until Prefect has made the run; once more where its database was busy, as a person would.

        The flow run's id, which the link in the message that passes after four seconds leads to.
        """
        if self._said is not None:  # after a refusal the first press only looks again at what was filled in
            with self.page.expect_response("**/ui/schemas/validate"):
                self._press()
            expect(self._said).to_be_hidden()
        return until_not_busy(self.page, self._press)

    def submit_refused(self, *titles: str) -> Refusal:
        """Press Submit and wait until the form says what is wrong with this field; nothing is started."""
        field = self.field(*titles)
        self._press()
        native = field.locator("input, textarea").first
        if native.count() and (said := native.evaluate("element => element.validationMessage")):
            return Refusal(str(said), "")
        self._said = message = field.locator("xpath=following-sibling::*[1]")
        expect(message).not_to_be_empty()
        toast = self.page.get_by_role("region", name="Notifications")
        expect(toast).not_to_be_empty()
        return Refusal(message.inner_text(), toast.inner_text())

    def _press(self) -> None:
        self.form.get_by_role("button", name="Submit", exact=True).click()
