"""A script written for the specification's API, against a server started by the specification's command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.learner.checkpoint import complete_checkpoints
from slipstream.nodes import free_port
from slipstream.process import spawn, stop
from slipstream.serving.command import vllm_python
from slipstream.serving.control import ServerControl
from slipstream.serving.probe import probe

pytestmark = pytest.mark.integration

# no __main__ guard, and the reward function is defined in the script: as on the page
SCRIPT = """
from datasets import Dataset
from slipstream import AsyncGRPOConfig, AsyncGRPOTrainer

print("script runs", flush=True)
dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": f"count {i}"}]} for i in range(60)])


def reward_func(completion_ids, **kwargs):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


trainer = AsyncGRPOTrainer(
    model="MODEL",
    reward_funcs=reward_func,
    args=AsyncGRPOConfig(
        output_dir="OUT", vllm_server_base_url="URL", max_steps=3, save_steps=3, token_budget=256, num_generations=4,
        max_completion_length=12, learning_rate=1e-3, use_cpu=True, bf16=False, disable_tqdm=True,
    ),
    train_dataset=dataset,
)
trainer.train()
print("trained", trainer.state.global_step, trainer.state.log_history[0]["sampling/sampling_logp_difference/max"], flush=True)
"""

# the page's flags; the rest makes it run on a CPU
PAGE = ["--weight-transfer-config", '{"backend": "slipstream"}', "--logprobs-mode", "processed_logprobs"]
CPU = ["--dtype", "float32", "--enforce-eager", "--distributed-executor-backend", "uni", "--block-size", "32"]


def test_the_page_s_script_trains_after_a_change_of_its_import(tiny_model_tied: Path, tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    argv = [vllm_python(), "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model_tied)]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", *PAGE, *CPU]
    argv += ["--kv-cache-memory-bytes", "64M"]
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    env = {**os.environ, **quiet, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    log = tmp_path / "server.log"
    server = spawn(argv, log, {**env, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    try:
        url = f"http://127.0.0.1:{port}"
        with ServerControl(url, None, 60.0) as control:
            control.wait_healthy(300, alive=lambda: server.poll() is None)
            assert not probe(control).has_generate_route, "this server has only the fallback"
        script = tmp_path / "train_async_grpo.py"
        text = SCRIPT.replace("MODEL", str(tiny_model_tied)).replace("OUT", str(tmp_path / "out")).replace("URL", url)
        script.write_text(text)
        done = subprocess.run(
            [sys.executable, str(script)],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    finally:
        stop(server)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    trained = [line.split() for line in done.stdout.splitlines() if line.startswith("trained")]
    assert trained[0][1] == "3"
    assert float(trained[0][2]) < 1e-4, "before the first step trainer and server agree"
    steps = [step for step, _ in complete_checkpoints(tmp_path / "out")]
    assert steps == [3]
    state = json.loads((tmp_path / "out" / "checkpoint-3" / "rollout_state.json").read_text())
    assert state["rewards"] == ["reward_func"]
