"""A run that a worker starts: from a form, a schedule, a sweep; or again, after its worker, host or flow died.

What is on storage decides what a start does. The flow run's own process is only the run's leader: where it ends for a
reason that is not the run's, the jobs go on, and `slipstream reconcile` has the same flow run started again.
"""

import contextlib
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment, flow_run
from prefect.settings import get_current_settings
from prefect.states import Cancelled, Failed

from cluster.decide import Kind
from cluster.profile import ClusterError
from flows import steps
from flows.cli.plain import storage_text
from flows.masking import mask_of
from flows.page.run import showing
from flows.predecessor import skipped
from flows.prefect_rest import CANCELS, FlowRun, PrefectAway, PrefectRest
from flows.refused import show_refusal
from slipstream.config_file import ConfigError, Problem
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, RunFolderError, check_run_id
from tasks import finish as finishing
from tasks import lease as leasing
from tasks import stop as stopping
from tasks.interrupt import uninterrupted
from tasks.leads import asked_for
from tasks.observe import newest_attempt
from tasks.origin import Origin, begun_by, origin_here, read_origin, write_origin
from tasks.outcome import NothingToResume, RunCancelled, RunFailed, read_outcome
from tasks.records import log_event, read_faults
from tasks.stored import all_jobs
from tasks.sweep_parent import sweep_cancelled

ASK_S = 5.0  # of the few seconds that Prefect gives a flow run to end
LOOK_S = 1.0
SWEEP_TAG = "slipstream.sweep:"
# The worker or the host stops, or the flow lost its worker: the run does not end with them.
LEAVES = (TerminationSignal, KeyboardInterrupt, SystemExit)


@dataclass(frozen=True)
class Start:
    """One start of a flow run by a worker. `sweep`: id of the sweep that it is a cell of, or ""."""

    flow_run: str
    deployment: str
    sweep: str = ""

    def run_id(self, name: str) -> str:
        """A function of the flow run: each of its starts finds the same folder."""
        return f"{name}-{self.flow_run.replace('-', '')[-12:]}"  # its end: of many, the beginning is the time (UUID 7)

    def origin(self) -> Origin:
        return origin_here(self.flow_run, self.deployment, self.sweep)


def here() -> Start | None:
    """This start; None where the flow was called without a deployment."""
    if not deployment.id:
        return None
    sweeps = [tag.removeprefix(SWEEP_TAG) for tag in flow_run.tags or [] if tag.startswith(SWEEP_TAG)]
    return Start(str(flow_run.id), str(deployment.id), sweeps[0] if sweeps else "")


def asked_prefect(flow_run_id: str) -> FlowRun | None:
    """The flow run as Prefect has it now; None where Prefect does not answer."""
    settings = get_current_settings().api
    auth, key = (value.get_secret_value() if value else "" for value in (settings.auth_string, settings.key))
    with contextlib.suppress(PrefectAway), contextlib.closing(PrefectRest(str(settings.url), auth, key, ASK_S)) as rest:
        return rest.flow_runs([flow_run_id]).get(flow_run_id)
    return None


def lead(config: RunConfig, run_id: str, start: Start) -> Any:
    """The body of the flow under a worker: the run folder of a run that finished, else the state that says how it ended."""
    try:
        run = _folder(config, run_id or start.run_id(config.name))
    except (ConfigError, RunFolderError) as error:
        show_refusal(error)
        return Failed(message=str(error))
    try:
        if not run.run_file.exists() and (state := skipped(run.path.parent, run.run_id)) is not None:
            return state
        return _lead(config, run, start)
    except RunCancelled as error:
        return Cancelled(message=mask_of(run)(str(error)))
    except (RunFailed, ConfigError, ClusterError, RunFolderError, NothingToResume, OSError) as error:
        if isinstance(error, ConfigError) or not _is_prepared(run):
            show_refusal(error)
        return Failed(message=mask_of(run)(storage_text(error) if isinstance(error, OSError) else str(error)))


def _is_prepared(run: RunFolder) -> bool:
    with contextlib.suppress(OSError):
        return run.run_file.exists()
    return False


def _folder(config: RunConfig, run_id: str) -> RunFolder:
    """Raises ConfigError, RunFolderError."""
    check_run_id(run_id)
    root = config.storage.root
    try:
        return RunFolder(Path(root).expanduser() / run_id)
    except RuntimeError:
        raise ConfigError([Problem("storage.root", root, "nobody knows that home: write the path in full")]) from None


