"""The flow of a sweep: it only starts, watches and stops cells, each of which is a flow run of its own.

It runs in a pool of its own, so that it never holds a place that its cells need. The sweep's folder, not Prefect,
remembers it: a start of the same flow run finds the folder and goes on.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Completed, Failed, State
from pydantic import Field

from flows.deployed import asked_prefect
from flows.page.sweep import SweepPage
from flows.predecessor import skipped
from flows.refused import show_refusal
from flows.sweep_cells import PrefectCells
from flows.sweep_form import SweepForm, form_of, spec_of
from slipstream.config_file import ConfigError
from slipstream.instance import instance_id, known_roots
from slipstream.run_folder import RunFolderError, new_run_id
from slipstream.sweep.schedule import Plan
from slipstream.sweep.spec import load_sweep
from tasks.leads import asked_for
from tasks.outcome import NothingToResume
from tasks.stop import request_cancel
from tasks.sweep import Look, SweepStopped, drive
from tasks.sweep_folder import SweepFolder
from tasks.sweep_prepare import Resolved, check_all, create, presets_in, resolve

POLL_S = 5.0
ASK_S = 15.0  # between two looks at whether a person has cancelled the flow run
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# the worker or the host stops: the cells do not end with them
LEAVES = (TerminationSignal, KeyboardInterrupt, SystemExit)
SETTINGS = Field(title="Sweep", description="What varies, over which runs, and how far it may go.")


def parameters_of(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The flow's parameters for a sweep file, checked as `slipstream sweep` checks it. Raises ConfigError."""
    spec = load_sweep(path)
    resolved = resolve(spec, path.parent, presets_in(EXAMPLES), overrides)
    check_all(resolved)
    base = path.parent / Path(spec.base).expanduser()
    named = resolved.sweep.model_copy(
        update={
            "base": str(base.absolute()) if base.exists() else spec.base,
            "set": {**resolved.sweep.set, **given(resolved.base, overrides)},
        }
    )
    return {"settings": form_of(named).model_dump(mode="json")}


def given(base: Any, overrides: Sequence[str]) -> dict[str, Any]:
    """What overrides have set, by key, as the base has it now; '' where a key was put back to its default."""
    values: dict[str, Any] = {}
    for text in overrides:
        key, _, raw = text.partition("=")
        value = base
        for part in key.strip().split("."):
            value = getattr(value, part)
        values[key.strip()] = value if raw.strip() and value is not None else ""
    return values


@dataclass(frozen=True)
class Start:
    """One start of the flow run."""

    flow_run: str
    deployment: str

    def sweep_id(self, name: str) -> str:
        """A function of the flow run: each of its starts finds the same folder."""
        return f"{name}-{self.flow_run.replace('-', '')[-12:]}" if self.deployment else new_run_id(name)


def _flow_run_name() -> str:
    settings = flow_run.parameters.get("settings")
    name = settings.get("name") if isinstance(settings, dict) else getattr(settings, "name", None)
    return Start(str(flow_run.id), str(deployment.id or "")).sweep_id(str(name or "sweep"))


@flow(name="sweep", flow_run_name=_flow_run_name, persist_result=False)
def sweep(settings: Annotated[SweepForm, SETTINGS]) -> Any:
    """Run one configuration with other values: every cell is a run of its own, which can be cancelled and retried alone.

    Args:
        settings: what varies, over which runs, and how far it may go.

    Returns the state that says how it ended; the page has the table and the pictures.
    """
    start = Start(str(flow_run.id), str(deployment.id or ""))
    try:
        folder, new = _begun(settings.name, start), False
        if folder is None:  # else its base may have changed since
            resolved = resolve(spec_of(settings), Path.cwd(), presets_in(EXAMPLES))
            folder = SweepFolder(resolved.root / start.sweep_id(settings.name))
            new = not folder.sweep_file.is_file()
            if new and (state := skipped(resolved.root, folder.sweep_id)) is not None:
                return state
            if new:
                _make(folder, resolved, start)
        if (state := _ended_meanwhile(folder, start)) is not None:
            return state
        by_person = new or bool(folder.outcome())
    except (ConfigError, RunFolderError) as error:
        get_run_logger().error("refused: %s", error)
        show_refusal(error)
        return Failed(message=str(error))
    get_run_logger().info("sweep folder %s", folder.path)
    page = SweepPage(folder, start.flow_run)
    cells = PrefectCells(folder, instance_id(), start.flow_run)
    watch = _Watch(folder, page, start)
    try:
        look = drive(folder, cells, tell=watch, poll_s=POLL_S, by_person=by_person, leave=watch.leaves)
    except SweepStopped as error:
        return Cancelled(message=f"the cells were stopped: {error}")
    except NothingToResume as error:
        return Failed(message=str(error))
    outcome = folder.outcome()
    page.show(look)
    page.finished(look, outcome)
    finished = sum(result.state == "finished" for result in look.results)
    text = f"{finished} of {len(look.results)} cells have finished: {outcome.get('reason')}; {folder.report_file}"
    return Failed(message=text) if outcome.get("kind") == "fail" else Completed(message=text)


def _ended_meanwhile(folder: SweepFolder, start: Start) -> State[None] | None:
    """The state of a sweep that has ended since reconciliation asked for this start; None: there is something to do."""
    if not (outcome := folder.outcome()):
        return None
    known = asked_prefect(start.flow_run)
    if not asked_for(folder.as_run, start.flow_run, known.run_count if known else None):
        return None
    states = {"finish": Completed, "fail": Failed, "cancelled": Cancelled}
    return states[str(outcome["kind"])](message=str(outcome.get("reason")))


def _begun(name: str, start: Start) -> SweepFolder | None:
    """The folder that an earlier start of this flow run has made; None: this is the first. Raises DamagedFile."""
    for root in known_roots()[0] if start.deployment else []:
        folder = SweepFolder(root / start.sweep_id(name))
        if folder.sweep_file.is_file() and folder.flow_run == start.flow_run:
            return folder
    return None


def _make(folder: SweepFolder, resolved: Resolved, start: Start) -> None:
    """Check the cells, and make the sweep's folder. Raises ConfigError, RunFolderError."""
    for warning in check_all(resolved):
        get_run_logger().warning("%s", warning)
    create(resolved, folder.sweep_id, start.flow_run, start.deployment)


class _Watch:
    """Called at each look: logs, the page, and whether a person has cancelled the flow run although no signal came."""

    def __init__(self, folder: SweepFolder, page: SweepPage, start: Start) -> None:
        self._folder, self._page, self._start = folder, page, start
        self._said = ""
        self._asked = time.monotonic()

    def __call__(self, look: Look, plan: Plan) -> None:
        if plan.reason != self._said:
            self._said = plan.reason
            get_run_logger().info(plan.reason)
        self._page.show(look)
        if time.monotonic() - self._asked >= ASK_S:
            self._asked = time.monotonic()
            if self.cancelled():
                request_cancel(self._folder.as_run, "Prefect", "its flow run was cancelled")

    def cancelled(self) -> bool:
        """Whether Prefect says so; where it does not answer nobody has."""
        try:
            with get_client(sync_client=True) as client:
                state = client.read_flow_run(self._start.flow_run).state  # type: ignore[arg-type]
        except Exception:
            return False
        return state is not None and (state.is_cancelled() or state.is_cancelling())

    def leaves(self, error: BaseException) -> bool:
        """Whether only this process has to go, and the cells go on."""
        under_worker = bool(self._start.deployment)
        return (
            under_worker and isinstance(error, LEAVES) and not (self._folder.cancel_file.exists() or self.cancelled())
        )
