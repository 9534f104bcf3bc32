"""Why the ranks of a learner ended: each writes its error; the leader tells the first, or the signal that killed one."""

import contextlib
import re
import time
from pathlib import Path

from slipstream.process import last_lines
from slipstream.run_folder import RunFolder, read_json, write_json

# torchrun's summary of the first failure
_KILLED = re.compile(r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: -\d+ \(pid: \d+\)\s*\((SIG\w+)\)?", re.DOTALL)
# the line of a traceback that names the error; its text may go on over further lines
_NAMED = re.compile(r"^[\w.]+(?:Error|Exception|Exit|Interrupt)\b")
LONGEST = 500


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
    with contextlib.suppress(OSError):
        write_json(_file(run, attempt, rank), {"rank": rank, "error": in_short(error), "time": time.time()})


def first_failure(run: RunFolder, attempt: int, log: Path) -> str:
    """The error that came first, in words; '' where no rank left one and none was killed."""
    found = []
    for path in (run.path / "exit").glob(f"rank-*-a{attempt}.json"):
        with contextlib.suppress(ValueError, OSError):
            found.append(read_json(path) or {})
    found = [value for value in found if value.get("error")]
    killed = _KILLED.search(last_lines(log, 60))
    if killed:  # the other ranks then fail for want of this one
        return f"rank {killed[1]} was ended by {killed[2]} (out of memory, or killed from outside)"
    if found:
        first = min(found, key=lambda value: float(value.get("time", 0)))
        if str(first["error"]).startswith("NodeFault: node "):  # it blames a node, in the form that is looked for
            return str(first["error"]).removeprefix("NodeFault: ")
        return f"rank {first['rank']}: {first['error']}"
    return ""