def _lead(config: RunConfig, run: RunFolder, start: Start) -> str:
    """Raises what `train` raises."""
    while True:
        try:
            begun = _begin(config, run, start)
            break
        except NothingToResume:
            found = leasing.sight(run)
            if found.term == 0 or found.released or found.gone:
                raise
            if run.run_file.exists() and read_outcome(run) is None:
                begun = False  # another process leads: this one looks on
                break
            time.sleep(LOOK_S)  # it has just begun or resumed the run
    if begun is None:
        return str(run.path)
    with showing(run):
        return _attempt(run, start, begun)


def _attempt(run: RunFolder, start: Start, begun: bool) -> str:
    run_dir = str(run.path)
    try:
        _check_sweep(run, start)
        if begun:
            steps.start_server(run_dir)
            steps.start_learner(run_dir)
        steps.supervise(run_dir, LEAVES)
    except BaseException as error:
        _end(run, start, error)
        raise
    leasing.release(run)
    try:
        steps.finish(run_dir)
    except Exception as error:  # the run has finished all the same
        get_run_logger().warning("the report could not be written: %s", error)
    return run_dir


def _begin(config: RunConfig, run: RunFolder, start: Start) -> bool | None:
    """Whether the run's jobs are to be started; None where it has finished, and nothing is left to do.

    Raises RunFailed and RunCancelled of a run that has ended so, RunCancelled of a cell whose sweep was cancelled,
    NothingToResume where another process leads.
    """
    by_sweep = not run.run_file.exists() or (read_outcome(run) is not None and not begun_by(run, start.flow_run))
    if by_sweep and (why := sweep_cancelled(run, start.sweep)):
        retry = "retry the sweep's flow run to go on with all that is left of it"
        raise RunCancelled(str(run.path), f"sweep {start.sweep} was cancelled before this cell began ({why}): {retry}")
    if not run.run_file.exists():
        steps.prepare(config, run.run_id, start.origin())
        return True
    _check_ours(run, start)
    if (ended := read_outcome(run)) is not None:
        known = asked_prefect(start.flow_run)
        count = known.run_count if known is not None else None
        if ended.kind is Kind.FINISH or asked_for(run, start.flow_run, count):
            ended.told(str(run.path))
            return None
        steps.prepare_resume(str(run.path))  # a person has started it again
        return True
    leasing.claim(run)
    if not run.attempts():
        run.begin_attempt(None, 0)
    fresh = not (all_jobs(run) or run.assignment() or read_faults(run))
    log_event(run, newest_attempt(run), f"flow run {start.flow_run} leads the run")
    return fresh


def _check_sweep(run: RunFolder, start: Start) -> None:
    """End the run, which this process leads, where its sweep was cancelled meanwhile. Raises RunCancelled."""
    if leasing.held_lease(run) is not None and (why := sweep_cancelled(run, start.sweep)):
        stopping.request_cancel(run, f"sweep {start.sweep}", why)
        raise RunCancelled(str(run.path), f"sweep {start.sweep}: {why}")


def _check_ours(run: RunFolder, start: Start) -> None:
    """A sweep's cell may have another flow run than before; any other run belongs to one. Raises RunFolderError."""
    if begun_by(run, start.flow_run):
        return
    origin = read_origin(run)
    if not start.sweep or origin.sweep != start.sweep:
        whose = f"of flow run {origin.flow_run}" if origin.flow_run else "of the command line"
        raise RunFolderError(
            f"run_id = {run.run_id!r}: there is such a run already, {whose}: choose another run id, leave it empty, or "
            f"continue that one with `slipstream resume {run.path}`"
        )
    write_origin(run, replace(origin, flow_run=start.flow_run, deployment=start.deployment))


def _end(run: RunFolder, start: Start, error: BaseException) -> None:
    """What `error` means for the run: nothing where only this process has to go; else no job is left."""
    with uninterrupted():
        told = isinstance(error, RunFailed | RunCancelled) and leasing.held_lease(run) is None
        if told or (not isinstance(error, Exception) and not _is_cancelled(run, start)):
            log_event(run, newest_attempt(run), f"flow run {start.flow_run} stops leading ({type(error).__name__})")
            leasing.release(run)
            return
        finishing.end_with(run, error, "Prefect")


def _is_cancelled(run: RunFolder, start: Start) -> bool:
    known = None if run.cancel_file.exists() else asked_prefect(start.flow_run)
    return run.cancel_file.exists() or (known is not None and known.state in CANCELS)
