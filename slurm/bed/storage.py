"""A bed's folders and mounts on this host: shared, size-limited and read-only storage; cleaning up."""

import contextlib
import errno
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slurm.bed.configuration import write_all
from slurm.bed.description import STATE_FILE, BedError, Description, cgroup_name
from slurm.bed.machines import wait_until

OPEN = ("shared", "limited", "readonly")  # every user may write there, as far as the storage lets them
PLAIN = ("etc", "state", "spool", "log", "run", "dev", "tmp", "home", "cgroup/freezer")


def mounted_under(folder: str) -> list[str]:
    """Mount points in or below `folder` on this host, the innermost first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), line.split()[4])
        if place == folder or place.startswith(f"{folder}/"):
            found.append(place)
    return sorted(found, key=len, reverse=True)


def run(*command: str) -> None:
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode:
        raise BedError(f"{' '.join(command)}: {done.stderr.strip()}")


def create(bed: Description) -> None:
    """Folders, fake GPUs, key, configuration and the two storages to fail on. The bed's folder exists already."""
    folder = bed.path
    folder.chmod(0o755)
    for name in (*PLAIN, *OPEN):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "munge").mkdir(mode=0o700)
    key = folder / "munge" / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    for number in range(bed.gpus):
        os.mknod(folder / "dev" / f"nvidia{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # SLURM wants devices
    for user, uid in bed.users.items():
        home = bed.home(user)
        home.mkdir(mode=0o700)
        os.chown(home, uid, uid)
    run(
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={bed.limited_mb}m,mode=1777,nosuid,nodev",
        "bed-limited",
        f"{folder}/limited",
    )
    run("mount", "-t", "tmpfs", "-o", "size=16m,mode=1777,nosuid,nodev", "bed-readonly", f"{folder}/readonly")
    for name in OPEN:
        (folder / name).chmod(0o1777)
    (folder / "readonly" / "README").write_text("Nothing can be written here.\n")
    remount(folder / "readonly", "ro")
    write_all(bed)


def remount(storage: Path, option: str) -> None:
    """Changes a file system for everybody who has it mounted.

    A remount also sets the flags of the mount that it names, here only: with a mount for the purpose, those of the others
    stay open and the file system's own decide."""
    with tempfile.TemporaryDirectory(prefix="slipstream-bed-") as place:
        run("mount", "--bind", str(storage), place)
        try:
            run("mount", "-o", f"remount,{option}", place)
        finally:
            run("umount", place)


def change(bed: Description, name: str, setting: str) -> None:
    """Makes a storage `ro`, `rw` or N MB large, for all machines at once.

    Raises BedError where the kernel refuses: read-only while a file is open for writing, smaller than what is in it."""
    if name not in ("limited", "readonly"):
        raise BedError(f"no storage {name!r}: limited or readonly")
    option = f"size={setting}m" if setting.isdigit() else setting
    if option not in ("ro", "rw") and not setting.isdigit():
        raise BedError(f"a storage is made ro, rw or a number of MB large, not {setting!r}")
    remount(bed.path / name, option)


@contextlib.contextmanager
def freezer() -> Iterator[Path | None]:
    """The root of cgroup v1's freezer hierarchy, mounted for a moment; None where this host has none."""
    with tempfile.TemporaryDirectory(prefix="slipstream-bed-") as place:
        call = ["mount", "-t", "cgroup", "-o", "freezer", "freezer", place]
        if subprocess.run(call, capture_output=True).returncode:
            yield None
            return
        try:
            yield Path(place)
        finally:
            subprocess.run(["umount", place], check=True)


def freezer_works() -> bool:
    """Whether this host has the freezer of cgroup v1, which lets SLURM find every process of a job."""
    with freezer() as root:
        return root is not None


def remove_cgroup(index: int) -> None:
    """The cgroups of a bed whose processes were killed. Raises BedError when some are not empty in time."""
    with freezer() as root:
        if root is None:
            return
        top = root / cgroup_name(index)
        wait_until(lambda: removed(top), f"no process left in {cgroup_name(index)}", 30)


def removed(top: Path) -> bool:
    try:
        for group, _, _ in os.walk(top, topdown=False):
            os.rmdir(group)
    except OSError as error:  # killed, and not yet reaped
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def unmount(folder: str) -> None:
    for place in mounted_under(folder):
        run("umount", place)


def delete(folder: Path) -> None:
    """Removes a bed's folder. Never reaches into another file system."""
    if not folder.exists():
        return
    if left := mounted_under(str(folder)):
        raise BedError(f"{folder} is not removed: mounted there: {', '.join(left)}")
    empty(folder, keep=STATE_FILE)  # last: what is half removed can be removed again
    remove_tree(folder)


def remove_tree(folder: Path) -> None:
    """Also where somebody else is removing it at the same time."""

    def gone(_function: object, _path: str, error: tuple[type, BaseException, object]) -> None:
        if not isinstance(error[1], FileNotFoundError):
            raise error[1]

    shutil.rmtree(folder, onerror=gone)


def empty(folder: Path, keep: str = "") -> None:
    with contextlib.suppress(FileNotFoundError):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                remove_tree(entry)
            elif entry.name != keep:
                entry.unlink(missing_ok=True)
