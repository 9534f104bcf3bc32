"""A delivery that breaks is an error, and the server is usable again afterwards."""

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from slipstream.serving.control import ServerControl, ServerError
from slipstream.serving.labels import torn_label
from slipstream.serving.transport import SlipstreamTransport, TransferError
from tests.models import new_model
from tests.serving_process import VllmServer, delivery, descendants, frozen, largest_difference

pytestmark = pytest.mark.integration
CPU = torch.device("cpu")
PROMPT = list(range(20, 60))
TOLERANCE = 1e-4


def transport_of(control: ServerControl, run_id: str, attempt: int, timeout_s: float = 60.0) -> SlipstreamTransport:
    # small buckets: a delivery is many broadcasts, so that it can break between two
    return SlipstreamTransport(control, CPU, run_id, attempt, timeout_s, bucket_bytes=20_000)


def deliver_and_compare(server: VllmServer, transport: SlipstreamTransport, seed: int, label: str) -> None:
    model = new_model(tied=True, seed=seed)
    transport.send(*delivery(model), label=label)
    choice = server.generate(PROMPT)
    assert largest_difference(choice, model, PROMPT) < TOLERANCE
    assert [span["version"] for span in choice["weight_versions"]] == [label]


@pytest.fixture
def control(vllm_server: VllmServer) -> Iterator[ServerControl]:
    with vllm_server.control() as control:
        yield control


