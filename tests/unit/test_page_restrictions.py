"""The restrictions that the specification's page lists are answered by an error that names the way out.

Those of a configuration alone; of its values see `test_config.py`, of models `tests/model/test_tree_attention.py`.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
from accelerate.parallelism_config import ParallelismConfig
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig

from slipstream.config import AsyncGRPOConfig
from slipstream.inherited_arguments import version_problems
from slipstream.learner.trainer import AsyncGRPOTrainer
from slipstream.packing.attention import check_model
from slipstream.rewards import accuracy_reward
from tests.learner_replay import tiny_model

NO_MODEL = "there-is-no-such-model"  # what is wrong is said before a model is looked for


def dataset(content: Any = "2 + 2?", **columns: Any) -> Dataset:
    return Dataset.from_list([{"prompt": [{"role": "user", "content": content}], **columns}])


def config(**changes: Any) -> AsyncGRPOConfig:
    return AsyncGRPOConfig(**({"use_cpu": True, "bf16": False} | changes))


def trainer(rewards: Any = accuracy_reward, data: Any = None, **others: Any) -> None:
    AsyncGRPOTrainer(NO_MODEL, rewards, config(), dataset() if data is None else data, **others)


PARTS = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
RESTRICTIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "prompts are conversational": (
        lambda: trainer(data=Dataset.from_list([{"prompt": "2 + 2?"}])),
        r"'prompt' must be a list of messages .*'2 \+ 2\?'.*for plain text use \[\{",
    ),
    "there are prompts": (
        lambda: trainer(data=Dataset.from_list([{"question": "2 + 2?"}])),
        r"no 'prompt' column, only question",
    ),
    "a reward is no model's name": (
        lambda: trainer("org/reward-model"),
        r"'org/reward-model' is not callable; .*pass a function",
    ),
    "a reward is no model": (lambda: trainer(tiny_model()), r"Qwen3ForCausalLM is a model; .*pass a function"),
    "there is a reward": (lambda: trainer([]), r"reward_funcs is missing: pass one function or a list"),
    "DeepSpeed": (lambda: config(deepspeed="zero3.json"), r"deepspeed = 'zero3.json'.*use fsdp"),
    "FSDP2": (lambda: config(fsdp=True, fsdp_config={"version": 1}), r"fsdp_config.*set version to 2"),
    "context parallelism": (
        lambda: config(parallelism_config=ParallelismConfig(cp_size=2)),
        r"(?s)parallelism_config.*cp_size=2.*use data parallel ranks",
    ),
    "sequence parallelism": (
        lambda: config(parallelism_config=ParallelismConfig(sp_size=2)),
        r"(?s)parallelism_config.*sp_size=2.*use data parallel ranks",
    ),
    "Liger": (lambda: config(use_liger_kernel=True), r"use_liger_kernel = True.*set it to False"),
    "an adapter on lm_head": (
        lambda: trainer(peft_config=LoraConfig(target_modules=["q_proj", "lm_head"])),
        r"target_modules has 'lm_head'.*take it out",
    ),
    "attention sinks": (lambda: check_model(AutoConfig.for_model("gpt_oss")), r"'gpt_oss'.*sinks.*for example Qwen3"),
    "other layers": (lambda: check_model(AutoConfig.for_model("mamba2")), r"'mamba2'.*for example Qwen3"),
    "image columns": (lambda: trainer(data=dataset(image="cat.png")), r"has the column 'image': remove it"),
    "images in prompts": (lambda: trainer(data=dataset(PARTS)), r"images are not supported: write its text"),
    "top-p without top-k": (lambda: config(top_p=0.95), r"top_p = 0.95: needs top_k > 0"),
    "min-p without top-k": (lambda: config(min_p=0.1), r"min_p = 0.1: needs top_k > 0"),
    "a decay without an end": (lambda: config(lr_scheduler_type="cosine"), r"'cosine': .*set max_steps"),
}


@pytest.mark.parametrize("name", RESTRICTIONS)
def test_a_restriction_is_an_error_that_names_the_way_out(name):
    attempt, words = RESTRICTIONS[name]
    with pytest.raises(ValueError, match=words):
        attempt()


@pytest.mark.parametrize(
    ("version", "accepted"), [("4.57.1", False), ("5.1.0", False), ("5.2.0", True), ("6.0.dev0", True)]
)
def test_the_oldest_transformers(version, accepted):
    problems = version_problems(version)
    assert (not problems) == accepted
    for _, value, message in problems:
        assert value == version
        assert "pip install -U 'transformers>=5.2'" in message


def test_an_old_transformers_is_refused_at_construction(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.1.0")
    with pytest.raises(ValueError, match=re.escape("transformers = '5.1.0': is too old")):
        config()
