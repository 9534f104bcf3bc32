"""One pass of reconciliation: run folders, SLURM and Prefect are made to agree.

Level-triggered: nothing is remembered of what was done, each pass looks at everything again. Light: prefect is not
imported, since this runs every minute.
"""

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flows.cli.plain import HOME
from flows.masking import mask_of
from flows.names import instance_tag
from flows.prefect_api import configured_api
from flows.prefect_rest import WORKS, FlowRun, PrefectAway, PrefectRest
from flows.up.state import UpError, auth_string, running
from slipstream.instance import home, instance_id, known_roots, unusable
from slipstream.run_folder import DamagedFile, RunFolder, read_object
from tasks.origin import original_of
from tasks.reconcile import Look, Memory, do, is_ours, look, note_lead, runs_in
from tasks.reconcile_policy import TRUTH, Act, FlowState, Plan, nothing, reconcile, without_folder
from tasks.stored import started_in
from tasks.sweep_folder import TAG as SWEEP_TAG
from tasks.sweep_folder import is_sweep

MAX_ACTS = 4  # one after the other, for one run in one pass
MAX_STARTS = 3  # of a flow run that never comes to a run folder
RECENT_S = 86400.0  # flow runs that were started longer ago and have no folder belong to runs that were removed
NAMES = {"COMPLETED": "Completed", "FAILED": "Failed", "CANCELLED": "Cancelled", "RUNNING": "Running"}
NAMES["SCHEDULED"] = AGAIN = "AwaitingRetry"
MESSAGE = 2000  # characters of a reason that go to Prefect
PASS_S = 900.0  # no pass takes so long: systemd ends one after ten minutes
PREFECT = "Prefect"


@dataclass(frozen=True)
class Row:
    """What a pass found of a run (or of Prefect), and what it did.

    Attributes:
        problem: why that could not be done; "".
        person: only a person can help.
    """

    run: str
    act: str
    why: str
    path: str = ""
    state: str = ""
    problem: str = ""
    person: bool = False

    def record(self) -> dict[str, Any]:
        return asdict(self)


def prefect_here() -> PrefectRest | None:
    """The Prefect server of this instance: the configured one, or that of `slipstream up` on this host; None: neither."""
    given = os.environ.get("PREFECT_API_URL")
    up = None
    with contextlib.suppress(DamagedFile, UpError, OSError):
        up = running()  # after its end anybody may listen at its address
    if up is not None and up.host != socket.gethostname():
        up = None  # it listens on that host alone
    url = given or (up.url if up is not None else None) or configured_api()
    if not url:
        return None
    if up is not None and url == up.url and not os.environ.get("PREFECT_API_AUTH_STRING"):
        with contextlib.suppress(UpError, OSError):
            return PrefectRest(url, auth_string())
    return PrefectRest.here(url)


def reconcile_all(roots: Sequence[Path] | None = None, dry_run: bool = False) -> list[Row]:
    """One pass over the runs of this instance.

    Args:
        roots: storage roots; None: all that this instance has used.
        dry_run: only say what would be done.

    Never raises for a run or a server that does not answer: that is a row.
    """
    with _alone() as alone:
        if not alone:
            return [Row("", Act.NOTHING, "another reconciliation works on this host")]
        rest = prefect_here()
        memory = Memory()
        try:
            return Pass(rest, memory, dry_run).all(roots)
        finally:
            if not dry_run:
                memory.save()
            if rest is not None:
                rest.close()


