"""A real server in tests: a run folder, its leader, and what to ask it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream.config_file import dump_config
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder, read_json, write_atomic
from slipstream.serving.control import ServerControl, ServerError
from slipstream.serving.transport import ParameterInfo, SlipstreamTransport

START_S = 300.0
MAX_MODEL_LEN = 512


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float = 240.0) -> Any:
    """The first true value of `condition`; fails after the deadline."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not happen within {deadline_s:g} s"
        time.sleep(0.05)
    return value


def new_run(root: Path, model: Path, run_id: str, **server: Any) -> RunFolder:
    """A run folder whose server is a CPU server of `model`."""
    config = RunConfig.model_validate(
        {
            "model": {"name": str(model)},
            "data": {"source": "none.jsonl"},
            "trainer": {"max_completion_length": 256},
            "server": {"gpus": 0, "max_model_len": MAX_MODEL_LEN, "kv_cache_memory": "64M", **server},
            "recovery": {"max_idle_gpu_minutes": 1440},  # learners of tests have folders of their own: it hears of none
        }
    )
    run = RunFolder.create(root, run_id)
    write_atomic(run.run_file, dump_config(config))
    run.begin_attempt(None, 0)
    return run


def start_leader(run: RunFolder, attempt: int = 1, **env: str) -> subprocess.Popen[bytes]:
    """The server job's leader as its own process; the caller ends it."""
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen(
        [sys.executable, "-m", "slipstream.serving.main", str(run.path), "--attempt", str(attempt)],
        env={**os.environ, **offline, **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@dataclass
class VllmServer:
    """A healthy server and where everything of it lies."""

    run: RunFolder
    model: Path
    base_url: str
    leader: subprocess.Popen[bytes]

    @property
    def token_file(self) -> Path:
        return self.run.token_file

    @property
    def token(self) -> str:
        return self.token_file.read_text().strip()

    def control(self, timeout_s: float = 60.0) -> ServerControl:
        return ServerControl(self.base_url, self.token_file, timeout_s)

    def generate(self, token_ids: list[int], timeout_s: float = 120.0, **sampling: Any) -> dict[str, Any]:
        """The first choice of /inference/v1/generate."""
        sampling = {"temperature": 1.0, "logprobs": 0, "ignore_eos": True, "max_tokens": 16, **sampling}
        body = {"model": str(self.model), "token_ids": token_ids, "sampling_params": sampling}
        with self.control(timeout_s) as control:
            return dict(control.call("POST", "/inference/v1/generate", json=body).json()["choices"][0])


@contextlib.contextmanager
def serving(run: RunFolder, model: Path) -> Iterator[VllmServer]:
    """Start a leader, wait until it has published its endpoint, and end it with TERM."""
    leader = start_leader(run)
    try:

        def endpoint() -> Any:
            assert leader.poll() is None, f"the leader ended: {read_exit(run)}"
            return read_json(run.endpoint_file())

        url = wait_for(endpoint, "the endpoint file", START_S)["url"]
        yield VllmServer(run, model, url, leader)
    finally:
        leader.terminate()
        try:
            leader.wait(60)
        except subprocess.TimeoutExpired:
            leader.kill()
            leader.wait(60)


def read_exit(run: RunFolder) -> dict[str, Any]:
    """The only exit record in the run folder, or {}."""
    records = [read_json(path) for path in sorted((run.path / "exit").glob("*.json"))]
    assert len(records) <= 1
    return dict(records[0]) if records else {}


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below `pid`."""
    return psutil.Process(pid).children(recursive=True)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def frozen(processes: list[psutil.Process]) -> Any:
    """Stop the processes with SIGSTOP for the length of a `with` block."""

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)

    return block()


def stop_in_a_delivery(rank: psutil.Process, control: ServerControl) -> None:
    """Stop the learner's rank 0 in the middle of a delivery, while the server is paused for the weights."""

    def paused() -> bool:
        try:
            return control.is_paused()
        except ServerError as error:
            if not error.timed_out:
                raise
            return True  # its engine answers nobody while it waits for the weights of the rank that is stopped

    def caught() -> bool:
        if not control.is_paused():
            return False
        rank.suspend()
        if paused():
            return True
        rank.resume()
        return False

    wait_for(caught, "a delivery")


def end_delivery(server: VllmServer) -> None:
    """Have a server work again that a learner, which was killed, may have left in the middle of a delivery."""
    with server.control() as control:
        transport = SlipstreamTransport(control, torch.device("cpu"), "end-delivery", 1, 60.0)
        transport.connect()
        transport.close()


# --- comparing with transformers


def logprobs_of(choice: dict[str, Any]) -> torch.Tensor:
    """The server's log-probabilities of the sampled tokens: float64 (tokens,)."""
    return torch.tensor([item["logprob"] for item in choice["logprobs"]["content"]], dtype=torch.float64)


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, prompt: list[int], completion: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """transformers' log-probabilities of the same tokens: float64 (tokens,)."""
    logits = model(torch.tensor([prompt + completion])).logits[0].double() / temperature
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(completion)[:, None])[:, 0]


def largest_difference(
    choice: dict[str, Any], model: PreTrainedModel, prompt: list[int], temperature: float = 1.0
) -> float:
    """Largest absolute difference in nats between the server's log-probabilities and those of `model`."""
    reference = reference_logprobs(model, prompt, choice["token_ids"], temperature)
    return float((logprobs_of(choice) - reference).abs().max())


def load(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def delivery(model: PreTrainedModel) -> tuple[list[ParameterInfo], Iterator[tuple[str, torch.Tensor]]]:
    """What to send of a model."""
    parameters = list(model.named_parameters())
    return [ParameterInfo(name, p.dtype, tuple(p.shape)) for name, p in parameters], iter(parameters)
