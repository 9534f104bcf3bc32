"""The process of one flow run: `python -m flows.up.engine`, which a worker starts instead of `python -m prefect.engine`.

It writes into a file of its own and not into the worker's pipe: the worker waits for the end of that pipe, which a child
that outlives the flow (a job on this machine) would hold open, and a worker that dies would break it. It is in a session
of its own, so that no signal to the worker's group or terminal reaches it.
"""

import contextlib
import os
import runpy
import sys
from collections.abc import Set
from pathlib import Path

import psutil

from flows.up.state import logs
from slipstream.process import importing

KEPT = 200  # files of flow runs that have ended; older ones are removed
FLOW_RUN_ENV = "PREFECT__FLOW_RUN_ID"


def log_file(flow_run_id: str) -> Path:
    """Where the process of a flow run writes what it prints."""
    return logs() / "flow-runs" / f"{flow_run_id}.log"


def _redirect(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def living() -> set[str]:
    """Ids of the flow runs whose processes live here."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            if "flows.up.engine" in (process.info["cmdline"] or []):
                found.add(process.environ().get(FLOW_RUN_ENV, ""))
    return found


def remove_old(folder: Path, kept: int = KEPT, spared: Set[str] = frozenset()) -> None:
    """Remove all but the newest `kept` logs; those of the flow runs in `spared` stay, however old: a run of weeks writes
    little. What somebody else removes meanwhile does no harm."""
    found = []
    for path in folder.glob("*.log"):
        if path.stem in spared:
            continue
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path))
    for _, path in sorted(found, reverse=True)[kept:]:
        with contextlib.suppress(OSError):
            path.unlink()


def main() -> None:
    with contextlib.suppress(PermissionError):  # the leader of a session already
        os.setsid()
    path = log_file(os.environ.get(FLOW_RUN_ENV) or "unknown")
    try:
        _redirect(path)
        remove_old(path.parent, spared=living())
    except OSError as error:  # a full disk must not keep a run from its leader
        print(f"{path}: {error}", file=sys.stderr)
    with importing():
        import prefect.flow_engine  # noqa: F401
    runpy.run_module("prefect.engine", run_name="__main__")


if __name__ == "__main__":
    main()
