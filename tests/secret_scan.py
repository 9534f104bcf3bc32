"""Where a secret of a run could be read by others: command lines, SLURM's own files, logs, pickles, the command line's words."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from slurm.bed import Bed
from tests.full_stack import USER, FullRun


def places(bed: Bed, full: FullRun) -> dict[str, bytes]:
    """All that is looked at now, by name; in the run folder everything but `secrets`, which is the user's alone."""
    found = {f"process on {one.machine}: {one.command[:60]}": one.command.encode() for one in bed.processes()}
    for number in bed.command("squeue", "-h", "-u", USER, "-o", "%i").split():
        found[f"job {number}"] = bed.command("scontrol", "show", "job", "-dd", number).encode()
        found[f"batch script {number}"] = bed.command("scontrol", "write", "batch_script", number, "-").encode()
    private = full.run.path / "secrets"
    folders = [*(bed.folder / name for name in ("state", "spool", "log", "tmp")), full.folder]
    folders.append(bed.description.home(USER))
    found |= {str(path): text for path, text in texts(folders) if private not in path.parents}
    return found


def texts(folders: Iterable[Path]) -> Iterator[tuple[Path, bytes]]:
    """The files below some folders that are there now: SLURM replaces its state, and removes old jobs, all the time."""
    for folder in folders:
        for at, _, names in os.walk(folder):
            for path in (Path(at, name) for name in sorted(names)):
                if path.is_file() and not path.is_symlink():
                    with contextlib.suppress(FileNotFoundError):
                        yield path, path.read_bytes()


def leaks(found: Mapping[str, bytes], secrets: Mapping[str, str]) -> list[str]:
    """ "SECRET in PLACE" for each that is found; names only."""
    return [
        f"{name} in {place}"
        for place, text in found.items()
        for name, value in secrets.items()
        if value.encode() in text
    ]
