"""Makes the pictures of docs/images: a real demo run, started and watched in the Prefect UI.

python -m tests.browser.screenshots [--root FOLDER] [--out FOLDER] [--sweep]

The paths on the pictures are below FOLDER (default /srv/slipstream), which must not be there before and is removed.
"""

import argparse
import io
import shutil
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Locator, Page, expect

from slipstream.run_folder import RunFolder, read_json
from tests.browser.pages import Ui
from tests.browser.session import prefect_ui
from tests.front_door import Front
from tests.prefect_server import ROOT
from tests.waiting import wait_until

WIDTH, HEIGHT = 1280, 860
INSTANCE = "alice"
COLOURS = 128
LONG_S = 1500.0


def keep(page: Page, out: Path, name: str, height: int = HEIGHT) -> None:
    """What the page shows now, as a small PNG."""
    page.set_viewport_size({"width": WIDTH, "height": height})
    page.mouse.move(5, 5)
    page.wait_for_timeout(1500)  # drawings move into place
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    path = out / f"{name}.png"
    picture.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB", flush=True)


def to_top(place: Locator) -> None:
    place.evaluate("element => element.scrollIntoView({block: 'start'})")


def quiet(page: Page) -> None:
    """Close the messages at the corner of the page."""
    for button in page.get_by_role("region", name="Notifications").get_by_role("button", name="Close").all():
        button.click()


def run_pictures(ui: Ui, root: Path, out: Path) -> None:
    page = ui.page
    ui.deployments()
    keep(page, out, "deployments", 620)
    deployment = ui.deployment(f"{INSTANCE}.demo")
    form = deployment.custom_run()
    form.fill("Storage", "Storage root", value=str(root))
    to_top(form.form.locator("xpath=.."))
    keep(page, out, "form")
    started = time.monotonic()
    run_page = deployment.started(form.submit())
    run = root / f"demo-{run_page.flow_run_id.replace('-', '')[-12:]}"

    def steps() -> int:
        return int((read_json(RunFolder(run).heartbeat_file("learner")) or {}).get("step") or 0)

    wait_until(lambda: steps() >= 1, "the first step", LONG_S)
    print(f"submit to the first step: {time.monotonic() - started:.0f} s", flush=True)
    run_page.wait_state("Completed", seconds=LONG_S)
    print(f"submit to Completed: {time.monotonic() - started:.0f} s", flush=True)
    run_page = ui.flow_run(run_page.flow_run_id)
    run_page.artifacts(4)
    quiet(page)
    keep(page, out, "run", 1100)
    run_page.artifact("slipstream-run")
    keep(page, out, "run-overview")
    ui.flow_run(run_page.flow_run_id).artifact("slipstream-curves")
    expect(page.get_by_role("main").locator("img").first).to_be_visible()
    keep(page, out, "run-curves")


def sweep_pictures(ui: Ui, root: Path, out: Path) -> None:
    deployment = ui.deployment(f"{INSTANCE}.sweep")
    form = deployment.custom_run()
    form.fill("Name", value="staleness-budget")
    form.remove_items("Staleness bounds")
    for bound in (0, 4):
        form.add_item("Staleness bounds", value=bound)
    form.remove_items("Token budgets")
    for budget in (240, 480):
        form.add_item("Token budgets", value=budget)
    form.add_item("Settings", value=f'storage.root = "{root}"')
    form.add_item("Settings", value="trainer.max_steps = 12")
    form.fill("Metric", value="reward")
    parent = deployment.started(form.submit())
    parent.wait_state("Completed", seconds=LONG_S)
    parent.artifacts(2)
    quiet(ui.page)
    keep(ui.page, out, "sweep", 1100)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.browser.screenshots")
    parser.add_argument("--root", type=Path, default=Path("/srv/slipstream"))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--sweep", action="store_true")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.root.mkdir(parents=True)
    home = Path(tempfile.mkdtemp(prefix="screenshots-"))
    front = Front(home)
    front.environment.pop("STANDIN_LEADERS")  # the real parts
    front.environment["SLIPSTREAM_INSTANCE"] = INSTANCE
    front.words = []
    try:
        front.start()
        with prefect_ui(front.url, ":".join(front.auth), home) as ui:
            (sweep_pictures if asked.sweep else run_pictures)(ui, asked.root / "runs", asked.out)
    finally:
        front.root = asked.root / "runs"
        front.close()
        shutil.rmtree(asked.root)
        shutil.rmtree(home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
