"""Who was asked to lead a run that had no leader: `records/leads.jsonl`, written before it is asked."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from slipstream.run_folder import RunFolder, append_jsonl, read_jsonl
from tasks.records import FAULTS

LEADS = "leads.jsonl"


@dataclass(frozen=True)
class Lead:
    """One request.

    Attributes:
        time: seconds since the epoch.
        step: optimizer steps that the run had done.
        flow_run: the flow run that was asked to start again; "": a supervisor of its own.
        run_count: how often that flow run had been started before.
        queued: the run waited for its jobs to start, so that no leader could have brought it further.
    """

    time: float
    step: int = 0
    flow_run: str = ""
    run_count: int = 0
    queued: bool = False


def record_lead(run: RunFolder, lead: Lead) -> None:
    """Raises OSError."""
    append_jsonl(run.path / "records" / LEADS, asdict(lead))


def read_leads(run: RunFolder) -> list[Lead]:
    """Oldest first; what is damaged is left out. Raises OSError."""
    names = {field.name for field in fields(Lead)}
    found = []
    for line in read_jsonl(run.path / "records" / LEADS):
        with contextlib.suppress(TypeError, ValueError):
            lead = Lead(**{key: value for key, value in line.items() if key in names})
            found.append(
                Lead(float(lead.time), int(lead.step), str(lead.flow_run), int(lead.run_count), bool(lead.queued))
            )
    return found


def in_a_row(leads: Sequence[Lead], step: int, since: float) -> int:
    """How many led to no new step: those at `step` or beyond, after `since` (a person's resume), not of a queued run."""
    count = 0
    for lead in reversed(leads):
        if lead.step < step or lead.time <= since:
            break
        count += not lead.queued
    return count


def resumed_at(run: RunFolder) -> float:
    """When a person last resumed the run, in seconds since the epoch; 0.0: never."""
    times = [line.get("time") for line in read_jsonl(run.path / "records" / FAULTS) if line.get("kind") == "resumed"]
    return float(times[-1]) if times and isinstance(times[-1], int | float) else 0.0


def asked_for(run: RunFolder, flow_run: str, run_count: int | None) -> bool:
    """Whether start number `run_count` of the flow run is the newest that was asked for here; None: not known.

    A person who starts it once more has another number.
    """
    own = [lead for lead in read_leads(run) if lead.flow_run == flow_run]
    return bool(own) and (run_count is None or own[-1].run_count + 1 >= run_count)


def lead_now(step: int, queued: bool, flow_run: str = "", run_count: int = 0) -> Lead:
    return Lead(time.time(), step, flow_run, run_count, queued)