def die_in_delivery(base_url: str, token_file: Path, run_id: str, after: int) -> None:
    """A trainer that is gone before tensor number `after`."""

    def tensors(source: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(source):
            if number == after:
                os._exit(9)
            yield item

    transport = transport_of(ServerControl(base_url, token_file, 60), run_id, 1)
    transport.connect()
    parameters, source = delivery(new_model(tied=True, seed=7))
    transport.send(parameters, tensors(source), label=f"{run_id}/a1/0")


@pytest.mark.parametrize("after", [0, 9])
def test_a_trainer_that_dies_in_a_delivery_is_replaced(
    vllm_server: VllmServer, control: ServerControl, after: int
) -> None:
    run_id = f"dying-{after}"
    process = multiprocessing.get_context("spawn").Process(
        target=die_in_delivery, args=(vllm_server.base_url, vllm_server.token_file, run_id, after)
    )
    process.start()
    process.join(120)
    assert process.exitcode == 9
    assert control.is_paused()

    transport = transport_of(control, run_id, 2)
    transport.connect()
    assert not control.is_paused()
    deliver_and_compare(vllm_server, transport, 8, f"{run_id}/a2/0")
    transport.close()


def test_a_delivery_left_open_by_a_dead_trainer_is_closed(vllm_server: VllmServer, control: ServerControl) -> None:
    before = transport_of(control, "open", 1)
    before.connect()
    deliver_and_compare(vllm_server, before, 9, "open/a1/0")
    control.pause("keep")
    control.start_weight_update()

    transport = transport_of(control, "open", 2)
    transport.connect()
    assert control.weight_version() == torn_label("open", 2)
    deliver_and_compare(vllm_server, transport, 10, "open/a2/0")


def test_a_delivery_that_fails_here_leaves_a_running_server_whose_tokens_nobody_takes(
    vllm_server: VllmServer, control: ServerControl
) -> None:
    class Broken(Exception):
        pass

    def tensors(source: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(source):
            if number == 9:
                raise Broken("out of memory")
            yield item

    transport = transport_of(control, "broken", 1)
    transport.connect()
    parameters, source = delivery(new_model(tied=True, seed=11))
    with pytest.raises(TransferError, match=r"'transfer'.*out of memory") as caught:
        transport.send(parameters, tensors(source), label="broken/a1/0")
    assert isinstance(caught.value.__cause__, Broken)
    assert not control.is_paused()
    assert control.weight_version() == torn_label("broken", 1)
    assert len(vllm_server.generate(PROMPT)["token_ids"]) == 16
    with pytest.raises(TransferError, match="connect"):
        transport.send(*delivery(new_model(tied=True, seed=11)), label="broken/a1/0")
    transport.connect()
    deliver_and_compare(vllm_server, transport, 12, "broken/a1/1")


def engine_of(server: VllmServer) -> list[psutil.Process]:
    """The processes below the API server."""
    return [process for child in descendants(server.leader.pid)[:1] for process in child.children(recursive=True)]


@pytest.mark.parametrize("part", ["engine", "everything"])
def test_a_server_that_stops_answering_in_a_delivery_is_an_error(vllm_server: VllmServer, part: str) -> None:
    run_id = f"frozen-{part}"
    processes = engine_of(vllm_server) if part == "engine" else descendants(vllm_server.leader.pid)
    assert processes
    with vllm_server.control() as control:
        transport = transport_of(control, run_id, 1)
        transport.connect()
        control.timeout_s = transport.timeout_s = 4.0
        assert transport._group is not None
        transport._group.timeout_s = 4.0
        freeze = frozen(processes)

        def tensors(source: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
            for number, item in enumerate(source):
                if number == 3:
                    freeze.__enter__()
                yield item

        parameters, source = delivery(new_model(tied=True, seed=13))
        try:
            with pytest.raises(TransferError):
                transport.send(parameters, tensors(source), label=f"{run_id}/a1/0")
        finally:
            freeze.__exit__(None, None, None)
    with vllm_server.control() as control:
        transport = transport_of(control, run_id, 1)
        transport.connect()
        deliver_and_compare(vllm_server, transport, 14, f"{run_id}/a1/1")


def test_a_server_that_is_frozen_before_is_an_error_too(vllm_server: VllmServer) -> None:
    with vllm_server.control() as control:
        transport = transport_of(control, "frozen-before", 1)
        control.timeout_s = 3.0
        with frozen(descendants(vllm_server.leader.pid)), pytest.raises(TransferError, match="no answer"):
            transport.connect()
        control.timeout_s = 60.0
        transport.connect()
        control.timeout_s = 3.0
        with frozen(descendants(vllm_server.leader.pid)), pytest.raises(TransferError, match="'pause'"):
            transport.send(*delivery(new_model(tied=True, seed=15)), label="frozen-before/a1/0")
    with vllm_server.control() as control:
        transport = transport_of(control, "frozen-before", 1)
        transport.connect()
        deliver_and_compare(vllm_server, transport, 16, "frozen-before/a1/0")


def test_an_older_attempt_is_refused_and_does_not_disturb_the_newer(
    vllm_server: VllmServer, control: ServerControl
) -> None:
    newer = transport_of(control, "fenced", 5)
    newer.connect()
    deliver_and_compare(vllm_server, newer, 17, "fenced/a5/0")
    older = transport_of(control, "fenced", 4)
    with pytest.raises(TransferError, match="attempt 4 of run fenced is refused: attempt 5 is the newest") as caught:
        older.connect()
    assert caught.value.phase == "rendezvous"
    deliver_and_compare(vllm_server, newer, 18, "fenced/a5/1")


def test_a_trainer_that_was_replaced_can_send_no_more(vllm_server: VllmServer, control: ServerControl) -> None:
    first, second = transport_of(control, "twice", 1), transport_of(control, "twice", 1)
    first.connect()
    second.connect()
    with pytest.raises(TransferError):
        first.send(*delivery(new_model(tied=True, seed=19)), label="twice/a1/0")
    second.connect()
    deliver_and_compare(vllm_server, second, 20, "twice/a1/1")


def test_a_delivery_the_server_cannot_read_is_its_error(vllm_server: VllmServer, control: ServerControl) -> None:
    transport = transport_of(control, "unknown", 1)
    transport.connect()
    parameters, source = delivery(new_model(tied=True, seed=21))
    odd = [type(p)(f"other.{p.name}", p.dtype, p.shape) for p in parameters]
    with pytest.raises(TransferError, match="/update_weights: HTTP"):
        transport.send(odd, ((f"other.{name}", tensor) for name, tensor in source), label="unknown/a1/0")
    transport.connect()
    deliver_and_compare(vllm_server, transport, 22, "unknown/a1/1")
    with pytest.raises(ServerError):
        control.finish_weight_update()  # nothing was left open
