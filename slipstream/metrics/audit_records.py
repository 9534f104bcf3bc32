"""Reads what an audit judges from a run folder."""

import contextlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.config_file import load_config
from slipstream.learner.checkpoint import REMAINDER_FILE, STATE_FILE, complete_checkpoints
from slipstream.metrics.audit import audit
from slipstream.metrics.audit_types import AttemptRecords, Audit, CheckpointRecord, RunRecords
from slipstream.run_folder import LEDGER, RunFolder, is_number, read_jsonl, read_object

FAULTS = "faults.jsonl"  # in records/, by the supervisor
RESUMED = "resumed"  # a person began the attempt


def audit_run(run: RunFolder) -> Audit:
    """Audit a run as it stands on storage."""
    return audit(read_records(run))


def read_records(run: RunFolder) -> RunRecords:
    """All records of a run. What cannot be read is among the records as such, never an error.

    Raises ConfigError.
    """
    config = load_config(run.run_file)
    told = read_jsonl(run.path / "records" / FAULTS)
    faults = [fault for fault in told if fault.get("kind") != RESUMED]
    resumed = {int(fault.get("attempt", 0)) for fault in told if fault.get("kind") == RESUMED}
    ended = {attempt: _ended(run, attempt, faults, resumed) for attempt in run.attempts()}
    attempts = []
    for number in run.attempts():
        ledger, bad_ledger = _lines(
            run, run.records(number) / LEDGER, ("number", "epoch", "prompt", "step", "outcomes")
        )
        metrics, bad_metrics = _lines(run, run.records(number) / "metrics.jsonl", ("step",))
        attempts.append(
            AttemptRecords(
                number=number,
                fence=_object(run.fence_file(number), "step"),
                ledger=ledger,
                metrics=metrics,
                checkpoints=[_checkpoint(run, number, step, path) for step, path in _complete(run, number)],
                left=_left(run, number),
                why=ended.get(number - 1, "") if number > 1 else "start",
                faults=_recovered(run, number, faults),
                unreadable=bad_ledger + bad_metrics,
            )
        )
    return RunRecords(
        attempts=attempts,
        num_generations=config.trainer.num_generations,
        max_steps=config.trainer.max_steps,
        num_train_epochs=config.trainer.num_train_epochs,
        logging_steps=config.trainer.logging_steps,
        max_staleness=config.trainer.max_staleness,
        result=_object(run.path / "result.json", "steps") or None,
    )


def _object(path: Path, *numbers: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError, OSError):
        return read_object(path, *numbers)
    return {}


def _lines(run: RunFolder, path: Path, keys: tuple[str, ...]) -> tuple[list[dict[str, Any]], list[str]]:
    """Lines that have `keys`, and where there are others. A torn last line is none: its writer died."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"{path.relative_to(run.path)}: {error.strerror}"]
    lines, bad = [], []
    rows = text.split("\n")
    for number, row in enumerate(rows, 1):
        try:
            value = json.loads(row)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and all(is_number(value.get(key)) or _counts(value.get(key)) for key in keys):
            lines.append(value)
        elif row and number < len(rows):
            bad.append(f"{path.relative_to(run.path)}, line {number}")
    return lines, bad


def _counts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_number, value.values()))


def _complete(run: RunFolder, attempt: int) -> list[tuple[int, Path]]:
    return complete_checkpoints(run.output(attempt))


def _checkpoint(run: RunFolder, attempt: int, step: int, path: Path) -> CheckpointRecord:
    held: Mapping[int, int] = {}
    with contextlib.suppress(ValueError, OSError, KeyError):
        if (path / REMAINDER_FILE).is_file():
            with np.load(path / REMAINDER_FILE, allow_pickle=False) as arrays:
                held = Counter(int(sample["number"]) for sample in json.loads(arrays["scalars"].tobytes()))
    return CheckpointRecord(attempt, step, str(path.relative_to(run.path)), _object(path / STATE_FILE), held)


def _exits(run: RunFolder, attempt: int) -> list[dict[str, Any]]:
    records = [_object(path, "time", "left") for path in (run.path / "exit").glob("*.json")]
    return sorted((r for r in records if r.get("attempt") == attempt), key=lambda r: float(r.get("time", 0)))


def _left(run: RunFolder, attempt: int) -> int | None:
    return max((int(r["left"]) for r in _exits(run, attempt) if r.get("left") is not None), default=None)


def _fault(fault: Mapping[str, Any]) -> str:
    nodes = fault.get("nodes") or []
    where = f" on {', '.join(map(str, nodes))}" if nodes else ""
    at = f" at step {fault['step']}" if fault.get("step") is not None else ""
    action = f" → {fault['action']}" if fault.get("action") else ""
    kind, reason = str(fault.get("kind") or ""), str(fault.get("reason") or "")
    what = reason if kind in reason else f"{kind}: {reason}".strip(": ")
    return f"{fault.get('role', 'run')}{where}{at}: {what}{action}"


def _ending(attempt: int, faults: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The fault that ended an attempt: the last one of its learner."""
    own = [fault for fault in faults if fault.get("attempt") == attempt]
    of_learner = [fault for fault in own if fault.get("role") != "server"]
    return (of_learner or own)[-1] if own else None


def _recovered(run: RunFolder, attempt: int, faults: list[dict[str, Any]]) -> list[str]:
    """What the attempt went on from; the fault that ended it is told with the next one."""
    last = attempt == run.attempts()[-1]
    ending = None if last else _ending(attempt, faults)
    return [_fault(fault) for fault in faults if fault.get("attempt") == attempt and fault is not ending]


def _ended(run: RunFolder, attempt: int, faults: list[dict[str, Any]], resumed: set[int]) -> str:
    """What ended an attempt, by the best record there is: a person, a fault, how its jobs ended, the outcome, an event."""
    by_person = "resumed by a person after: " if attempt + 1 in resumed else ""
    return by_person + _cause(run, attempt, faults)


def _cause(run: RunFolder, attempt: int, faults: list[dict[str, Any]]) -> str:
    if own := _ending(attempt, faults):
        return _fault(own)
    if cancel := _object(run.path / f"cancel-{attempt}.json"):
        return f"stopped by {cancel.get('who', 'somebody')}: {cancel.get('why', 'no reason given')}"
    exits = _exits(run, attempt)
    broken = [r for r in exits if r.get("returncode") != 0] or [r for r in exits if r.get("left") is not None]
    if broken:
        return f"{broken[0].get('role', 'a job')}: {broken[0].get('reason', '')}"
    for name in (f"outcome-{attempt}.json", "outcome.json"):
        outcome = _object(run.path / name)
        if outcome.get("attempt") == attempt:
            return str(outcome.get("reason", ""))
    events = read_jsonl(run.records(attempt) / "supervisor.jsonl")
    return str(events[-1].get("event", "")) if events else "it left no record of its end"
