"""Why the ranks of a learner ended: each writes its error; the leader tells the first, or the signal that killed one."""

import contextlib
import errno
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.process import last_lines
from slipstream.run_folder import RunFolder, read_json, write_json

# torchrun's summary of the first failure
_KILLED = re.compile(r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: -\d+ \(pid: \d+\)\s*\((SIG\w+)\)?", re.DOTALL)
# the line of a traceback that names the error; its text may go on over further lines
_NAMED = re.compile(r"^[\w.]+(?:Error|Exception|Exit|Interrupt)\b")
LONGEST = 500
STORAGE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


class Failure(NamedTuple):
    """Why a learner ended, and whether starting it again cannot help."""

    reason: str
    final: bool = False


@contextlib.contextmanager
def constructing() -> Iterator[None]:
    """Within it a ValueError or TypeError comes from the settings, unless a file or a connection is its cause."""
    try:
        yield
    except (ValueError, TypeError, ImportError) as error:
        if not any(isinstance(cause, OSError) for cause in _chain(error)):
            error.final = True  # type: ignore[union-attr]
        raise


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def is_final(error: BaseException) -> bool:
    """Whether the same error would come after a restart: its class says so, `constructing`, or the storage does."""
    if getattr(error, "final", False):
        return True
    return any(isinstance(cause, OSError) and cause.errno in STORAGE for cause in _chain(error))


def _file(run: RunFolder, attempt: int, rank: int) -> Path:
    return run.path / "exit" / f"rank-{rank}-a{attempt}.json"


def in_short(error: BaseException) -> str:
    """One line: kind and text of an error; where it carries another process's traceback, that one's last error."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()] or [""]
    text = "; ".join(line.strip() for line in lines)
    if "Traceback" in str(error):
        named = [i for i, line in enumerate(lines) if _NAMED.match(line)]
        text = f"{lines[0]} {'; '.join(lines[named[-1] if named else -1 :])}"
    return f"{type(error).__name__}: {text}"[:LONGEST]


def record_failure(run: RunFolder, attempt: int, rank: int, error: BaseException) -> None:
    """Write this rank's error for the leader, where the storage takes it."""
    record = {"rank": rank, "error": in_short(error), "final": is_final(error), "time": time.time()}
    with contextlib.suppress(OSError):
        write_json(_file(run, attempt, rank), record)


def record_departure(run: RunFolder, attempt: int, step: int, reason: str) -> None:
    """Rank 0 has left at this step, because it was told to. Raises OSError: without the record it has not."""
    write_json(_file(run, attempt, 0), {"rank": 0, "left": step, "reason": reason, "time": time.time()})


def departure(run: RunFolder, attempt: int) -> tuple[int, str] | None:
    """The step that the ranks left at, and the reason; None where they did not leave."""
    value: Any = None
    with contextlib.suppress(ValueError, OSError):
        value = read_json(_file(run, attempt, 0))
    return (int(value["left"]), str(value.get("reason"))) if isinstance(value, dict) and "left" in value else None


def first_failure(run: RunFolder, attempt: int, log: Path) -> Failure | None:
    """The error that came first; None where no rank left one and none was killed."""
    found = []
    for path in (run.path / "exit").glob(f"rank-*-a{attempt}.json"):
        with contextlib.suppress(ValueError, OSError):
            found.append(read_json(path) or {})
    found = [value for value in found if value.get("error")]
    killed = _KILLED.search(last_lines(log, 60))
    if killed:  # the other ranks then fail for want of this one
        return Failure(f"rank {killed[1]} was ended by {killed[2]} (out of memory, or killed from outside)")
    if found:
        first = min(found, key=lambda value: float(value.get("time", 0)))
        text = str(first["error"])
        if text.startswith("NodeFault: node "):  # it blames a node, in the form that is looked for
            return Failure(text.removeprefix("NodeFault: "))
        return Failure(f"rank {first['rank']}: {text}", bool(first.get("final")))
    return None
