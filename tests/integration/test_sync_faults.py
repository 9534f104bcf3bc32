"""`PolicySync` to the real server where single calls of a delivery are lost, cut or refused on the way."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.learner.sync import PolicySync
from slipstream.serving.control import ServerControl
from slipstream.serving.transport import SlipstreamTransport, TransferError
from tests.fault_proxy import FaultProxy
from tests.models import new_model
from tests.serving_process import VllmServer, largest_difference, wait_for

pytestmark = pytest.mark.integration

PROMPT = list(range(10, 60))
FAULTS = ("503", "reset", "lost", "truncated", "half")
ROUTES = (
    "/is_paused",
    "/init_weight_transfer_engine",
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/resume",
)


@pytest.fixture
def proxy(vllm_server: VllmServer) -> Iterator[FaultProxy]:
    with FaultProxy(vllm_server.base_url) as proxy:
        yield proxy


@pytest.fixture
def control(vllm_server: VllmServer, proxy: FaultProxy) -> Iterator[ServerControl]:
    with ServerControl(proxy.url, vllm_server.token_file, 60.0) as control:
        yield control


def sync_of(control: ServerControl, run_id: str) -> PolicySync:
    # small buckets: a delivery is many broadcasts, so that it can break between two
    transport = SlipstreamTransport(control, torch.device("cpu"), run_id, 1, 60.0, bucket_bytes=20_000)
    return PolicySync(transport, run_id, 1, torch.float32, 0)


def spans(choice: dict[str, Any]) -> list[str]:
    return [span["version"] for span in choice["weight_versions"]]


@pytest.mark.parametrize("route", ROUTES)
def test_a_delivery_arrives_whole_whichever_call_is_harmed(
    vllm_server: VllmServer, proxy: FaultProxy, control: ServerControl, route: str
) -> None:
    run_id = f"harmed{route.replace('/', '-')}"
    proxy.named[route] = [FAULTS[0]]
    sync = sync_of(control, run_id)
    sync.connect()
    sync.deliver(new_model(tied=True, seed=30))
    for number, fault in enumerate(FAULTS, start=1):
        model = new_model(tied=True, seed=30 + number)
        # the calls that only a reconnection makes: break the delivery first
        proxy.named[route] = [fault]
        if route in ("/is_paused", "/init_weight_transfer_engine"):
            proxy.named["/start_weight_update"] = ["reset"]
        sync.advance(model)
        assert proxy.named[route] == [], "the call was made and harmed"
        choice = vllm_server.generate(PROMPT)
        assert spans(choice) == [f"{run_id}/a1/{number}"], fault
        assert largest_difference(choice, model, PROMPT) < 1e-4, fault
    with vllm_server.control() as direct:
        assert not direct.is_paused()
    sync.close()


def test_a_request_in_flight_gets_no_token_of_mixed_weights(
    vllm_server: VllmServer, proxy: FaultProxy, control: ServerControl
) -> None:
    sync = sync_of(control, "in-flight")
    sync.connect()
    sync.deliver(new_model(tied=True, seed=40))
    found: list[dict[str, Any]] = []
    asked = threading.Thread(target=lambda: found.append(vllm_server.generate(PROMPT, max_tokens=400)))
    asked.start()
    with vllm_server.control() as direct:
        wait_for(lambda: "vllm:num_requests_running{" in direct.metrics() and running(direct) > 0, "the request")
    proxy.named["/update_weights"] = ["lost", "reset", "truncated"]
    sync.advance(new_model(tied=True, seed=41))
    asked.join(120)
    (choice,) = found
    assert spans(choice) == ["in-flight/a1/0", "in-flight/a1/1"]
    sync.close()


def running(control: ServerControl) -> float:
    lines = control.metrics().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def test_one_that_cannot_be_made_at_all_leaves_a_running_server_whose_tokens_nobody_takes(
    vllm_server: VllmServer, proxy: FaultProxy, control: ServerControl
) -> None:
    sync = sync_of(control, "lasting")
    sync.connect()
    sync.deliver(new_model(tied=True, seed=42))
    proxy.named["/update_weights"] = ["503"] * 100
    with pytest.raises(TransferError, match="injected 503"):
        sync.advance(new_model(tied=True, seed=43))
    assert 3 <= proxy.counts["/update_weights", "503"] <= 5
    with vllm_server.control() as direct:
        assert not direct.is_paused()
        assert direct.weight_version() == "lasting/a1/torn"
