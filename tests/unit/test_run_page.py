"""The page of a flow run against a double of Prefect's API: artifacts once, events once, whatever fails in between."""

import contextlib
import logging
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import events
from flows.events import FlowRun, sweep_finished, sweep_resource
from flows.page import run as run_page
from flows.page.content import CURVES, JOBS, KEYS, PROGRESS, RECOVERIES, RUN
from flows.page.curves import Curves
from flows.page.run import Memory, Page
from slipstream.run_folder import RunFolder, read_json, write_json
from tasks.outcome import RunCancelled
from tests.page_runs import BEGAN, breaks, ends, learns, new_run

FLOW_RUN = FlowRun("6f0b1e8e-0000-4000-8000-000000000001", "r", ("mine",))
TAGS = ("slipstream", "slipstream:me")


class Away(Exception):
    """Prefect does not answer."""


class Server:
    """What Prefect's server keeps. `fails` names the calls that fail now."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.fails: set[str] = set()
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise Away

    def artifacts(self, flow_run_id: str, keys: tuple[str, ...]) -> dict[str, str]:
        self._call("artifacts")
        return {
            one["key"]: id for id, one in self.kept.items() if one["flow_run"] == flow_run_id and one["key"] in keys
        }

    def create(self, flow_run_id: str, key: str, kind: str, data: Any, description: str) -> str:
        self._call("create")
        new = str(uuid.uuid4())
        self.kept[new] = {"flow_run": flow_run_id, "key": key, "type": kind, "data": data, "description": description}
        return new

    def update(self, artifact_id: str, data: Any, description: str) -> bool:
        self._call("update")
        if artifact_id in self.kept:
            self.kept[artifact_id] |= {"data": data, "description": description}
        return artifact_id in self.kept

    def emit(self, events: list[dict[str, Any]]) -> None:
        self._call("emit")
        self.events += [event for event in events if event["id"] not in {one["id"] for one in self.events}]

    def keys(self) -> list[str]:
        return sorted(one["key"] for one in self.kept.values())

    def names(self) -> list[str]:
        return [event["event"].removeprefix("slipstream.") for event in self.events]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return new_run(tmp_path)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_page, "CURVES_S", 0.0)
    monkeypatch.setattr(run_page, "draw_curves", lambda windows, starts: Curves(f"{len(windows)} windows"))


def page(run: RunFolder) -> Page:
    return Page(run, FLOW_RUN, TAGS)


def test_artifacts_are_made_once_and_changed_where_their_content_is_new(run: RunFolder) -> None:
    server, first = Server(), page(run)
    first.update(server)
    assert server.keys() == [JOBS, RUN]
    learns(run, 1)
    first.update(server)
    assert server.keys() == sorted([CURVES, JOBS, PROGRESS, RUN])
    server.calls.clear()
    first.update(server)
    assert server.calls == []
    learns(run, 2)
    first.update(server)
    assert sorted(set(server.calls)) == ["update"]
    assert len(server.kept) == 4
    assert "step 2 of 10" in next(one["description"] for one in server.kept.values() if one["key"] == RUN)


@pytest.mark.parametrize("forgets", [False, True])
def test_a_flow_run_that_is_started_again_goes_on_with_the_same_artifacts(run: RunFolder, forgets: bool) -> None:
    server = Server()
    learns(run, 1)
    page(run).update(server)
    before = dict(server.kept)
    if forgets:  # killed between the call and the note of it
        (run.path / "prefect.json").unlink()
    learns(run, 2)
    page(run).update(server)
    assert server.kept.keys() == before.keys()
    assert (read_json(run.path / "prefect.json") or {})["artifacts"][FLOW_RUN.id] == server.artifacts(FLOW_RUN.id, KEYS)


def test_another_flow_run_of_the_run_has_artifacts_of_its_own(run: RunFolder) -> None:
    server = Server()
    page(run).update(server)
    other = FlowRun("6f0b1e8e-0000-4000-8000-000000000002")
    Page(run, other, TAGS).update(server)
    assert server.keys() == [JOBS, JOBS, RUN, RUN]
    assert server.names().count("started") == 2


def test_an_artifact_that_somebody_deleted_comes_back(run: RunFolder) -> None:
    server, one = Server(), page(run)
    one.update(server)
    server.kept.clear()
    learns(run, 1)
    one.update(server)
    assert server.keys().count(RUN) == 1


@pytest.mark.parametrize("call", ["artifacts", "create", "update", "emit"])
def test_what_could_not_be_told_is_told_later(run: RunFolder, call: str) -> None:
    server, one = Server(), page(run)
    learns(run, 1)
    one.update(server)
    breaks(run, 1, "i0")
    learns(run, 2)
    server.fails = {call}
    again = page(run) if call == "artifacts" else one
    with pytest.raises(Away):
        again.update(server)
    server.fails = set()
    again.update(server)
    assert server.keys() == sorted([CURVES, JOBS, PROGRESS, RECOVERIES, RUN])
    assert [name for name in server.names() if name != "heartbeat"] == ["started", "recovered"]


def test_each_recovery_is_told_once_and_when_the_run_has_come_further(run: RunFolder) -> None:
    server = Server()
    learns(run, 1)
    breaks(run, 1, "i0", "gone")
    page(run).update(server)
    assert "recovered" not in server.names()
    learns(run, 2)
    page(run).update(server)
    page(run).update(server)
    (run.path / "prefect.json").unlink()
    page(run).update(server)
    (event,) = [one for one in server.events if one["event"] == events.RECOVERED]
    assert event["payload"] == {
        "role": "server", "kind": "died", "reason": "gone", "step": 2, "lost_step": 1, "seconds": 9.0, "folder": str(run.path),
    }  # fmt: skip
    assert event["occurred"] == "2023-11-14T22:13:40+00:00"


def test_an_event_names_the_run_the_flow_run_and_the_tags(run: RunFolder) -> None:
    server = Server()
    learns(run, 3)
    page(run).update(server)
    started, beat = server.events
    assert (started["event"], beat["event"]) == (events.STARTED, events.HEARTBEAT)
    assert beat["resource"] == {"prefect.resource.id": "slipstream.run.r", "prefect.resource.name": "r"}
    ids = [(one["prefect.resource.role"], one["prefect.resource.id"]) for one in beat["related"]]
    assert ids == [
        ("flow-run", f"prefect.flow-run.{FLOW_RUN.id}"),
        ("tag", "prefect.tag.mine"),
        ("tag", "prefect.tag.slipstream"),
        ("tag", "prefect.tag.slipstream:me"),
    ]
    payload = beat["payload"]
    assert (payload["step"], payload["reward"], payload["trained_tokens_per_s"]) == (3, 0.3, 3003.0)
    assert payload["phase"] == "training"


def test_a_heartbeat_comes_once_a_minute_and_not_at_the_end(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    server, one = Server(), page(run)
    for _ in range(3):
        one.update(server)
    assert server.names().count("heartbeat") == 1
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.000001)
    one.update(server, last=True)
    assert server.names().count("heartbeat") == 1
    one.update(server)
    assert server.names().count("heartbeat") == 2


@pytest.mark.parametrize(("kind", "name"), [("finish", "finished"), ("fail", "failed"), ("cancelled", "cancelled")])
def test_the_end_is_told_once(run: RunFolder, kind: str, name: str) -> None:
    server = Server()
    ends(run, kind, reason="because")
    for _ in range(2):
        page(run).update(server, last=True)
    assert server.names() == ["started", name]
    assert server.events[-1]["payload"]["reason"] == "because"


def test_two_processes_of_one_flow_run_tell_everything_once(run: RunFolder) -> None:
    server, leader, onlooker = Server(), page(run), page(run)
    learns(run, 1)
    breaks(run, 1, "i0")
    for step in (2, 3):
        learns(run, step)
        for one in (leader, onlooker):
            one.update(server)
    assert len(server.kept) == len(set(server.keys()))
    assert sorted(server.names()) == ["heartbeat", "recovered", "started"]


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"artifacts": [1], "told": 7}', '{"artifacts": {"x": 1}, "told": [1]}']
)
def test_a_damaged_memory_is_made_anew(run: RunFolder, text: str) -> None:
    server = Server()
    page(run).update(server)
    (run.path / "prefect.json").write_text(text)
    page(run).update(server)
    assert server.keys() == [JOBS, RUN]
    assert FLOW_RUN.id in Memory.of(run).artifacts


def test_a_sweeps_end() -> None:
    event = sweep_finished("s", {"cells": 4, "best": None}, BEGAN)
    found = events.as_json(event, sweep_resource("s"), "s", FLOW_RUN, TAGS)
    assert found["resource"]["prefect.resource.id"] == "slipstream.sweep.s"
    assert (found["event"], found["payload"]) == ("slipstream.sweep.finished", {"cells": 4})
    assert found["id"] == str(sweep_finished("s", {}, BEGAN).id), "sent twice, the server keeps one"
    assert found["id"] != str(sweep_finished("s", {}, BEGAN + 1).id), "another end"


def test_a_memory_of_other_flow_runs_is_kept(run: RunFolder) -> None:
    write_json(run.path / "prefect.json", {"artifacts": {"other": {RUN: "x"}}, "told": ["k"]})
    page(run).update(Server())
    assert Memory.of(run).artifacts["other"] == {RUN: "x"}
    assert "k" in Memory.of(run).told


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_last_update_is_tried_once_more(run: RunFolder, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    server, tries = Server(), list[int]()

    @contextlib.contextmanager
    def page_api() -> Iterator[Server]:
        tries.append(1)
        if len(tries) <= failing:
            raise Away
        yield server

    monkeypatch.setitem(sys.modules, "flows.page.api", SimpleNamespace(page_api=page_api))  # type: ignore[arg-type]
    monkeypatch.setattr(run_page, "AGAIN_S", 0.0)
    stopped = threading.Event()
    stopped.set()
    run_page._loop(page(run), stopped, logging.getLogger())
    assert (len(tries), bool(server.kept)) == (min(failing + 1, 2), failing < 2)


@pytest.mark.parametrize(
    ("error", "patience_s"),
    [
        (None, run_page.END_S),
        (RuntimeError(), run_page.END_S),
        (RunCancelled("r", "enough"), run_page.LEAVE_S),
        (KeyboardInterrupt(), run_page.LEAVE_S),
    ],
)
def test_how_long_the_end_waits_for_the_page(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, patience_s: float
) -> None:
    joined = list[float | None]()
    monkeypatch.setattr(run_page, "_here", lambda: (FLOW_RUN, TAGS, logging.getLogger()))
    monkeypatch.setattr(run_page, "_loop", lambda *_: None)
    monkeypatch.setattr(threading.Thread, "join", lambda _, timeout=None: joined.append(timeout))
    with contextlib.suppress(RuntimeError, RunCancelled, KeyboardInterrupt), run_page.showing(run):
        if error is not None:
            raise error
    assert joined == [patience_s]
