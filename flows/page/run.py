"""What a flow run's page shows of its run: artifacts that are updated in place, and events.

Best effort: a Prefect that is away, slow or refuses costs the run nothing but a line in its log. The run's folder is
read, and what was told is remembered there, so that a flow run that is started again goes on with the same artifacts.
"""

import contextlib
import contextvars
import hashlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flows import events
from flows.events import Due, FlowRun
from flows.masking import mask_of
from flows.names import TAG, instance_tag
from flows.page.content import CURVES, KEYS, Content, contents
from flows.page.curves import Curves, draw_curves
from flows.page.facts import Facts, read_facts
from slipstream.instance import InstanceError, instance_id
from slipstream.run_folder import RunFolder, read_object, write_json
from tasks.outcome import RunCancelled

UPDATE_S = 10.0
CURVES_S = 30.0  # images are large, and each is stored
END_S = 20.0  # the longest that a run which has ended waits for its page: nobody brings it up to date later
LEAVE_S = 5.0  # and one that is told to leave
AGAIN_S = 5.0  # before the last update is tried once more

logger = logging.getLogger(__name__)


class Api(Protocol):
    """What `flows.page.api.PageApi` is."""

    def artifacts(self, flow_run_id: str, keys: tuple[str, ...]) -> dict[str, str]: ...
    def create(self, flow_run_id: str, key: str, kind: str, data: Any, description: str) -> str: ...
    def update(self, artifact_id: str, data: Any, description: str) -> bool: ...
    def emit(self, events: list[dict[str, Any]]) -> None: ...


@dataclass
class Memory:
    """`prefect.json` of a run: artifact ids by flow run and key, and keys of the events that were told."""

    path: Path
    artifacts: dict[str, dict[str, str]]
    told: list[str]

    @classmethod
    def of(cls, run: RunFolder) -> "Memory":
        """What is on storage; nothing where that is damaged. Raises OSError."""
        path = run.path / "prefect.json"
        value: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            value = read_object(path)
        pages, told = value.get("artifacts"), value.get("told")
        pages = pages if isinstance(pages, dict) else {}
        ids = {
            flow_run: {key: item for key, item in page.items() if isinstance(item, str)}
            for flow_run, page in pages.items()
            if isinstance(page, dict)
        }
        return cls(path, ids, [key for key in told if isinstance(key, str)] if isinstance(told, list) else [])

    def save(self) -> None:
        write_json(self.path, {"artifacts": self.artifacts, "told": self.told})


class Page:
    """Keeps the page of one flow run up to date; used by one thread."""

    def __init__(self, run: RunFolder, flow_run: FlowRun, tags: tuple[str, ...] = ()) -> None:
        self._run, self._flow_run, self._tags = run, flow_run, tags
        self._sent: dict[str, str] = {}
        self._known: dict[str, str] | None = None
        self._drawn: tuple[Any, float] = (None, float("-inf"))
        self._curves = Curves()
        self._beaten = float("-inf")

    def update(self, api: Api, last: bool = False) -> None:
        """Send what is new. Raises what `api` raises, and OSError."""
        facts = read_facts(self._run, mask_of(self._run))
        memory = Memory.of(self._run)
        self._tell(api, facts, memory, last)
        found = contents(facts, self._curves)
        for key in (key for key in KEYS if key != CURVES):
            self._show(api, memory, key, found.get(key))
        self._draw(facts, last)
        self._show(api, memory, CURVES, contents(facts, self._curves).get(CURVES))

    def _tell(self, api: Api, facts: Facts, memory: Memory, last: bool) -> None:
        now = time.time()
        found: list[Due] = events.due(facts, self._flow_run, memory.told, now)
        beat = not last and time.monotonic() - self._beaten >= events.HEARTBEAT_S
        if beat:
            found.append(events.heartbeat(facts, self._flow_run, now))
        if not found:
            return
        resource = events.run_resource(facts.run_id)
        api.emit([events.as_json(one, resource, facts.run_id, self._flow_run, self._tags) for one in found])
        if beat:
            self._beaten = time.monotonic()
        if keys := [one.key for one in found if one.key]:
            memory.told += keys
            memory.save()

    def _draw(self, facts: Facts, last: bool) -> None:
        windows = facts.snapshot.windows
        state = (len(windows), windows[-1].get("step") if windows else None, facts.starts)
        drawn, when = self._drawn
        if state != drawn and (last or time.monotonic() - when >= CURVES_S):
            self._curves = draw_curves(windows, facts.starts)
            self._drawn = state, time.monotonic()

    def _show(self, api: Api, memory: Memory, key: str, content: Content | None) -> None:
        if content is None:
            return
        digest = hashlib.sha256(json.dumps([content.data, content.description]).encode()).hexdigest()
        if self._sent.get(key) == digest:
            return
        flow_run = self._flow_run.id
        if self._known is None:  # also those that were made by a process that was killed before it could remember
            self._known = api.artifacts(flow_run, KEYS)
            memory.artifacts[flow_run] = memory.artifacts.get(flow_run, {}) | self._known
            memory.save()
        known = memory.artifacts.setdefault(flow_run, {})
        if key not in known or not api.update(known[key], content.data, content.description):
            known[key] = api.create(flow_run, key, content.type, content.data, content.description)
            memory.save()
        self._sent[key] = digest


