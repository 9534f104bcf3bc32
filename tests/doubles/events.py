"""Events of the doubles, and the faults that a plan injects at them.

Each process writes its events into `events-test/` of the run. The plan, `fault-plan.json` beside the run folder, is a list
of faults: `{"id", "event", "deeds": […], "where": {fact: value}, "attempt", "count", "always"}`. The process that meets the
`count`-th such event carries out the deeds, once in a run (`always`: every time). With `"nth start": n` it is the n-th
event of this name in the run, by whichever process. `block` waits for `go-ID` in `events-test/`, after `reached-ID.json`
there has said where and who waits.
"""

import contextlib
import errno
import json
import os
import signal
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

from slipstream.run_folder import RunFolder, append_jsonl, read_json, write_json

FOLDER = "events-test"
PLAN = "fault-plan.json"
SETTINGS = "double.json"  # beside the plan: {"step_s": seconds of an optimizer step}
POLL_S = 0.02

_identity: dict[str, Any] = {}
_met: Counter[str] = Counter()


class Injected(RuntimeError):
    """What a plan told this process to raise."""


def identify(**facts: Any) -> None:
    """Say who this process is: facts that all its events carry (who, attempt, rank)."""
    _identity.update(facts)


def event(run: RunFolder, name: str, **facts: Any) -> None:
    """Record that something happened, then break where the plan says so. Raises what it says."""
    known = {**_identity, **facts}
    line = {"event": name, "time": time.time(), "pid": os.getpid(), "host": socket.gethostname(), **known}
    with contextlib.suppress(OSError):
        append_jsonl(run.path / FOLDER / f"{known.get('who', 'process')}-{os.getpid()}-{line['host']}.jsonl", line)
    for fault in plan_of(run):
        if _due(run, fault, name, known) and _claim(run, fault):
            write_json(run.path / FOLDER / f"reached-{fault['id']}.json", line)
            for deed in fault["deeds"]:
                _do(run, fault, deed, known)


def plan_of(run: RunFolder) -> list[dict[str, Any]]:
    value = read_json(run.path.parent / PLAN)
    return value if isinstance(value, list) else []


def setting(run: RunFolder, name: str, default: float) -> float:
    """A setting of the doubles of this run."""
    value = read_json(run.path.parent / SETTINGS) or {}
    return float(value.get(name, default))


def events_of(run: RunFolder) -> list[dict[str, Any]]:
    """All events so far, by time."""
    found = []
    for path in (run.path / FOLDER).glob("*.jsonl"):
        for text in path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(text))
    return sorted(found, key=lambda line: line["time"])


def _due(run: RunFolder, fault: dict[str, Any], name: str, facts: dict[str, Any]) -> bool:
    if fault["event"] != name or fault.get("attempt") not in (None, facts.get("attempt")):
        return False
    if any(facts.get(key) != value for key, value in fault.get("where", {}).items()):
        return False
    if (nth := fault.get("nth start")) is not None:
        return sum(line["event"] == name for line in events_of(run)) >= int(nth)
    _met[fault["id"]] += 1
    return bool(fault.get("always")) or _met[fault["id"]] == fault.get("count", 1)


def _claim(run: RunFolder, fault: dict[str, Any]) -> bool:
    if fault.get("always"):
        return True
    try:
        with open(run.path / FOLDER / f"fired-{fault['id']}", "x"):
            return True
    except FileExistsError:
        return False


def _do(run: RunFolder, fault: dict[str, Any], deed: str, facts: dict[str, Any]) -> None:
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "kill group":
        os.killpg(0, signal.SIGKILL)
    elif deed == "kill parent":
        os.kill(os.getppid(), signal.SIGKILL)
    elif deed == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif deed == "hang":
        while True:
            time.sleep(1)
    elif deed == "raise":
        raise Injected(f"injected at {fault['event']}: out of luck")
    elif deed == "exit":
        os._exit(int(fault.get("code", 3)))
    elif deed in ("enospc", "edquot"):
        code = getattr(errno, deed.upper())
        raise OSError(code, os.strerror(code), str(facts.get("path", "")))
    elif deed == "truncate":
        path = Path(facts["path"])
        os.truncate(path, path.stat().st_size // 2)
    elif deed == "block":
        while not (run.path / FOLDER / f"go-{fault['id']}").exists():
            time.sleep(POLL_S)
    else:
        raise ValueError(f"no such deed: {deed!r}")
