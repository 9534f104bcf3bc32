"""The command line and environment of our own vLLM server: a pure function of the configuration."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.nodes import LOOPBACK, Place
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder
from slipstream.serving.auth import TOKEN_FILE_ENV
from slipstream.serving.nodes import parallel_arguments
from slipstream.serving.plugin import BACKEND

PYTHON_ENV = "SLIPSTREAM_VLLM_PYTHON"
CPU_KV_CACHE = "256M"  # vLLM's own choice on CPU is a share of the machine's whole memory
CPU_BLOCK_SIZE = 32
GPU_API_SERVERS = 8  # one cannot serialize log-probabilities as fast as a GPU produces them


class CommandError(RuntimeError):
    """There is nothing to start a server with."""


def vllm_python() -> str:
    """The interpreter of the environment that has vLLM.

    In this order: what SLIPSTREAM_VLLM_PYTHON names, .venv-vllm beside the running environment, .venv-vllm of the
    working tree. Raises CommandError where none is there.
    """
    named = os.environ.get(PYTHON_ENV)
    if named:
        if os.access(named, os.X_OK):
            return named
        raise CommandError(f"{PYTHON_ENV} = {named!r} is no executable file: set it to the Python that has vLLM")
    roots = [Path(sys.prefix).parent, Path(__file__).resolve().parents[2], Path.cwd()]
    candidates = list(dict.fromkeys(root / ".venv-vllm" / "bin" / "python" for root in roots))
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return str(candidate)
    raise CommandError(
        f"no Python with vLLM: looked for {', '.join(map(str, candidates))}. "
        f"Run ./setup.sh, or set {PYTHON_ENV}, or server.command, or server.url"
    )


def server_command(
    config: RunConfig,
    run: RunFolder,
    port: int,
    python: str,
    host: str = LOOPBACK,
    place: Place | None = None,
    meeting: Mapping[str, Any] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Arguments, and what to add to the environment, of the server of a run.

    Args:
        config: its `server` section decides; `trainer` gives what the samples need.
        run: names the token's file; the token itself is in neither result.
        port: TCP port to listen on.
        python: interpreter that has vLLM; not used where `server.command` is set.
        host: the address to listen on, and no other.
        place: which of several nodes it is for, None: the only one. Further nodes have no API server, so no port.
        meeting: where node 0 of several listens for the others (`slipstream.serving.nodes`).
    """
    further = place is not None and place.node > 0
    argv = _program(config, python, further)
    if not further:
        argv += ["--host", host, "--port", str(port)]
    argv += _model_arguments(config)
    argv += _sampling_arguments(config)
    argv += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    if not further:
        argv += ["--middleware", "slipstream.serving.auth.RequireToken", "--disable-uvicorn-access-log"]
    argv += _cpu_arguments(config) if config.server.gpus == 0 else _gpu_arguments(config, further)
    if place is not None:
        argv += parallel_arguments(config.server, place, meeting or {})
    if config.server.enable_lora:
        argv += ["--enable-lora", "--max-lora-rank", str(config.server.max_lora_rank)]
    return argv + list(config.server.extra_args), _environment(config, run)


def _program(config: RunConfig, python: str, further: bool) -> list[str]:
    command = list(config.server.command)
    if not command:
        # several API servers exist only behind `vllm serve`, which the CPU distribution cannot run
        on_cpu = config.server.gpus == 0
        module = ["vllm.entrypoints.cli.main", "serve"]
        if on_cpu:
            module = ["slipstream.serving.headless" if further else "vllm.entrypoints.openai.api_server"]
        command = [python, "-m", *module]
    # `vllm serve` takes the model by position only, the module by option only
    return [*command, config.model.name] if command[-1] == "serve" else [*command, "--model", config.model.name]


def _model_arguments(config: RunConfig) -> list[str]:
    server, model = config.server, config.model
    argv = ["--dtype", model.dtype if server.dtype == "auto" else server.dtype]
    if model.revision:
        argv += ["--revision", model.revision, "--tokenizer-revision", model.revision]
    if model.trust_remote_code:
        argv.append("--trust-remote-code")
    argv += ["--max-model-len", str(server.max_model_len), "--max-num-seqs", str(server.max_num_seqs)]
    kv_cache = server.kv_cache_memory or (CPU_KV_CACHE if server.gpus == 0 else None)
    return [*argv, "--kv-cache-memory-bytes", kv_cache] if kv_cache else argv


def _sampling_arguments(config: RunConfig) -> list[str]:
    argv = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    argv += ["--max-logprobs", str(config.trainer.num_sampler_logprobs + 1)]
    argv += ["--generation-config", "vllm"]  # sampling settings come from the run, not from the model's folder
    if config.trainer.top_k > 0 and config.server.gpus > 0:
        argv.append("--return-sampling-mask")
    return argv


def _cpu_arguments(config: RunConfig) -> list[str]:
    executor = "mp" if _many_engines(config) else "uni"
    argv = ["--enforce-eager", "--distributed-executor-backend", executor, "--block-size", str(CPU_BLOCK_SIZE)]
    return argv + (["--data-parallel-size", str(config.server.data_parallel_size)] if _many_engines(config) else [])


def _many_engines(config: RunConfig) -> bool:
    """Several engines on CPU need their model in a process of its own each; one keeps it in the engine's."""
    return config.server.data_parallel_size > 1


def _gpu_arguments(config: RunConfig, further: bool) -> list[str]:
    server = config.server
    api_servers = 1 if server.enable_lora else GPU_API_SERVERS  # vLLM refuses more with adapters loaded at run time
    return [
        *("--tensor-parallel-size", str(server.tensor_parallel_size)),
        *("--data-parallel-size", str(server.data_parallel_size)),
        *([] if further else ("--api-server-count", str(api_servers))),
    ]


def _environment(config: RunConfig, run: RunFolder) -> dict[str, str]:
    env = {
        TOKEN_FILE_ENV: str(run.token_file),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if config.server.enable_lora:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if config.server.gpus == 0:
        env |= {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if _many_engines(config) else "0",
            "CUDA_VISIBLE_DEVICES": "",
        }
    for line in config.server.environment:
        name, value = line.split("=", 1)
        env[name] = value
    return env
