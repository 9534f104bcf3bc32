"""Runs and sweeps as reconciliation sees them: folder, jobs and cells, and what is done to those.

Prefect's part is in `flows.reconciliation`.
"""

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.backend import Backend
from cluster.decide import Kind
from cluster.intents import intent_file
from cluster.jobs import JobRecord, JobState, JobView
from cluster.profile import ClusterError, load_profile
from slipstream.config_file import ConfigError
from slipstream.instance import home, instance_id
from slipstream.run_config import RecoverySection
from slipstream.run_folder import DamagedFile, RunFolder, read_object, write_json
from tasks.finish import finish
from tasks.leads import in_a_row, lead_now, read_leads, record_lead, resumed_at
from tasks.lease import begin_after, sight
from tasks.observe import cancel_request, newest_attempt
from tasks.origin import Origin, origin_file, read_origin
from tasks.outcome import Outcome, read_outcome, write_outcome
from tasks.reconcile_policy import Act, Facts, Leader, Plan, cancel_is_new
from tasks.records import log_event, run_step
from tasks.stop import request_cancel, stop_jobs
from tasks.stored import all_jobs, backend_anyway, stored_config
from tasks.stored import origin as in_its_folder
from tasks.sweep_cells import requester
from tasks.sweep_folder import SweepFolder, is_sweep
from tasks.sweep_parent import ask_cells, open_cells, progress, sweep_cancelled, unasked

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Memory:
    """What earlier passes on this host have seen, and when, by this host's monotonic clock.

    That clock is the same for all processes, stands still while the machine sleeps, and starts anew with each boot,
    which makes what was seen before void.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = (folder or home() / "reconcile") / f"{socket.gethostname()}.json"
        stored: dict[str, Any] = {}
        with contextlib.suppress(DamagedFile, OSError):
            stored = read_object(self._file)
        boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
        same = stored.get("boot") == boot
        self._boot = boot
        self._before: dict[str, Any] = stored.get("seen", {}) if same else {}
        self._seen: dict[str, Any] = {}
        self._done: dict[str, Any] = stored.get("done", {})

    def seen(self, key: str, value: Any) -> tuple[float, bool]:
        """(seconds since `key` was first seen to have `value`, whether it was seen to change)."""
        now = time.monotonic()
        before = self._seen.get(key) or self._before.get(key)
        if before is None or before["value"] != value:
            before = {"value": value, "since": now, "moved": before is not None}
        self._seen[key] = before
        return now - before["since"], bool(before["moved"])

    def done(self, run: RunFolder) -> str | None:
        """The flow run ("" where there is none) of a run that was settled, and has not been touched since; else None."""
        known = self._done.get(str(run.path))
        return str(known[1]) if known and known[0] == _stamp(run) else None

    def settle(self, run: RunFolder, flow_run: str) -> None:
        if stamp := _stamp(run):
            self._done[str(run.path)] = [stamp, flow_run]

    def save(self) -> None:
        """Only what was seen in this pass is kept. A home that takes no writes makes each pass the first."""
        self._done = {path: value for path, value in self._done.items() if Path(path).exists()}
        with contextlib.suppress(OSError):
            write_json(self._file, {"boot": self._boot, "seen": self._seen, "done": self._done})


def _stamp(run: RunFolder) -> int:
    try:
        return (run.path / "outcome.json").stat().st_mtime_ns
    except OSError:
        return 0


@dataclass(frozen=True)
class Look:
    """A run or a sweep of this instance, as it stands. `facts` lacks what Prefect says; `sweep`: id of a cell's sweep."""

    run: RunFolder
    facts: Facts
    term: int = 0
    lease_s: float = 60.0
    step: int = 0
    sweep: str = ""
    queued: bool = False


def runs_in(roots: Sequence[Path]) -> list[RunFolder]:
    """All runs in the storage roots that say where they come from."""
    return [RunFolder(path.parent) for root in roots for path in sorted(root.glob("*/origin.json"))]


def is_ours(run: RunFolder) -> bool:
    """Whether the run is of this instance and this user. Raises OSError, DamagedFile."""
    return read_origin(run).instance == instance_id() and origin_file(run).stat().st_uid == os.getuid()


def look(run: RunFolder, memory: Memory, flow_state: Any = None) -> Look:
    """The run as it stands; `flow_state`: what Prefect says of it, to judge how long that has been so.

    Raises OSError and DamagedFile where its storage does not answer.
    """
    sweep = SweepFolder(run.path) if is_sweep(run) else None
    recovery = _recovery(run, sweep)
    leader, who, term = _leader(run, recovery.lease, memory)
    ended, origin = read_outcome(run), read_origin(run)
    seen_s, _ = memory.seen(f"run {run.path}", [str(leader), term, flow_state])
    step = progress(sweep) if sweep else run_step(run)
    since, leads = resumed_at(run), read_leads(run)
    facts = Facts(
        flow_run=origin.flow_run,
        prepared=sweep is not None or run.run_file.exists(),
        outcome=ended.kind if ended else None,
        reason=ended.reason if ended else "",
        age_s=_age_s(run),
        leader=leader,
        who=who,
        cancel=cancel_request(run),
        sweep="" if ended else sweep_cancelled(run, origin.sweep),
        resumed_at=since,
        leads=in_a_row(leads, step, since),
        lead_age_s=abs(time.time() - leads[-1].time) if leads else Facts.lead_age_s,
        max_leads=recovery.max_restarts,
        seen_s=seen_s,
    )
    found = Look(run, facts, term, recovery.lease, step, origin.sweep)
    if leader in (Leader.LIVES, Leader.UNSURE):
        return found
    return _with_cells(found, sweep, origin) if sweep else _with_jobs(found, origin.host)


