"""Where a secret of a run could be read by others: command lines, SLURM's own files, logs, pickles, the command line's words."""

from collections.abc import Mapping

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
    for path in (path for folder in folders for path in folder.rglob("*")):
        if private in path.parents or path.is_symlink() or not path.is_file():
            continue
        try:
            found[str(path)] = path.read_bytes()
        except FileNotFoundError:  # SLURM replaces its state all the time
            continue
    return found


def leaks(found: Mapping[str, bytes], secrets: Mapping[str, str]) -> list[str]:
    """ "SECRET in PLACE" for each that is found; names only."""
    return [
        f"{name} in {place}"
        for place, text in found.items()
        for name, value in secrets.items()
        if value.encode() in text
    ]
