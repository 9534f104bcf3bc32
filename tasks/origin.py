"""Where a run comes from: `origin.json`, written before anything else of it."""

import contextlib
import getpass
import os
import socket
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from slipstream.instance import instance_id
from slipstream.run_folder import DamagedFile, RunFolder, RunFolderError, read_object, write_json

SWEEP_ENV = "SLIPSTREAM_SWEEP"  # of a command that leads a cell: the sweep's id


@dataclass(frozen=True)
class Origin:
    """How a run was started.

    Attributes:
        cwd: folder that it was started in; relative paths of its configuration start there.
        host, user, time: of the process that made it (`time`: of that host's clock, seconds).
        instance: whose it is (`slipstream.instance`).
        flow_run: id of the Prefect flow run that leads it; "" where it has none that a worker could start again.
        deployment: id of that flow run's deployment, or "".
        sweep: id of the sweep that it is a cell of, or "".
        path: of its folder, which may have been moved or copied since.
    """

    cwd: str = "."
    host: str = ""
    user: str = ""
    time: float = 0.0
    instance: str = ""
    flow_run: str = ""
    deployment: str = ""
    sweep: str = ""
    path: str = ""


def origin_here(flow_run: str = "", deployment: str = "", sweep: str = "") -> Origin:
    """An origin of this process, now. `sweep`: else what the environment says."""
    sweep = sweep or os.environ.get(SWEEP_ENV, "")
    host, user, instance = socket.gethostname(), getpass.getuser(), instance_id()
    return Origin(os.getcwd(), host, user, time.time(), instance, flow_run, deployment, sweep)


def begun_by(run: RunFolder, flow_run: str, sweep: str = "") -> bool:
    """Whether the folder is that of a start of this flow run, also where it died before it said so. Raises DamagedFile.

    Args:
        sweep: id of the sweep that the flow run is of a cell of; of a cell that never came to a run it may be another one.
    """
    if not run.path.is_dir():
        return False
    whence = read_origin(run) if read_object(origin_file(run)) else None
    if whence is None:
        return not run.run_file.exists()
    of_the_cell = bool(sweep) and whence.sweep == sweep and not run.run_file.exists()
    return whence.flow_run == flow_run or of_the_cell


def origin_file(run: RunFolder) -> Path:
    return run.path / "origin.json"


def write_origin(run: RunFolder, origin: Origin) -> None:
    """Raises OSError."""
    write_json(origin_file(run), asdict(replace(origin, path=str(run.path.absolute()))))


def read_origin(run: RunFolder) -> Origin:
    """What was written; defaults for what an older run does not say. Raises DamagedFile."""
    value = read_object(origin_file(run), "time")
    texts = {f.name: value[f.name] for f in fields(Origin) if f.name != "time" and isinstance(value.get(f.name), str)}
    return Origin(**texts, time=float(value.get("time") or 0.0))


def original_of(run: RunFolder) -> Path | None:
    """The folder that this one is a copy of; None where it is none, or was moved. Raises DamagedFile.

    A copy names the jobs and the flow run of the other: whoever stops it would stop those.
    """
    mine = read_origin(run)
    there = Path(mine.path)
    with contextlib.suppress(OSError, DamagedFile):
        if mine.path and not there.samefile(run.path) and read_origin(RunFolder(there)) == mine:
            return there
    return None


def refuse_copy(run: RunFolder) -> None:
    """Raises RunFolderError where the folder is a copy of another one, as far as can be told."""
    original = None
    with contextlib.suppress(DamagedFile):
        original = original_of(run)
    if original is not None:
        raise RunFolderError(
            f"{run.path} is a copy of {original}, and names its jobs and its flow run: use that one, or move it away first"
        )
