from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from slipstream.nodes import Place
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder
from slipstream.serving.command import PYTHON_ENV, CommandError, server_command, vllm_python


def config(trainer: dict[str, Any] | None = None, **server: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"name": "org/model", "revision": "abc"},
            "data": {"source": "x.jsonl"},
            "trainer": {"max_completion_length": 128, **(trainer or {})},
            "server": {"max_model_len": 512, **server},
        }
    )


def build(configuration: RunConfig, tmp_path: Path, **kwargs: Any) -> tuple[list[str], dict[str, str]]:
    run = RunFolder.create(tmp_path, "run")
    return server_command(configuration, run, 1234, "/env/bin/python", **kwargs)


def value(argv: list[str], flag: str) -> str:
    assert argv.count(flag) == 1
    return argv[argv.index(flag) + 1]


def test_on_cpu(tmp_path: Path) -> None:
    argv, env = build(config(gpus=0), tmp_path)
    assert argv[:3] == ["/env/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert value(argv, "--model") == "org/model"
    assert value(argv, "--revision") == "abc"
    assert value(argv, "--host") == "127.0.0.1"
    assert value(argv, "--port") == "1234"
    assert value(argv, "--dtype") == "float32"
    assert value(argv, "--logprobs-mode") == "processed_logprobs"
    assert value(argv, "--max-logprobs") == "9"
    assert value(argv, "--max-model-len") == "512"
    assert value(argv, "--max-num-seqs") == "256"
    assert value(argv, "--kv-cache-memory-bytes") == "256M"
    assert value(argv, "--weight-transfer-config") == '{"backend": "slipstream"}'
    assert value(argv, "--middleware") == "slipstream.serving.auth.RequireToken"
    assert value(argv, "--distributed-executor-backend") == "uni"
    assert {"--enable-scale-out", "--enforce-eager"} <= set(argv)
    assert "--api-server-count" not in argv
    assert env["VLLM_SERVER_DEV_MODE"] == "1"
    assert env["TORCH_COMPILE_DISABLE"] == "1"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in env


def test_on_gpus(tmp_path: Path) -> None:
    argv, env = build(config(gpus=4, tensor_parallel_size=2, data_parallel_size=2), tmp_path, host="10.0.0.7")
    assert argv[:5] == ["/env/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "org/model"]
    assert "--model" not in argv
    assert value(argv, "--host") == "10.0.0.7"
    assert value(argv, "--tensor-parallel-size") == "2"
    assert value(argv, "--data-parallel-size") == "2"
    assert value(argv, "--api-server-count") == "8"
    assert not {"--enforce-eager", "--kv-cache-memory-bytes", "--block-size"} & set(argv)
    assert "OMP_NUM_THREADS" not in env


def test_adapters_exclude_several_api_servers(tmp_path: Path) -> None:
    argv, env = build(config(gpus=1, enable_lora=True, max_lora_rank=64), tmp_path)
    assert value(argv, "--api-server-count") == "1"
    assert value(argv, "--max-lora-rank") == "64"
    assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


@pytest.mark.parametrize(("gpus", "top_k", "expected"), [(0, 0, False), (0, 50, False), (1, 0, False), (1, 50, True)])
def test_candidate_sets_are_asked_for_only_where_they_exist(
    tmp_path: Path, gpus: int, top_k: int, expected: bool
) -> None:
    argv, _ = build(config({"top_k": top_k}, gpus=gpus), tmp_path)
    assert ("--return-sampling-mask" in argv) is expected


def test_more_arguments_come_last_and_more_environment_wins(tmp_path: Path) -> None:
    argv, env = build(config(gpus=0, extra_args=["--seed", "3"], environment=["OMP_NUM_THREADS=2", "A=b=c"]), tmp_path)
    assert argv[-2:] == ["--seed", "3"]
    assert env["OMP_NUM_THREADS"] == "2"
    assert env["A"] == "b=c"


@pytest.mark.parametrize(
    ("command", "model"),
    [(["apptainer", "exec", "x.sif", "vllm", "serve"], ["org/model"]), (["my-vllm"], ["--model", "org/model"])],
)
def test_a_command_of_the_user_stands_first(tmp_path: Path, command: list[str], model: list[str]) -> None:
    argv, _ = build(config(gpus=0, command=command), tmp_path)
    assert argv[: len(command) + len(model)] == command + model


def test_dtype_and_kv_cache_of_the_server_section(tmp_path: Path) -> None:
    argv, _ = build(config(gpus=0, dtype="bfloat16", kv_cache_memory="64M"), tmp_path)
    assert value(argv, "--dtype") == "bfloat16"
    assert value(argv, "--kv-cache-memory-bytes") == "64M"


def test_the_token_itself_is_nowhere(tmp_path: Path) -> None:
    argv, env = build(config(gpus=0), tmp_path)
    token_file = tmp_path / "run" / "secrets" / "token"
    token = token_file.read_text().strip()
    assert token
    assert not any(token in text for text in [*argv, *env.values()])
    assert env["SLIPSTREAM_TOKEN_FILE"] == str(token_file)


def test_a_missing_interpreter_is_named_with_the_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON_ENV, str(tmp_path / "no-python"))
    with pytest.raises(CommandError, match="no-python"):
        vllm_python()
    monkeypatch.delenv(PYTHON_ENV)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.prefix", str(tmp_path / "env"))
    monkeypatch.setattr("slipstream.serving.command.__file__", str(tmp_path / "a" / "b" / "c" / "command.py"))
    with pytest.raises(CommandError, match=r"setup\.sh.*server\.command"):
        vllm_python()


def test_the_interpreter_beside_the_running_environment_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PYTHON_ENV, raising=False)
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.prefix", str(tmp_path / ".venv"))
    assert vllm_python() == str(python)


