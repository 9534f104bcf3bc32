"""The run folder: the single source of truth about a run, on storage that every node sees.

Every file is written whole (write, fsync, rename) or appended to by exactly one writer. Layout: docs/design.md.
"""

import contextlib
import errno
import json
import math
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

RUN_FILE = "run.toml"
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
LEDGER = "ledger.jsonl"


class RunFolderError(Exception):
    """A run folder is missing, exists already, or does not hold what it must."""


class DamagedFile(RunFolderError, ValueError):
    """A file of a run folder does not hold what it must; the text names it."""


def fsync_folder(path: Path) -> None:
    """Make a rename in `path` durable, where the file system can."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_atomic(path: Path, data: str | bytes, mode: int = 0o600) -> None:
    """Write `data` to `path` so that a reader sees the old content or the new one, never a part.

    Raises OSError (disk full, read-only); `path` is then as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno is not None:
            error.filename, error.filename2 = (
                str(path),
                None,
            )  # a full disk names no file, and the temporary one is gone
        raise
    fsync_folder(path.parent)


def create_exclusively(path: Path, data: str) -> None:
    """`write_atomic`, but raises FileExistsError where `path` exists; of two processes at once one succeeds."""
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    write_atomic(temporary, data)
    try:
        os.link(temporary, path)  # whole or not at all: a reader never meets an empty fence
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        with open(path, "x", encoding="utf-8") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    finally:
        temporary.unlink()
    fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of `value` as JSON."""
    write_atomic(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def read_json(path: Path) -> Any | None:
    """The JSON value in `path`, or None where the file is not there.

    Raises DamagedFile on anything but JSON, OSError where the storage does not answer.
    """
    for last in (False, False, True):  # NFS: a file replaced between open and read answers ESTALE once
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            raise DamagedFile(f"{path} is damaged, it is no JSON: {error}") from error
        except OSError as error:
            if last or error.errno != errno.ESTALE:
                raise
    raise AssertionError("not reached")


def read_object(path: Path, *numbers: str) -> dict[str, Any]:
    """The JSON object in `path`, or {} where the file is not there.

    Raises DamagedFile where it holds anything else, or no finite number under a key of `numbers` that it has.
    """
    value = read_json(path)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DamagedFile(f"{path} is damaged: it holds {str(value)[:60]!r}, which is no object")
    if wrong := [key for key in numbers if value.get(key) is not None and not is_number(value[key])]:
        raise DamagedFile(f"{path} is damaged: its {wrong[0]} is {str(value[wrong[0]])[:60]!r}, which is no number")
    return value


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def append_jsonl(path: Path, value: Any) -> None:
    """Append one line. Only one process may append to a file (appends are not atomic on NFS)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def sync_file(path: Path) -> None:
    """Make what was appended to `path` durable, where it is there. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def read_jsonl(path: Path) -> list[Any]:
    """All objects in the lines of `path`; a torn last line (the writer died) and whatever is no object are left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    values = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict):
                values.append(value)
    return values


def void_limits(fences: Mapping[int, Mapping[str, Any]], of_ledger: bool = False) -> dict[int, int]:
    """Per attempt, the last step whose records count, by the fences of all later attempts. The newest has none."""

    def limit(attempt: int, fence: Mapping[str, Any]) -> int:
        step = int(fence.get("step") or 0)
        writer, known = fence.get("ledger", (0, step))
        return int(known) if of_ledger and attempt <= writer else step

    attempts = sorted(fences)
    return {a: min(limit(a, fences[later]) for later in attempts if later > a) for a in attempts[:-1]}


