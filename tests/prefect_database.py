"""A Prefect database that has its tables already: Prefect's migrations take 5 s of a core, and tests start many servers."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".test-cache"
NAME = "prefect.db"  # in a PREFECT_HOME


def seed(home: Path) -> Path:
    """Give `home`, a PREFECT_HOME that has none, an empty database of this version of Prefect."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (home / NAME).exists():
        shutil.copyfile(_template(), home / NAME)
    return home


def _template() -> Path:
    """Made once, by whichever process comes first."""
    CACHE.mkdir(exist_ok=True)
    path = CACHE / f"prefect-{version('prefect')}.db"
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
                argv = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
                subprocess.run(argv, env={**clean, "PREFECT_HOME": folder}, check=True, capture_output=True)
                os.replace(Path(folder) / NAME, path)
    return path