MEETING = {"host": "10.0.0.1", "rpc_port": 2001, "master_port": 2002}
ADDRESS = "--data-parallel-address 10.0.0.1 --data-parallel-rpc-port 2001"
MASTER = "--master-addr 10.0.0.1 --master-port 2002"


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (  # an engine in each GPU pair of two nodes
            {"nodes": 2, "gpus": 4, "tensor_parallel_size": 2, "data_parallel_size": 4},
            [
                f"{ADDRESS} --data-parallel-size-local 2",
                f"--headless {ADDRESS} --data-parallel-size-local 2 --data-parallel-start-rank 2",
            ],
        ),
        (  # one engine over two nodes
            {"nodes": 2, "gpus": 8, "tensor_parallel_size": 16, "data_parallel_size": 1},
            [f"--nnodes 2 --node-rank 0 {MASTER}", f"--headless --nnodes 2 --node-rank 1 {MASTER}"],
        ),
        (  # two engines over two nodes each
            {"nodes": 4, "gpus": 8, "tensor_parallel_size": 16, "data_parallel_size": 2},
            [
                f"--nnodes 4 --node-rank 0 {MASTER} {ADDRESS}",
                f"--headless --nnodes 4 --node-rank 1 {MASTER} {ADDRESS}",
                f"--headless --nnodes 4 --node-rank 2 {MASTER} {ADDRESS}",
                f"--headless --nnodes 4 --node-rank 3 {MASTER} {ADDRESS}",
            ],
        ),
        (  # CPU
            {"nodes": 3, "gpus": 0, "data_parallel_size": 3},
            [
                f"{ADDRESS} --data-parallel-size-local 1",
                f"--headless {ADDRESS} --data-parallel-size-local 1 --data-parallel-start-rank 1",
                f"--headless {ADDRESS} --data-parallel-size-local 1 --data-parallel-start-rank 2",
            ],
        ),
        ({"nodes": 1, "gpus": 8, "tensor_parallel_size": 8}, [""]),
    ],
)
def test_several_nodes(tmp_path: Path, server: dict[str, Any], expected: list[str]) -> None:
    configuration = config(**server)
    run = RunFolder.create(tmp_path, "run")
    for node, ending in enumerate(expected):
        place = Place(node, server["nodes"], f"10.0.0.{node + 1}", "abc")
        argv, _ = server_command(configuration, run, 1234, "python", place.host, place, MEETING)
        assert " ".join(argv).endswith(ending)
        assert ("--port" in argv, "--middleware" in argv) == (node == 0, node == 0)
        assert ("--api-server-count" in argv) == (node == 0 and server["gpus"] > 0)
        assert value(argv, "--weight-transfer-config") == '{"backend": "slipstream"}'
        if server.get("data_parallel_size", 1) > 1:
            assert value(argv, "--data-parallel-size") == str(server["data_parallel_size"])
        if server["gpus"] == 0:
            module = "slipstream.serving.headless" if node else "vllm.entrypoints.openai.api_server"
            assert argv[:3] == ["python", "-m", module]
            assert value(argv, "--distributed-executor-backend") == "mp"


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({"nodes": 2, "gpus": 4, "data_parallel_size": 4}, r"data_parallel_size = 4: times .* 2 \* 4 = 8: set it to 8"),
        ({"nodes": 2, "gpus": 4, "tensor_parallel_size": 3}, r"data_parallel_size = 1: times .*change either"),
        (
            {"nodes": 3, "gpus": 2, "tensor_parallel_size": 3, "data_parallel_size": 2},
            "tensor_parallel_size = 3: neither",
        ),
        ({"nodes": 1, "gpus": 4, "tensor_parallel_size": 8}, "tensor_parallel_size = 8: is more than gpus = 4"),
        ({"nodes": 1, "gpus": 4, "tensor_parallel_size": 2, "data_parallel_size": 4}, "data_parallel_size = 4: times"),
        ({"nodes": 2, "gpus": 0, "data_parallel_size": 3}, "data_parallel_size = 3: is no multiple of nodes = 2"),
        (
            {"nodes": 2, "gpus": 0, "tensor_parallel_size": 2, "data_parallel_size": 2},
            "tensor_parallel_size = 2: needs GPUs",
        ),
        (
            {
                "nodes": 2,
                "gpus": 1,
                "data_parallel_size": 2,
                "command": ["p", "-m", "vllm.entrypoints.openai.api_server"],
            },
            "vllm serve",
        ),
    ],
)
def test_what_cannot_be_spread_over_nodes_is_refused(server: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        config(**server)
