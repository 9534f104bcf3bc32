"""The server is closed to everybody without the run's token."""

import httpx
import psutil
import pytest

from slipstream.serving.control import ServerControl, ServerError
from tests.serving_process import VllmServer, descendants

pytestmark = pytest.mark.integration
MUST_BE_THERE = {"/health", "/metrics", "/pause", "/update_weights", "/collective_rpc", "/inference/v1/generate"}


def test_every_route_asks_for_the_token(vllm_server: VllmServer) -> None:
    with vllm_server.control() as control:
        paths = control.call("GET", "/openapi.json").json()["paths"]
    assert set(paths) >= MUST_BE_THERE
    routes = [(method, path) for path, methods in paths.items() for method in methods]
    routes += [("get", path) for path in ("/docs", "/redoc", "/openapi.json", "/metrics/", "/nowhere")]
    with httpx.Client(base_url=vllm_server.base_url, trust_env=False) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {vllm_server.token}"}):
            answers = {(m, p): client.request(m, p, headers=headers, timeout=30).status_code for m, p in routes}
            assert set(answers.values()) == {401}, answers


def test_a_refused_token_is_permanent_and_not_repeated_in_the_error(
    vllm_server: VllmServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wrong = tmp_path_factory.mktemp("token") / "token"
    wrong.write_text("wrong-token")
    with ServerControl(vllm_server.base_url, wrong, 30) as control, pytest.raises(ServerError) as caught:
        control.wait_healthy(30)
    assert caught.value.permanent
    assert caught.value.status == 401
    assert "wrong-token" not in str(caught.value)


def test_the_token_is_in_no_log_argument_or_record(vllm_server: VllmServer) -> None:
    vllm_server.generate([1, 2, 3])
    with vllm_server.control() as control, pytest.raises(ServerError):
        control.call("POST", "/inference/v1/generate", json={"token_ids": "no"})
    token = vllm_server.token
    processes = [psutil.Process(vllm_server.leader.pid), *descendants(vllm_server.leader.pid)]
    assert len(processes) >= 3  # leader, API server, engine
    for process in processes:
        assert token not in " ".join(process.cmdline())
        assert token not in "\n".join(process.environ().values())
    for path in vllm_server.run.path.rglob("*"):
        if path.is_file() and path != vllm_server.token_file:
            assert token.encode() not in path.read_bytes(), path


def test_run_folder_and_log_are_private(vllm_server: VllmServer) -> None:
    assert vllm_server.run.path.stat().st_mode & 0o077 == 0
    assert vllm_server.run.log_file("server", 1).stat().st_mode & 0o077 == 0
    assert vllm_server.token_file.stat().st_mode & 0o077 == 0
