"""Rank 0's hold on the server: which one it takes, and what it waits over."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.learner import server_link
from slipstream.learner.reporter import Reporter
from slipstream.learner.server_link import ServerGone, ServerLink, ServerNotUsable, ServerReplaced, differences
from slipstream.run_folder import RunFolder, read_jsonl, write_json
from slipstream.serving.control import ServerError
from slipstream.serving.probe import Capabilities
from tests.steering_server import SteeringServer

USABLE = Capabilities("m", max_model_len=64, transfer_backend="slipstream")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_link, "LOOK_S", 0.01)
    monkeypatch.setattr(server_link, "probe", lambda control: USABLE)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path, "run")
    folder.begin_attempt(None, 0)
    return folder


@pytest.fixture
def servers() -> Iterator[tuple[SteeringServer, SteeringServer]]:
    with SteeringServer() as first, SteeringServer() as second:
        yield first, second


def publish(run: RunFolder, url: str, incarnation: str, attempt: int = 1) -> None:
    write_json(run.endpoint_file(), {"url": url, "incarnation": incarnation, "attempt": attempt})


def link_of(
    run: RunFolder | None, url: str = "http://127.0.0.1:1", timeout_s: float = 30.0, patience_s: float | None = None
) -> ServerLink:
    config = SimpleNamespace(
        run_dir=None if run is None else str(run.path),
        attempt=1,
        vllm_server_base_url=url,
        vllm_server_token_file=None,
        vllm_server_timeout=timeout_s,
        server_patience=patience_s,
        device=None,
    )
    return ServerLink(config, "run", lambda found: [], Reporter(run, 1), lambda: 7)


def test_a_stale_endpoint_is_waited_over_until_a_server_counts_that_answers(
    run: RunFolder, servers: tuple[SteeringServer, SteeringServer]
) -> None:
    stranger, ours = servers
    stranger.refused["/health"] = 401
    publish(run, stranger.url, "stale")
    link = link_of(run)
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(link.attach()))
    waiting.start()
    while stranger.calls.count("/health") < 3:
        assert waiting.is_alive()
    publish(run, ours.url, "two")
    waiting.join(30)
    assert (found, link.control.base_url, link.incarnation) == ([True], ours.url, "two")


def test_another_server_that_counts_is_seen_and_taken(
    run: RunFolder, servers: tuple[SteeringServer, SteeringServer]
) -> None:
    first, second = servers
    publish(run, first.url, "one")
    link = link_of(run)
    assert link.attach()
    assert not link.moved(now=True)
    assert not link.lost()
    link.check_replaced()
    publish(run, first.url, "later", attempt=2)
    assert not link.moved(now=True), "of another attempt, and nobody has assigned it"
    write_json(run.assignment_file, {"attempt": 2, "server": "two", "learner": "l"})
    publish(run, second.url, "two", attempt=3)
    assert link.moved(now=True)
    assert link.lost()
    with pytest.raises(ServerReplaced):
        link.check_replaced()
    assert link.attach()
    assert (link.control.base_url, link.incarnation, link.moved(now=True)) == (second.url, "two", False)
    (event,) = read_jsonl(run.records(1) / "events.jsonl")
    assert (event["event"], event["step"], event["incarnation"]) == ("attached to another server", 7, "two")


def test_one_that_does_not_answer_is_lost_though_it_counts(run: RunFolder, servers: Any) -> None:
    first, _ = servers
    publish(run, first.url, "one")
    link = link_of(run)
    assert link.attach()
    first.refused["/health"] = 503
    assert link.lost()


def test_without_any_it_waits_no_longer_than_told(run: RunFolder, servers: Any) -> None:
    first, _ = servers
    publish(run, first.url, "one")
    link = link_of(run, timeout_s=0.3)
    assert link.attach()
    run.endpoint_file().unlink()
    while not link.absent():
        pass

    def wait() -> None:
        while link.absent():
            pass

    with pytest.raises(ServerGone, match=r"for 0.3 s \(as long as"):
        wait()
    with pytest.raises(ServerGone, match="the run folder names none"):
        link.attach()


def test_in_a_supervised_run_it_waits_for_longer_than_for_a_call(
    run: RunFolder, servers: tuple[SteeringServer, SteeringServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = servers
    now = [0.0]
    monkeypatch.setattr(server_link.time, "monotonic", lambda: now[0])
    publish(run, first.url, "one")
    link = link_of(run, timeout_s=1800.0, patience_s=6000.0)
    assert link.attach()
    run.endpoint_file().unlink()
    for now[0] in (10.0, 2000.0, 6005.0):
        assert link.absent()
    publish(run, second.url, "two")
    assert link.attach()
    run.endpoint_file().unlink()
    now[0] += 10
    link.delivered()
    assert link.absent()
    now[0] += 6001
    with pytest.raises(ServerGone, match="for 6000 s"):
        link.absent()


def test_a_run_that_leaves_waits_no_longer(run: RunFolder) -> None:
    write_json(run.assignment_file, {"attempt": 1, "server": "one", "learner": "l"})
    link = link_of(run)
    link.leaving = lambda: True
    assert not link.attach()


def test_outside_a_run_there_is_the_one_server(servers: Any) -> None:
    first, _ = servers
    link = link_of(None, first.url)
    assert link.attach()
    first.refused["/health"] = 503
    assert (link.moved(), link.absent(), link.lost()) == (False, False, False)
    with pytest.raises(ServerError, match=r"not healthy within 0\.1 s"):
        link_of(None, timeout_s=0.1).attach()


def test_the_next_server_must_do_what_the_run_was_set_up_for(
    run: RunFolder, servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = servers
    publish(run, first.url, "one")
    link = link_of(run)
    assert link.attach()
    monkeypatch.setattr(server_link, "probe", lambda control: Capabilities("m", max_model_len=32))
    publish(run, second.url, "two")
    with pytest.raises(ServerNotUsable, match="--max-model-len 64"):
        link.attach()
    assert differences(USABLE, USABLE) == []
    assert "the same model" in differences(USABLE, Capabilities("n", max_model_len=64))[0]