@contextlib.contextmanager
def showing(run: RunFolder) -> Iterator[None]:
    """Keep the page of the current flow run up to date from a thread while the body runs, and once more at its end.

    Outside a flow run, and where nobody can look at its server, nothing is done.
    """
    found = _here()
    if found is None:
        yield
        return
    flow_run, tags, log = found
    stopped = threading.Event()
    context = contextvars.copy_context()  # of the flow: its settings and its logger's target
    page = Page(run, flow_run, tags)
    thread = threading.Thread(target=context.run, args=(_loop, page, stopped, log), name="run page", daemon=True)
    thread.start()
    patience_s = LEAVE_S
    try:
        yield
        patience_s = END_S
    except RunCancelled:
        raise
    except Exception:
        patience_s = END_S
        raise
    finally:
        stopped.set()
        thread.join(patience_s)


def show_once(run: RunFolder, flow_run: FlowRun, api: Api | None = None) -> bool:
    """Bring the page of a flow run up to date that no process of its own shows (any more); whether that worked.

    `api`: the server; None: the one that Prefect's settings name.
    """
    try:
        page = Page(run, flow_run, _tags())
        if api is not None:
            page.update(api, last=True)
            return True
        from flows.page.api import page_api

        with page_api() as settled:
            page.update(settled, last=True)
    except Exception as error:
        logger.warning("the page of %s is not up to date: %s", run.run_id, _told(error))
        return False
    return True


def _loop(page: Page, stopped: threading.Event, log: Any) -> None:
    warned, tries = False, 2
    while True:
        last = stopped.is_set()
        try:
            from flows.page.api import page_api

            with page_api() as api:
                while True:
                    last = stopped.is_set()
                    page.update(api, last)
                    if last:
                        return
                    stopped.wait(UPDATE_S)
        except Exception as error:  # the page is for looking at: it ends nothing
            if not warned:
                warned = True
                with contextlib.suppress(Exception):
                    log.warning("the run's page on Prefect is not up to date, the run goes on: %s", _told(error))
        tries -= last
        if not tries:
            return
        time.sleep(AGAIN_S) if last else stopped.wait(UPDATE_S)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _tags() -> tuple[str, ...]:
    with contextlib.suppress(InstanceError):
        return (TAG, instance_tag(instance_id()))
    return (TAG,)


def _here() -> tuple[FlowRun, tuple[str, ...], Any] | None:
    """The flow run that this is, its tags and its logger; None outside one, or where nobody can look at it."""
    try:
        from prefect import get_run_logger
        from prefect.context import FlowRunContext
        from prefect.settings import PREFECT_API_URL

        from flows import prefect_api

        context = FlowRunContext.get()
        if context is None or context.flow_run is None or not PREFECT_API_URL.value() or prefect_api.nobody_looks():
            return None
        one = context.flow_run
        return FlowRun(str(one.id), str(one.name or ""), tuple(one.tags or ())), _tags(), get_run_logger()
    except Exception as error:
        logger.warning("the run has no page on Prefect: %s", _told(error))
        return None
