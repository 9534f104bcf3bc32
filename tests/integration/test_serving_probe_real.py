"""What a real server says about itself."""

from typing import Any

import pytest

from slipstream.run_folder import read_json
from slipstream.serving import probe as probe_module
from slipstream.serving.control import ServerControl, ServerError
from slipstream.serving.main import StartError, attach_external
from slipstream.serving.probe import Capabilities, probe
from slipstream.serving.stall import generated_tokens
from tests.serving_process import MAX_MODEL_LEN, VllmServer

pytestmark = pytest.mark.integration


def expected(server: VllmServer, **more: Any) -> dict[str, Any]:
    return {
        "model": str(server.model),
        "max_model_len": MAX_MODEL_LEN,
        "max_logprobs": 9,
        "logprobs_mode": "processed_logprobs",
        "has_generate_route": True,
        "has_dev_routes": True,
        "sampling_mask": False,
        "lora": False,
        **more,
    }


def test_the_published_endpoint_says_what_the_server_can(vllm_server: VllmServer) -> None:
    endpoint = read_json(vllm_server.run.endpoint_file())
    assert endpoint is not None
    assert (endpoint["url"], endpoint["attempt"], endpoint["authenticated"]) == (vllm_server.base_url, 1, True)
    capabilities = Capabilities.from_plain(endpoint["capabilities"])
    plain = capabilities.to_plain()
    wanted = expected(vllm_server, transfer_backend="slipstream", dtype="float32", has_server_info=True)
    assert {key: plain[key] for key in wanted} == wanted
    assert capabilities.version
    assert capabilities.kv_cache_tokens
    assert capabilities.kv_cache_tokens > MAX_MODEL_LEN


def test_without_server_info_one_look_at_log_probabilities_decides(
    vllm_server: VllmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(self: ServerControl, method: str, route: str, **kwargs: Any) -> Any:
        if route == "/server_info":
            raise ServerError(route, 404, "Not Found")
        return original(self, method, route, **kwargs)

    original = ServerControl.call
    monkeypatch.setattr(ServerControl, "call", call)
    with vllm_server.control() as control:
        plain = probe(control).to_plain()
        wanted = expected(vllm_server, has_server_info=False, transfer_backend=None)
        assert {key: plain[key] for key in wanted} == wanted
        monkeypatch.setattr(probe_module, "PROBE_LOGPROBS", 10)
        assert probe(control).max_logprobs == 9


def test_a_server_that_a_dead_trainer_left_paused_is_probed_without_a_wait(vllm_server: VllmServer) -> None:
    with vllm_server.control(timeout_s=20) as control:
        running = probe(control)
        control.pause("keep")
        try:
            assert probe(control) == running
        finally:
            control.resume()


def test_progress_counts_generated_tokens(vllm_server: VllmServer) -> None:
    with vllm_server.control() as control:
        before = generated_tokens(control.metrics())
        vllm_server.generate([5, 6, 7], max_tokens=11)
        assert generated_tokens(control.metrics()) == before + 11


def test_an_external_server_that_wants_a_token_is_refused_at_once(vllm_server: VllmServer) -> None:
    with pytest.raises(ServerError, match="401"):
        attach_external(vllm_server.run, 1, vllm_server.base_url)


def test_an_external_server_is_probed_and_published(vllm_server: VllmServer, monkeypatch: pytest.MonkeyPatch) -> None:
    published: dict[str, Any] = {}
    original = ServerControl.__init__

    def with_token(self: ServerControl, url: str, _token: Any, timeout_s: float) -> None:
        original(self, url, vllm_server.token_file, timeout_s)

    monkeypatch.setattr(ServerControl, "__init__", with_token)
    monkeypatch.setattr("slipstream.serving.main.write_json", lambda path, value: published.update(value))
    with pytest.raises(StartError, match="--max-logprobs 21"):
        attach_external(vllm_server.run, 1, vllm_server.base_url, {"num_sampler_logprobs": 20})
    assert published == {}
    endpoint = attach_external(vllm_server.run, 3, vllm_server.base_url + "/", {"num_sampler_logprobs": 8})
    assert published == endpoint
    assert (endpoint["url"], endpoint["attempt"], endpoint["authenticated"]) == (vllm_server.base_url, 3, False)
