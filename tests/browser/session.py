"""A real Chromium on a Prefect UI, for one test: nothing but loopback, and evidence where the test fails."""

import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, Route, expect, sync_playwright

from tests.browser.install import browser_path, unusable
from tests.browser.pages import Ui

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
DEADLINE_MS = 180_000.0  # a machine may be busy
SIZE = {"width": 1400, "height": 1000}


def launch(playwright: Playwright, folder: Path) -> Browser:
    """A Chromium that goes on whatever the network's interfaces do; how it is started is written into `folder`."""
    script = folder / "chromium"
    deaf = Path(__file__).with_name("deaf.py")
    words = shlex.join([sys.executable, "-I", "-S", str(deaf), str(browser_path())])
    script.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    script.chmod(0o700)
    return playwright.chromium.launch(executable_path=script, args=FLAGS)


@contextlib.contextmanager
def prefect_ui(url: str, auth: str, folder: Path) -> Iterator[Ui]:
    """The UI of the server at `url` (with or without /api) in a fresh profile, logged in.

    A failure of the body leaves a screenshot, the page's text and the console's log in `folder`, and names them. The
    page may ask loopback only: other requests are blocked, and fail the test at its end.
    """
    if reason := unusable():
        pytest.skip(reason)
    expect.set_options(timeout=DEADLINE_MS)
    with sync_playwright() as playwright:
        browser = launch(playwright, folder)
        try:
            context = browser.new_context(viewport=SIZE, locale="en-GB", timezone_id="UTC")  # type: ignore[arg-type]
            context.set_default_timeout(DEADLINE_MS)
            context.grant_permissions(["clipboard-read", "clipboard-write"])
            foreign = _only_loopback(context)
            page = context.new_page()
            console: list[str] = []
            page.on("console", lambda message: console.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: console.append(f"uncaught: {error}"))
            ui = Ui(page, url.rstrip("/").removesuffix("/api"))
            try:
                ui.login(auth)
                yield ui
            except BaseException as error:
                error.add_note(_evidence(page, console, folder))
                raise
            assert foreign == [], f"the page asked for what is not on this machine: {foreign}"
        finally:
            browser.close()


def _only_loopback(context: BrowserContext) -> list[str]:
    """Blocks all other hosts; the list gets the addresses that were asked for all the same."""
    foreign: list[str] = []

    def judge(route: Route) -> None:
        url = route.request.url
        parts = urlsplit(url)
        if parts.scheme in ("data", "blob") or parts.hostname in LOOPBACK:
            route.continue_()
            return
        foreign.append(url)
        route.abort()

    context.route("**/*", judge)
    return foreign


def _evidence(page: Page, console: list[str], folder: Path) -> str:
    number = len(list(folder.glob("browser-*.log"))) + 1
    log, shot = folder / f"browser-{number}.log", folder / f"browser-{number}.png"
    lines = [f"address: {page.url}", "", *console, ""]
    with contextlib.suppress(Exception):
        page.screenshot(path=shot, full_page=True)
    with contextlib.suppress(Exception):
        lines.append(page.locator("body").inner_text(timeout=5000))
    log.write_text("\n".join(lines))
    return f"screenshot: {shot}\nconsole and text of the page: {log}"
