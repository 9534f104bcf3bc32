"""Whose runs these are: the instance id that job comments, Prefect objects and reconciliation are scoped by.

One person on one Prefect server is one instance. Its state (the server's password, logs, the storage roots that it has
used) lies in a folder of its own, which nobody else can read.
"""

import contextlib
import errno
import getpass
import hashlib
import os
import re
from pathlib import Path

from slipstream.run_folder import DamagedFile, RunFolder, read_object, write_json

INSTANCE_ENV = "SLIPSTREAM_INSTANCE"
HOME_ENV = "SLIPSTREAM_HOME"
RESERVED = "-care"  # of the second work pool of an instance (`flows.names`)
VALID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")


class InstanceError(Exception):
    """An instance id that cannot be one."""


def instance_id(given: str | None = None) -> str:
    """The id of this instance: `given`, else $SLIPSTREAM_INSTANCE, else the user's name. Raises InstanceError."""
    value = given or os.environ.get(INSTANCE_ENV) or re.sub(r"[^A-Za-z0-9_-]", "-", _user())[:32]
    if not VALID.match(value):
        raise InstanceError(
            f"the instance id {value!r} is not possible: letters, digits, '_' and '-', at most 32 (--instance, or "
            f"{INSTANCE_ENV} in the environment)"
        )
    if value.endswith(RESERVED):
        raise InstanceError(
            f"the instance id {value!r} is not possible: what ends in {RESERVED!r} is a work pool of "
            f"{value.removesuffix(RESERVED)!r}; choose another (--instance, or {INSTANCE_ENV} in the environment)"
        )
    return value


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no name for this uid, and none in the environment
        return f"uid{os.getuid()}"


def instance_of(run: RunFolder) -> str:
    """The id of the instance that made `run`: this one where it is not made yet; "" where that is not known (an older run)."""
    path = run.path / "origin.json"
    try:
        value = read_object(path)
    except DamagedFile:
        return ""
    return str(value.get("instance") or "") if value else instance_id()


def home() -> Path:
    """$SLIPSTREAM_HOME, or ~/.slipstream; made with mode 0700. Raises InstanceError where it is relative, OSError."""
    given = os.environ.get(HOME_ENV)
    folder = Path(given or "~/.slipstream").expanduser()
    if not folder.is_absolute():
        raise InstanceError(
            f"{HOME_ENV if given else 'HOME'} = {given or os.environ.get('HOME')!r} in the environment is another folder "
            "wherever a command is run: give a path that begins with /"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        number = errno.ENOTDIR if isinstance(error, FileExistsError) else error.errno
        where = f"{error.filename} ({HOME_ENV} in the environment)" if given else error.filename
        raise OSError(number, os.strerror(number or 0), where) from None
    return folder


def check_home() -> None:
    """Before anything is made. Raises InstanceError where the environment names no place; a home that takes no writes is one."""
    with contextlib.suppress(OSError):
        home()


def remember_root(root: Path) -> None:
    """Note a storage root that runs are made in, so that reconciliation looks there. Raises OSError."""
    text = str(root.absolute())
    path = home() / "roots" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not path.exists():
        write_json(path, {"root": text})


def known_roots() -> tuple[list[Path], list[str]]:
    """Storage roots that were noted: those that can be looked into, and of the others why not, with the way out."""
    there, missing = [], []
    for note in sorted((home() / "roots").glob("*.json")):
        try:
            root = Path(str(read_object(note).get("root", "")))
        except (DamagedFile, OSError) as error:
            missing.append(f"{error}: remove {note}; the next run in that storage root notes it again")
            continue
        if why := unusable(root):
            missing.append(f"the storage root {why}: mount it, or remove {note} where it is gone for good")
        else:
            there.append(root)
    return sorted(there), missing


def unusable(root: Path) -> str:
    """Why a folder cannot be looked into; "" where it can."""
    if not root.is_absolute():
        return f"{str(root)!r} is no absolute path"
    try:
        with os.scandir(root):
            return ""
    except OSError as error:
        return f"{root} is not to be seen ({error.strerror})"
