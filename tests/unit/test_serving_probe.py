import json
from dataclasses import replace
from typing import Any

import pytest

from slipstream.serving.probe import Capabilities, check, describe, kv_cache_tokens

GOOD = Capabilities(
    model="m",
    max_model_len=4096,
    dtype="float32",
    max_logprobs=9,
    logprobs_mode="processed_logprobs",
    transfer_backend="slipstream",
    has_server_info=True,
    has_generate_route=True,
    has_dev_routes=True,
    sampling_mask=True,
    lora=True,
    max_lora_rank=32,
    max_num_seqs=64,
)
NEEDS: dict[str, Any] = {
    "max_model_len": 4096,
    "num_sampler_logprobs": 8,
    "num_generations": 8,
    "sampling_mask": True,
    "lora_rank": 32,
}


def test_a_server_with_everything_has_no_problem() -> None:
    assert check(GOOD, **NEEDS) == []


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"has_dev_routes": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"max_logprobs": 8}, "--max-logprobs 9"),
        ({"max_model_len": 4095}, "--max-model-len 4096"),
        ({"max_num_seqs": 7}, "--max-num-seqs 8"),
        ({"transfer_backend": None}, "--weight-transfer-config"),
        ({"transfer_backend": "ipc"}, "--weight-transfer-config"),
        ({"sampling_mask": False}, "--return-sampling-mask"),
        ({"lora": False, "max_lora_rank": None}, "--enable-lora"),
        ({"max_lora_rank": 16}, "--max-lora-rank 32"),
    ],
)
def test_each_lack_is_one_problem_that_names_its_flag(change: dict[str, Any], flag: str) -> None:
    problems = check(replace(GOOD, **change), **NEEDS)
    assert len(problems) == 1
    assert flag in problems[0]


def test_what_is_not_needed_is_no_problem() -> None:
    assert check(replace(GOOD, transfer_backend=None, lora=False, sampling_mask=False), weight_transfer=False) == []


def test_unlimited_log_probabilities_are_enough() -> None:
    assert check(replace(GOOD, max_logprobs=-1), **NEEDS) == []


def test_a_server_that_says_nothing_is_not_accused() -> None:
    assert check(Capabilities(model="m", has_dev_routes=True), max_model_len=10, num_sampler_logprobs=8) == []


def test_capabilities_survive_json() -> None:
    assert Capabilities.from_plain(json.loads(json.dumps(GOOD.to_plain())) | {"later": 1}) == GOOD


def test_describe_reads_the_servers_configuration() -> None:
    facts = describe(
        {
            "model_config": {
                "dtype": "torch.bfloat16",
                "max_logprobs": 20,
                "logprobs_mode": "raw_logprobs",
                "max_model_len": 77,
            },
            "weight_transfer_config": {"backend": "nccl"},
            "lora_config": {"max_lora_rank": 16, "max_loras": 4},
            "scheduler_config": {"max_num_seqs": 12},
        }
    )
    assert Capabilities(model="m", **facts) == Capabilities(
        model="m",
        dtype="bfloat16",
        max_logprobs=20,
        logprobs_mode="raw_logprobs",
        max_model_len=77,
        transfer_backend="nccl",
        lora=True,
        max_lora_rank=16,
        max_loras=4,
        max_num_seqs=12,
        has_server_info=True,
    )


def test_kv_cache_is_summed_over_engines() -> None:
    line = 'vllm:cache_config_info{block_size="32",engine="%d",kv_cache_size_tokens="%s",num_gpu_blocks="10"} 1.0'
    assert kv_cache_tokens("# HELP\n" + line % (0, "640") + "\n" + line % (1, "320")) == 960
    assert kv_cache_tokens(line % (0, "None")) == 320
    assert kv_cache_tokens("nothing") is None
