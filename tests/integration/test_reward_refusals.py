"""A reward that cannot run in the rollout process is refused by the trainer before the server is waited for."""

import functools
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from datasets import Dataset

from slipstream.learner.trainer import AsyncGRPOTrainer
from slipstream.rollout.loop import AsyncRolloutLoop
from tests.learner_replay import no_reward, replay_config, tiny_model
from tests.models import byte_tokenizer

pytestmark = pytest.mark.integration


def closure() -> Callable[..., list[float]]:
    scale = 2.0

    def scaled(completions: list[Any], **_: Any) -> list[float]:
        return [scale] * len(completions)

    return scaled


def trainer_with(tmp_path: Path, reward: Any, url: str, kind: type[AsyncGRPOTrainer] = AsyncGRPOTrainer) -> Any:
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": "a"}]}])
    config = replay_config(tmp_path, vllm_server_base_url=url, vllm_server_timeout=1800.0)
    return kind(tiny_model(), reward, config, dataset, processing_class=byte_tokenizer())


@pytest.fixture
def nobody_s_url() -> Any:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("reward", [lambda **_: [0.0], closure(), functools.partial(closure())])
def test_a_lambda_or_closure_is_a_type_error_before_anything_starts(
    tmp_path: Path, nobody_s_url: str, reward: Any
) -> None:
    trainer = trainer_with(tmp_path, [no_reward, reward], nobody_s_url)
    before = psutil.Process().children()
    with pytest.raises(TypeError, match=r"(?s)reward_funcs = .*(lambda|closure).*module level"):
        trainer.train()
    assert psutil.Process().children() == before


def test_so_is_a_loop_class_of_a_function(tmp_path: Path, nobody_s_url: str) -> None:
    class Local(AsyncRolloutLoop):
        pass

    class Trainer(AsyncGRPOTrainer):
        loop_cls = Local

    with pytest.raises(TypeError, match=r"loop_cls = .*Local"):
        trainer_with(tmp_path, no_reward, nobody_s_url, Trainer).train()