def _recovery(run: RunFolder, sweep: SweepFolder | None) -> RecoverySection:
    """What its configuration says; of a sweep, which is driven with the defaults, only the bound on leaders."""
    with contextlib.suppress(ConfigError):
        if sweep is not None:
            return RecoverySection(max_restarts=sweep.base().recovery.max_restarts)
        if run.run_file.exists():
            return stored_config(run).recovery
    return RecoverySection()


def _age_s(run: RunFolder) -> float:
    when = read_object(run.path / "outcome.json", "time").get("time")
    return abs(time.time() - when) if isinstance(when, int | float) else 0.0


def _leader(run: RunFolder, lease_s: float, memory: Memory) -> tuple[Leader, str, int]:
    """(who leads the run, in words, the term that was judged)."""
    found = sight(run)
    silent_s, moved = memory.seen(f"lease {run.path}", [found.term, found.counter])
    if found.term == 0 or found.gone or (silent_s > lease_s and not found.released):
        return Leader.NONE, "", found.term
    if found.released:
        return Leader.RELEASED, "", found.term
    lives = moved or found.host == socket.gethostname()
    return (Leader.LIVES if lives else Leader.UNSURE), found.who, found.term


def _with_jobs(found: Look, made_on: str) -> Look:
    """What is known of its jobs; of a run that has ended also of those that its records have lost."""
    run, backend = found.run, backend_anyway(found.run)
    if found.facts.outcome is not None:
        with contextlib.suppress(ClusterError):
            backend.adopt(run)
    jobs = all_jobs(run)
    views = backend.look(run, jobs)
    live = [job for job in jobs if job.incarnation in views and not views[job.incarnation].state.ended]
    states = [views[job.incarnation].state for job in live]
    here = socket.gethostname()
    elsewhere = next((job.host for job in live if job.executor == "local" and job.host != here), "")
    if not elsewhere and found.facts.outcome is None and _is_local(backend) and made_on not in ("", here) and not jobs:
        elsewhere = made_on
    facts = replace(
        found.facts,
        live=tuple(f"{job.role} (job {job.job_id})" for job in live),
        jobs_known=JobState.UNKNOWN not in states,
        elsewhere=elsewhere,
        batch=any(_leads_itself(run, job, views[job.incarnation]) for job in live),
    )
    return replace(found, facts=facts, queued=bool(states) and set(states) <= {JobState.PENDING, JobState.HELD})


def _with_cells(found: Look, sweep: SweepFolder, origin: Origin) -> Look:
    """What is known of the cells of a sweep that has not ended. Cells that a person has continued since are theirs."""
    if found.facts.outcome is not None:
        return found
    cells = open_cells(sweep)
    elsewhere = ""
    if not origin.flow_run and origin.host not in ("", socket.gethostname()) and _cells_are_local(sweep):
        elsewhere = origin.host
    facts = replace(found.facts, cells=tuple(cells), unasked=tuple(unasked(sweep, cells)), elsewhere=elsewhere)
    return replace(found, facts=facts)


def _cells_are_local(sweep: SweepFolder) -> bool:
    with contextlib.suppress(ConfigError, ClusterError, DamagedFile, OSError), in_its_folder(sweep.as_run):
        return load_profile(sweep.base().cluster.profile).executor == "local"
    return True


def _is_local(backend: Backend) -> bool:
    from cluster.local_backend import LocalBackend

    return isinstance(backend, LocalBackend)


def _leads_itself(run: RunFolder, job: JobRecord, view: JobView) -> bool:
    """Whether it is a job of `slurm/train.sbatch`, which nobody submitted with an intent."""
    known = view.state is not JobState.UNKNOWN
    return known and job.role == "allocation" and not intent_file(run, job.role, job.attempt, job.incarnation).exists()


def note_lead(found: Look, flow_run: str = "", run_count: int = 0) -> None:
    """On storage, before anybody is asked to lead. Raises OSError."""
    record_lead(found.run, lead_now(found.step, found.queued, flow_run, run_count))
    asked = f"flow run {flow_run} is to start again" if flow_run else "a supervisor is started"
    log_event(found.run, newest_attempt(found.run), f"nobody leads the run: {asked}")


def do(found: Look, plan: Plan) -> bool:
    """Carry out what concerns folder and jobs; False where somebody has begun to lead the run meanwhile.

    Raises OSError.
    """
    run = found.run
    if plan.act is Act.ASK_TO_STOP:
        _request(found, plan)
        return True
    lease = begin_after(run, found.term, found.lease_s)
    if lease is None:
        return False
    try:
        if plan.act in (Act.CANCEL, Act.ASK_CELLS):
            _request(found, plan)
        if is_sweep(run):
            ask_cells(SweepFolder(run.path), cancel_request(run) or plan.why)
        else:
            stop_jobs(run)
        if plan.act in (Act.CANCEL, Act.FAIL) and read_outcome(run) is None:
            kind = Kind.FAIL if plan.act is Act.FAIL else Kind.CANCELLED
            reason = plan.why if kind is Kind.FAIL else cancel_request(run) or plan.why
            write_outcome(run, Outcome(kind, reason), newest_attempt(run))
            log_event(run, newest_attempt(run), f"{kind}: {reason}")
            with contextlib.suppress(Exception):
                finish(run)
    finally:
        lease.release()
    return True


def _request(found: Look, plan: Plan) -> None:
    """Record who asks: the sweep where only that was cancelled, so that it continues the cell when it goes on."""
    if found.facts.sweep and not cancel_is_new(found.facts):
        sweep = SweepFolder(found.run.path.parent / found.sweep)
        request_cancel(found.run, requester(sweep), found.facts.sweep)
    else:
        request_cancel(found.run, "Prefect", plan.why)