@contextlib.contextmanager
def _alone() -> Iterator[bool]:
    """Whether no other pass works on this host. Two on two hosts are harmless: see `tasks.lease.begin_after`."""
    folder = home() / "reconcile"
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            file = stack.enter_context(open(folder / f"{socket.gethostname()}.lock", "w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a full home, or a file system without locks: no run is to wait for that
            pass
        yield True


class Pass:
    """One pass. `rest`: None where there is no Prefect."""

    def __init__(self, rest: PrefectRest | None, memory: Memory, dry_run: bool = False) -> None:
        self._rest = rest
        self._memory = memory
        self._dry = dry_run
        self._flows: dict[str, FlowRun] = {}
        self._away = (
            "" if rest else "there is no Prefect server: none is configured, and `slipstream up` does not run here"
        )

    def all(self, roots: Sequence[Path] | None) -> list[Row]:
        rows: list[Row] = []
        open_runs: dict[Path, str] = {}  # with their flow runs
        settled: dict[str, RunFolder] = {}  # by their flow runs
        there, missing = known_roots() if roots is None else _given(roots)
        rows += [Row("", Act.NOTHING, text, problem="" if roots is None else text, person=True) for text in missing]
        for run in [run for root in there for run in _in_root(root, rows)]:
            try:
                if (flow_run := self._memory.done(run)) is not None:
                    settled[flow_run] = run
                elif is_ours(run) and (original := original_of(run)) is not None:
                    rows.append(Row(run.run_id, Act.NOTHING, f"it is a copy of {original}", str(run.path)))
                elif is_ours(run):
                    open_runs[run.path] = str(read_object(run.path / "origin.json").get("flow_run") or "")
            except (OSError, DamagedFile) as error:
                rows.append(_problem(run, error))
        self._ask(open_runs.values())
        if self._away:
            rows.append(Row(PREFECT, Act.NOTHING, self._away))
        asked: list[RunFolder] = []
        for run in map(RunFolder, open_runs):
            found = self._one(run)
            rows += found
            if any(row.act is Act.ASK_CELLS for row in found):
                asked.append(run)
        for run in [] if self._dry else asked:  # their cells may have ended in this pass
            rows += [row for row in self._one(run) if row.act is not Act.NOTHING or row.problem]
        return rows + ([] if roots is not None else self._started(set(open_runs.values()), settled, missing))

    def _ask(self, flow_runs: Iterable[str]) -> None:
        """What Prefect says of all of them, at once."""
        if self._rest is None:
            return
        try:
            self._flows = self._rest.flow_runs(filter(None, flow_runs))
        except PrefectAway as error:
            self._away = str(error)

    def _look(self, run: RunFolder) -> tuple[Look, FlowRun | None]:
        flow = self._flows.get(str(read_object(run.path / "origin.json").get("flow_run") or ""))
        found = look(run, self._memory, [flow.state, flow.at] if flow else None)
        state = _state_of(flow) if flow else None
        return replace(found, facts=replace(found.facts, answers=not self._away, flow=state)), flow

    def _one(self, run: RunFolder) -> list[Row]:
        try:
            rows = self._acts(run)
        except Exception as error:  # the other runs are not to wait for this one
            return [_problem(run, error)]
        if not self._dry and any(_ends(row) for row in rows):
            self._show_end(run)
        return rows

    def _show_end(self, run: RunFolder) -> None:
        """The page of a run whose flow is gone, as its flow would have left it. Best effort."""
        with contextlib.suppress(OSError, DamagedFile):
            flow = self._flows.get(str(read_object(run.path / "origin.json").get("flow_run") or ""))
            if flow is not None and self._rest is not None and not self._away:
                from flows.page.rest import show_end  # takes longer to import than a pass without events

                show_end(self._rest, run, flow)

    def _acts(self, run: RunFolder) -> list[Row]:
        rows: list[Row] = []
        mask = mask_of(run)  # what is set in Prefect, logged there and written
        for _ in range(MAX_ACTS):
            found, flow = self._look(run)
            plan = reconcile(found.facts)
            plan = replace(plan, why=mask(plan.why))
            row = Row(run.run_id, plan.act, plan.why, str(run.path), plan.state, person=plan.person)
            if plan.act is Act.NOTHING:
                if plan.settled:
                    self._memory.settle(run, found.facts.flow_run)
                return rows or [row]
            if self._dry:
                return [*rows, row]
            problem = self._act(found, plan, flow)
            rows.append(replace(row, problem=problem))
            if problem or plan.act in (Act.LEAD_BY_FLOW, Act.LEAD_HERE):
                return rows
        return rows

    def _act(self, found: Look, plan: Plan, flow: FlowRun | None) -> str:
        """Do it; returns what kept it from being done, or ""."""
        try:
            if plan.act is Act.LEAD_HERE:
                note_lead(found)
                supervise_detached(found.run)
            elif plan.act is Act.LEAD_BY_FLOW and flow is not None:
                note_lead(found, flow.id, flow.run_count)
                return self._set(flow, "SCHEDULED", AGAIN, plan.why)
            elif plan.act is Act.SET_STATE and flow is not None:
                return self._set(flow, plan.state, NAMES[plan.state], plan.why[:MESSAGE])
            elif not do(found, plan):
                return "somebody leads it meanwhile"
        except OSError as error:
            return str(error)
        return ""

    def _set(self, flow: FlowRun, state: str, name: str, message: str) -> str:
        assert self._rest is not None
        try:
            done = self._rest.set_state(flow, state, name, message)
            self._flows |= self._rest.flow_runs([flow.id])
        except PrefectAway as error:
            return str(error)
        return "" if done else "it was cancelled in Prefect meanwhile"

    def _started(self, known: set[str], settled: Mapping[str, RunFolder], missing: Sequence[str]) -> list[Row]:
        """Flow runs of this instance that were started though their run is settled, by a person; and those that died
        before they had a run folder.

        Args:
            known: flow runs that were looked at. settled: runs that were not, by their flow runs.
            missing: storage roots that cannot be looked into: what is without a folder may have one there.
        """
        if self._rest is None or self._away:
            return []
        rows = []
        tag = instance_tag(instance_id())
        try:
            for flow in self._rest.starting(tag, ("reconcile",), WORKS):
                if time.time() - flow.at > PASS_S:
                    why = "a pass of reconciliation whose process died: it would keep others from starting"
                    problem = "" if self._dry else self._set(flow, "CANCELLED", NAMES["CANCELLED"], why)
                    rows.append(Row(f"flow run {flow.id}", Act.SET_STATE, why, state="CANCELLED", problem=problem))
            for flow in self._rest.starting(tag, ("train", "sweep")):
                # a crashed cell is started again by its sweep
                of_a_sweep = flow.state == "CRASHED" and any(tag.startswith(f"{SWEEP_TAG}:") for tag in flow.tags)
                if flow.id in settled:
                    self._flows[flow.id] = flow
                    rows += self._one(settled[flow.id])
                elif not (flow.id in known or of_a_sweep or time.time() - flow.at > RECENT_S):
                    rows.append(self._without_folder(flow, missing))
        except PrefectAway as error:
            rows.append(Row(PREFECT, Act.NOTHING, str(error)))
        return rows

    def _without_folder(self, flow: FlowRun, missing: Sequence[str]) -> Row:
        seen_s, _ = self._memory.seen(f"flow {flow.id}", [flow.state, flow.at])
        plan = without_folder(_state_of(flow), seen_s, flow.run_count, MAX_STARTS)
        if plan.act is not Act.NOTHING and missing:
            why = f"{plan.why}, but its folder may be where nobody can look: {'; '.join(missing)}"
            plan = nothing(why, person=True)
        again = plan.act is not Act.NOTHING and not self._dry
        problem = self._set(flow, "SCHEDULED", AGAIN, plan.why) if again else ""
        return Row(f"flow run {flow.id}", plan.act, plan.why, problem=problem, person=plan.person)


def _given(roots: Sequence[Path]) -> tuple[list[Path], list[str]]:
    why = {root: unusable(root.absolute()) for root in roots}
    return [root for root in roots if not why[root]], [f"--root {text}" for text in why.values() if text]


def _in_root(root: Path, rows: list[Row]) -> list[RunFolder]:
    """The runs in a storage root; where it does not answer, a row."""
    try:
        return runs_in([root])
    except OSError as error:
        rows.append(Row("", Act.NOTHING, f"{root} could not be looked at", str(root), problem=str(error)))
        return []


def _state_of(flow: FlowRun) -> FlowState:
    return FlowState(flow.state, flow.at, abs(time.time() - flow.at), bool(flow.deployment), flow.cancelled)


def _ends(row: Row) -> bool:
    """Whether it ended the run, or told Prefect its end."""
    told = row.act is Act.SET_STATE and row.state in TRUTH.values()
    return not row.problem and (told or row.act in (Act.CANCEL, Act.FAIL))


def _problem(run: RunFolder, error: Exception) -> Row:
    return Row(run.run_id, Act.NOTHING, "it could not be looked at", str(run.path), problem=f"{error}")


def supervise_detached(run: RunFolder) -> int:
    """Start `slipstream supervise RUN` in a session of its own, its words in logs/supervise.log. Returns its process id.

    Of a sweep it is `slipstream sweep FOLDER`, which leads cells by commands of this host. Raises OSError.
    """
    folder = started_in(run)
    what = ["sweep", str(run.path), "--unattended"] if is_sweep(run) else ["supervise", str(run.path)]
    words = [sys.executable, "-c", "from flows.cli.main import main; main()", *what]
    paths = os.pathsep.join(filter(None, (str(HOME), os.environ.get("PYTHONPATH"))))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    run.logs.mkdir(mode=0o700, exist_ok=True)
    with open(run.logs / "supervise.log", "ab") as log:
        child = subprocess.Popen(
            words,
            cwd=folder if folder.is_dir() else HOME,
            env={**environment, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return child.pid
