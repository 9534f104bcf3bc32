"""Automations that tell a person, on a real Prefect server: each case is told once, by a real request."""

import json
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.blocks.system import Secret
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Crashed, Failed, Running

from flows.deploy import notifications
from flows.deploy.notifications import (
    NotificationBlockError,
    apply_notifications,
    find_block,
    notification_automations,
    our_automations,
)
from flows.events import RECOVERED, Due, FlowRun, as_json, run_resource, sweep_finished, sweep_resource
from tests.prefect_server import PASSWORD, PrefectServer
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

TAGS = ("slipstream", "slipstream:tester")


class Receiver:
    """Keeps the JSON of what is posted to it on loopback."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.messages.append(json.loads(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def about(self, text: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if text in message["subject"]]


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[SyncPrefectClient]:
    """A client of a running server that has a webhook block."""
    server = PrefectServer(tmp_path_factory.mktemp("prefect-server"))
    try:
        server.start()
        with (
            temporary_settings({PREFECT_API_URL: server.url, PREFECT_API_AUTH_STRING: PASSWORD}),
            get_client(sync_client=True) as client,
        ):
            message = {"subject": "{{subject}}", "body": "{{body}}"}
            block = CustomWebhookNotificationBlock(name="hook", url=receiver.url, json_data=message)
            block.save("hook", overwrite=True)  # type: ignore[unused-coroutine]
            yield client
    finally:
        server.kill()


def flow_run(client: SyncPrefectClient, name: str) -> FlowRun:
    flow = client.request("POST", "/flows/", json={"name": "train"}).json()
    body = {"flow_id": flow["id"], "name": name, "tags": list(TAGS)}
    return FlowRun(client.request("POST", "/flow_runs/", json=body).json()["id"], name, TAGS)


def test_a_block_that_is_not_there_is_named_with_the_way_out(client: SyncPrefectClient) -> None:
    Secret(value="s").save("plain", overwrite=True)  # type: ignore[unused-coroutine]
    for text, words in (
        ("team", "write TYPE/NAME, like slack-webhook/team"),
        ("slack-webhook/team", "there is no block 'slack-webhook/team'.*can notify: custom-webhook/hook$"),
        ("no-such-type/team", "there is no block 'no-such-type/team'"),
        ("secret/plain", "the block 'secret/plain' cannot notify anybody"),
    ):
        with pytest.raises(NotificationBlockError, match=words):
            find_block(client, text)
    with pytest.raises(NotificationBlockError):
        apply_notifications(client, "tester", ["custom-webhook/hook", "slack-webhook/team"])
    assert our_automations(client, "tester") == []


def test_applying_again_changes_nothing_but_what_is_different(client: SyncPrefectClient) -> None:
    blocks = ["custom-webhook/hook"]
    first = apply_notifications(client, "twice", blocks)
    assert len(first.created) == 4
    assert apply_notifications(client, "twice", blocks).kept == first.created
    one, other = our_automations(client, "twice")[:2]
    client.pause_automation(uuid.UUID(one["id"]))
    changed = {key: value for key, value in other.items() if key not in ("id", "created", "updated")}
    client.request("PUT", f"/automations/{other['id']}", json={**changed, "description": "mine"})  # type: ignore[arg-type]
    again = apply_notifications(client, "twice", blocks)
    assert again.updated == (other["name"],)
    found = {automation["name"]: automation for automation in our_automations(client, "twice")}
    assert found.keys() == set(first.created)
    assert (found[one["name"]]["enabled"], found[one["name"]]["id"]) == (False, one["id"])
    assert found[other["name"]]["id"] == other["id"]
    assert our_automations(client, "twi") == []
    for name in found:
        assert name.startswith("slipstream twice: ")
        client.delete_automation(uuid.UUID(found[name]["id"]))


def test_each_case_is_told_once(client: SyncPrefectClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    def quick(instance: str, block_id: Any, block: str = "") -> Any:
        return notification_automations(instance, block_id, block, left_crashed_s=10)

    monkeypatch.setattr(notifications, "notification_automations", quick)
    apply_notifications(client, "tester", ["custom-webhook/hook"])
    names = ("broken", "fine", "back", "away", "often", "seldom", "sweep")
    runs = {name: flow_run(client, name) for name in names}

    def state(name: str, *states: Any) -> None:
        for one in states:
            client.set_flow_run_state(uuid.UUID(runs[name].id), one, force=True)

    def emit(event: Due, resource: str, name: str) -> None:
        client.request("POST", "/events", json=[as_json(event, resource, name, runs[name], TAGS)])

    def recovers(name: str, number: int) -> None:
        payload = {"role": "server", "reason": "its process is gone"}
        key = uuid.uuid5(uuid.NAMESPACE_OID, f"{name} {number}")
        emit(Due("", RECOVERED, time.time(), payload, key), run_resource(name), name)

    def arrived(text: str) -> dict[str, Any]:
        return dict(wait_until(lambda: receiver.about(text), f"a message about {text!r}")[0])

    # a trigger is loaded some seconds after it was made
    other = flow_run(client, "first")
    number = 0

    def loaded() -> bool:
        nonlocal number
        number += 1
        client.set_flow_run_state(uuid.UUID(other.id), Running(), force=True)
        client.set_flow_run_state(uuid.UUID(other.id), Failed(message="to see whether it works"), force=True)
        time.sleep(1)
        return bool(receiver.about("first failed"))

    wait_until(loaded, "the automations work")

    state("broken", Running(), Failed(message="the learner is out of luck"))
    state("fine", Running(), Completed())
    state("back", Running(), Crashed(), Running())
    state("away", Running(), Crashed())
    for i in range(4):
        recovers("often", i)
    for i in (0, 0, 1):  # the same event twice is one
        recovers("seldom", i)
    emit(sweep_finished("sweep", {}, time.time()), sweep_resource("sweep"), "sweep")

    failed = arrived("broken failed")
    assert failed["subject"] == "slipstream: broken failed"
    assert "the learner is out of luck" in failed["body"]
    assert f"/runs/flow-run/{runs['broken'].id}" in failed["body"]
    often = arrived("often recovers often")
    assert "3 times within an hour. The last: server, its process is gone" in often["body"]
    assert f"/runs/flow-run/{runs['often'].id}" in often["body"]
    swept = arrived("sweep sweep has finished")
    assert f"/runs/flow-run/{runs['sweep'].id}" in swept["body"]
    crashed = arrived("away crashed")
    assert "slipstream reconcile" in crashed["body"]
    # what was told by now is all: what comes last was waited for
    state("fine", Failed(message="now it fails"))
    arrived("fine failed")
    subjects = sorted(message["subject"] for message in receiver.messages if "first" not in message["subject"])
    assert subjects == [
        "slipstream: away crashed",
        "slipstream: broken failed",
        "slipstream: fine failed",
        "slipstream: often recovers often",
        "slipstream: sweep sweep has finished",
    ]
    states = {name: client.read_flow_run(uuid.UUID(run.id)).state for name, run in runs.items()}
    expected = {"broken": "Failed", "fine": "Failed", "back": "Running", "away": "Crashed"}
    never = dict.fromkeys(("often", "seldom", "sweep"), "Pending")
    assert {name: state.name for name, state in states.items() if state} == expected | never  # messages change nothing