def new_run_id(name: str) -> str:
    """A run id that sorts by time: name, date and time, four random characters."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def check_run_id(run_id: str) -> None:
    """Raises RunFolderError where the id cannot be one."""
    if not RUN_ID.fullmatch(run_id):
        shown = run_id if len(run_id) < 100 else f"{run_id[:99]}…"
        raise RunFolderError(
            f"run_id = {shown!r} cannot name a run: letters, digits, '.', '_' and '-', a letter or digit first, at most 128"
        )


class RunFolder:
    """Paths and small records of one run. Holds no state of its own."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()

    @property
    def run_id(self) -> str:
        return self.path.name

    @classmethod
    def create(cls, storage_root: str | Path, run_id: str, begun: bool = False) -> "RunFolder":
        """Make the folder, private to its user, and the run's token.

        Args:
            begun: the folder may be there already, of a start that died before it wrote run.toml.

        Raises RunFolderError where it exists, or where the id cannot be one: it is a folder's name, and a part of the
        comments of jobs.
        """
        check_run_id(run_id)
        folder = cls(Path(storage_root).expanduser() / run_id)
        folder.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.path.mkdir(mode=0o700)
        except FileExistsError:
            if not begun or folder.run_file.exists():
                raise RunFolderError(
                    f"the run folder {folder.path} exists: choose another run id, or resume it"
                ) from None
        for sub in (
            "secrets",
            "fences",
            "intents",
            "jobs",
            "endpoints",
            "heartbeats",
            "exit",
            "output",
            "records",
            "logs",
        ):
            (folder.path / sub).mkdir(mode=0o700, exist_ok=begun)
        write_atomic(folder.token_file, secrets.token_urlsafe(32) + "\n", mode=0o600)
        return folder

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """An existing run. Raises RunFolderError where `path` holds no run."""
        folder = cls(path)
        if not folder.run_file.is_file():
            raise RunFolderError(f"{folder.path} holds no run: there is no {RUN_FILE}")
        return folder

    @property
    def run_file(self) -> Path:
        return self.path / RUN_FILE

    @property
    def token_file(self) -> Path:
        return self.path / "secrets" / "token"

    @property
    def cancel_file(self) -> Path:
        return self.path / "cancel.json"

    @property
    def assignment_file(self) -> Path:
        return self.path / "assignment.json"

    def assignment(self) -> dict[str, Any]:
        """Which job of each role counts now, by the supervisor that leads: `{"attempt": n, "server": incarnation, …}`.

        Empty where nobody supervises (leaders started by hand). A job that is not named any more has been replaced: it
        must end itself, and readers ignore what it still says.
        """
        try:
            value = read_json(self.assignment_file)
        except (ValueError, OSError):
            return {}
        items = value.items() if isinstance(value, dict) else ()
        return {key: item for key, item in items if isinstance(item, str | int)}

    def replaced(self, role: str, incarnation: str) -> bool:
        """Whether the supervisor has put another job in the place of this one."""
        assignment = self.assignment()
        named = assignment.get(role) or assignment.get("allocation")
        return bool(assignment) and named != incarnation

    def endpoint(self, attempt: int) -> dict[str, Any] | None:
        """The server that counts for `attempt`, or None: the assigned one; where none is assigned, the attempt's own."""
        try:
            value = read_json(self.endpoint_file())
        except (ValueError, OSError):
            return None
        if not isinstance(value, dict) or "url" not in value:
            return None
        assignment = self.assignment()
        assigned = assignment.get("server") or assignment.get("allocation")
        counts = value.get("incarnation") == assigned if assigned else value.get("attempt") == attempt
        return value if counts else None

    def leave_file(self, incarnation: str) -> Path:
        """Written by the leader of a job whose time is up; its ranks save at the same step, and leave."""
        return self.path / "signals" / f"{incarnation}.json"

    def meeting_file(self, incarnation: str) -> Path:
        """Where the nodes of a job meet: written by its first node."""
        return self.path / "endpoints" / f"meeting-{incarnation}.json"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def endpoint_file(self, index: int = 0) -> Path:
        return self.path / "endpoints" / f"server-{index}.json"

    def heartbeat_file(self, who: str) -> Path:
        return self.path / "heartbeats" / f"{who}.json"

    def exit_file(self, role: str, incarnation: str) -> Path:
        return self.path / "exit" / f"{role}-{incarnation}.json"

    def jobs_file(self, attempt: int) -> Path:
        return self.path / "jobs" / f"{attempt}.jsonl"

    def fence_file(self, attempt: int) -> Path:
        return self.path / "fences" / f"{attempt}.json"

    def output(self, attempt: int) -> Path:
        """The trainer's output_dir of an attempt."""
        return self.path / "output" / f"a{attempt}"

    def records(self, attempt: int) -> Path:
        """metrics.jsonl, ledger.jsonl, events.jsonl, completions/ of an attempt."""
        return self.path / "records" / f"a{attempt}"

    @property
    def trackers(self) -> Path:
        """Files of the integrations that `report_to` names; not there without any."""
        return self.path / "trackers"

    def log_file(self, role: str, attempt: int) -> Path:
        return self.logs / f"{role}-{attempt}.log"

    def attempts(self) -> list[int]:
        """Numbers of the attempts that were begun, ascending, by their fences."""
        return sorted(int(p.stem) for p in (self.path / "fences").glob("*.json") if p.stem.isdigit())

    def begin_attempt(self, checkpoint: str | None, step: int, ledger: tuple[int, int] | None = None) -> int:
        """Claim the next attempt number with a fence that names the checkpoint it starts from.

        The fence is created exclusively: of two resumes at once, one gets the number and the other the next one.

        Args:
            checkpoint: path of the checkpoint relative to the run folder, or None for a start from the model.
            step: optimizer steps in that checkpoint; records of earlier attempts beyond it are void.
            ledger: the attempt that wrote the checkpoint, and the last step whose ledger lines it knows: one more than
                `step` for what was dropped after the last step, at the end of the data.
        """
        number = (self.attempts() or [0])[-1] + 1
        while True:
            fence: dict[str, Any] = {
                "attempt": number,
                "checkpoint": checkpoint,
                "step": step,
                "host": socket.gethostname(),
            }
            fence |= {"ledger": list(ledger)} if ledger else {}
            try:
                create_exclusively(self.fence_file(number), json.dumps(fence))
                return number
            except FileExistsError:
                number += 1

    def fence(self, attempt: int) -> dict[str, Any]:
        return read_object(self.fence_file(attempt), "step")

    def void_after(self, of_ledger: bool = False) -> dict[int, int]:
        """Per attempt, the last step whose records count, by the fences of all later attempts. The newest has none."""
        return void_limits({attempt: self.fence(attempt) for attempt in self.attempts()}, of_ledger)

    def merged_records(self, name: str) -> Iterator[dict[str, Any]]:
        """Lines of `records/a*/<name>` over all attempts, without what a later attempt's fence made void.

        Lines without a step count as the attempt's own and are kept; those whose step is no number are left out.
        """
        limits = self.void_after(of_ledger=name == LEDGER)
        for attempt in self.attempts():
            for line in read_jsonl(self.records(attempt) / name):
                step = line.get("step")
                if step is None or (is_number(step) and step <= limits.get(attempt, step)):
                    yield {**line, "attempt": attempt}
