"""Chromium for the tests in a browser: `python -m tests.browser.install [--if-possible]` (Debian, root)."""

import os
import shutil
import subprocess
import sys

from slurm.bed.description import BedError
from slurm.bed.packages import apt_command, apt_get, is_debian

PACKAGE = "chromium"
CANDIDATES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
BROWSER_ENV = "SLIPSTREAM_TEST_BROWSER"  # path of another Chromium


def browser_path() -> str | None:
    """A Chromium on this machine: $SLIPSTREAM_TEST_BROWSER, else the first that is on PATH."""
    given = os.environ.get(BROWSER_ENV)
    return shutil.which(given) if given else next(filter(None, map(shutil.which, CANDIDATES)), None)


def unusable() -> str | None:
    """Why no browser test can run here, and what helps; None if they can."""
    path = browser_path()
    if path is None:
        if given := os.environ.get(BROWSER_ENV):
            return f"{BROWSER_ENV} = {given!r} is no program: correct it, or unset it to use a Chromium of this machine"
        how = f"`{apt_command([PACKAGE])}` as root" if is_debian() else "this is not Debian; install one by hand"
        return f"the tests in a browser need Chromium: {how}, or name one in {BROWSER_ENV}"
    done = subprocess.run([path, "--version"], text=True, capture_output=True, stdin=subprocess.DEVNULL)
    if done.returncode:  # Debian's wrapper is there and its library is not, or a snap's stub
        return f"{path} --version fails: {(done.stderr or done.stdout).strip()[-300:]}"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError as error:
        return f"the tests in a browser need Playwright ({error}): run ./setup.sh"
    return None


def install() -> bool:
    """Install Chromium with apt-get where there is none. True if it did. Raises BedError."""
    if browser_path() or os.environ.get(BROWSER_ENV):
        return False
    if not is_debian():
        raise BedError(f"this is not Debian (no apt-get): install Chromium by hand, or name one in {BROWSER_ENV}")
    if os.geteuid() != 0:
        raise BedError(f"installing needs root: sudo {apt_command([PACKAGE])}")
    apt_get("update", "-qq")
    apt_get("install", "-y", "-qq", "--no-install-recommends", PACKAGE)
    return True


def main(arguments: list[str]) -> int:
    try:
        installed = install()
        if reason := unusable():
            raise BedError(reason)
    except BedError as error:
        if "--if-possible" not in arguments:
            print(f"[browser] error: {error}", file=sys.stderr)
            return 1
        print(f"[browser] the tests in a browser will be skipped: {error}")
    else:
        print(f"[browser] installed {PACKAGE}" if installed else "[browser] nothing to install")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
