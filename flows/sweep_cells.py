"""Cells of a sweep that are flow runs of their own: children of the sweep's flow run, each led by a worker."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.deployments import run_deployment
from prefect.states import AwaitingRetry, Cancelled, Cancelling

from flows.names import TAG, deployment_name, instance_tag
from tasks.sweep_cells import NotNow, View
from tasks.sweep_folder import TAG as SWEEP_TAG
from tasks.sweep_folder import Note, SweepFolder

PAGE = 200
LOOK_S = 5.0  # the server is asked no more often
BEGUN = (StateType.RUNNING, StateType.CANCELLING)


@task(name="start cell", task_run_name="start {cell}", cache_policy=NO_CACHE, persist_result=False)
def start_cell(cell: str, deployment: str, parameters: dict[str, Any], run_id: str, tags: list[str], key: str) -> str:
    """Have a worker start the cell; the id of its flow run. The same key gives the same flow run."""
    started: Any = run_deployment(
        deployment,
        parameters=parameters,
        flow_run_name=run_id,
        timeout=0,
        tags=tags,
        idempotency_key=key,
        as_subflow=True,
    )
    return str(started.id)


class PrefectCells:
    """Cells that a worker runs.

    Args:
        parent: id of the sweep's flow run.
        instance: whose deployment `train/<instance>.custom` starts the cells.
    """

    def __init__(self, sweep: SweepFolder, instance: str, parent: str) -> None:
        self._sweep = sweep
        self._instance = instance
        self._parent = parent
        self._known: dict[str, FlowRun] | None = None
        self._asked = float("-inf")

    @property
    def tag(self) -> str:
        return f"{SWEEP_TAG}:{self._sweep.sweep_id}"

    def _flow_runs(self) -> dict[str, FlowRun] | None:
        """The newest flow run of each cell's run id; None while the server has never answered."""
        if time.monotonic() - self._asked >= LOOK_S:
            self._asked = time.monotonic()
            try:
                self._known = self._read()
            except Exception as error:  # the API away: cells go on, and they stand as they were seen last
                get_run_logger().warning("Prefect does not tell of the cells: %s", error)
        return self._known

    def _read(self) -> dict[str, FlowRun]:
        found: dict[str, FlowRun] = {}
        with get_client(sync_client=True) as client:
            wanted = FlowRunFilter(tags=FlowRunFilterTags(all_=[self.tag]))
            offset = 0
            while True:
                some = client.read_flow_runs(
                    flow_run_filter=wanted, sort=FlowRunSort.EXPECTED_START_TIME_ASC, limit=PAGE, offset=offset
                )
                for one in some:
                    found[str(one.parameters.get("run_id", ""))] = one
                offset += len(some)
                if len(some) < PAGE:
                    return found

    def look(self, cells: Sequence[str], notes: Mapping[str, Note]) -> dict[str, View]:
        known = self._flow_runs()
        return {cell: self._view(cell, notes[cell], known) for cell in cells}

    def _view(self, cell: str, note: Note, known: Mapping[str, FlowRun] | None) -> View:
        """Who leads a run that has begun is for reconciliation to see to: `led` is always true."""
        if known is None:
            return View(alive=bool(note.flow_run), led=True)
        found = known.get(self._sweep.run_id(cell))
        state = None if found is None else found.state
        if found is None or state is None:
            return View(led=True)
        if not state.is_final():
            return View(alive=True, led=True)
        if state.is_failed() or state.is_cancelled():
            problem = f"its flow run is {state.name}: {state.message or 'no reason given'}"
            return View(led=True, problem=problem, cancelled=state.is_cancelled())
        return View(led=True)

    def start(self, cell: str, note: Note) -> None:
        config = self._sweep.config(cell)
        tags = [TAG, instance_tag(self._instance), self.tag]
        run_id = self._sweep.run_id(cell)
        parameters = {"config": config.to_plain(), "run_id": run_id}
        deployment = f"train/{deployment_name(self._instance, 'custom')}"
        key = f"{self._parent}-{cell}-{note.serial}"
        try:
            if not self._sweep.run(cell).run_file.is_file() and (crashed := self._crashed(run_id)):
                note.flow_run = crashed
                self._asked = float("-inf")
                return
            note.flow_run = start_cell(cell, deployment, parameters, run_id, tags, key)
        except Exception as error:
            raise NotNow(f"{deployment} could not be started: {error}") from error
        self._asked = float("-inf")

    def _crashed(self, run_id: str) -> str:
        """Id of the cell's flow run, started again, where its process has died; '' where it has not."""
        if (known := (self._flow_runs() or {}).get(run_id)) is None:
            return ""
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(known.id).state
            if state is None or not state.is_crashed():
                return ""
            again: Any = AwaitingRetry(message="its process died before it came to its run")
            client.set_flow_run_state(known.id, again, force=True)
        return str(known.id)

    def stop(self, cell: str, note: Note, why: str) -> None:
        """A cell that has a run has been asked on storage, where that is not full, and its leader ends it."""
        run = self._sweep.run(cell)
        if run.run_file.is_file() and run.cancel_file.exists():
            return
        found = (self._flow_runs() or {}).get(self._sweep.run_id(cell))
        if found is None or found.state is None or found.state.is_final():
            return
        state: Any = Cancelling(message=why) if found.state.type in BEGUN else Cancelled(message=why)
        try:
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(found.id, state)
        except Exception as error:
            get_run_logger().warning("%s could not be cancelled: %s", cell, error)
        self._asked = float("-inf")
