"""`AsyncGRPOConfig`: the specification's names and defaults, and what it refuses."""

import dataclasses
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from transformers import TrainingArguments

from slipstream.config import AsyncGRPOConfig
from slipstream.run_config import TrainerSection

ROOT = Path(__file__).resolve().parents[2]

# the specification page's signature: the fields of the algorithm
OWN = {
    "model_init_kwargs": None,
    "dtype": "float32",
    "trust_remote_code": False,
    "router_aux_loss_coef": None,
    "num_generations": 8,
    "max_completion_length": 2048,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "chat_template_kwargs": None,
    "max_tool_calling_iterations": None,
    "vllm_server_base_url": "http://localhost:8000",
    "vllm_server_timeout": 1800.0,
    "epsilon": 0.2,
    "epsilon_high": None,
    "score_centering": True,
    "vllm_importance_sampling_clip_min": 0.5,
    "vllm_importance_sampling_clip_max": 5.0,
    "num_sampler_logprobs": 8,
    "token_budget": None,
    "max_concurrent_rollouts": 512,
    "max_staleness": 4,
    "weight_sync_steps": 1,
    "rollout_worker_timeout": 300.0,
    "log_completions": False,
    "num_completions_to_print": None,
}
# and those of TrainingArguments, where a value says anything; the second group differs from transformers' own
INHERITED = {
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "gradient_accumulation_steps": 1,
    "average_tokens_across_devices": True,
    "max_grad_norm": 1.0,
    "label_smoothing_factor": 0.0,
    "fp16": False,
    "use_liger_kernel": False,
    "logging_strategy": "steps",
    "logging_first_step": False,
    "report_to": "none",
    "eval_strategy": "no",
    "save_strategy": "steps",
    "save_steps": 500,
    "save_total_limit": None,
    "seed": 42,
    "remove_unused_columns": True,
    "train_sampling_strategy": "random",
    "full_determinism": False,
    "use_cpu": False,
} | {
    "learning_rate": 1e-6,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "gradient_checkpointing": True,
    "bf16": None,
    "ignore_data_skip": True,
}


def make(**changes):
    """A configuration for a machine without a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AsyncGRPOConfig(**({"use_cpu": True} | changes))


def plain(value):
    return getattr(value, "value", value)


@pytest.mark.parametrize(("name", "default"), [*OWN.items(), *INHERITED.items()])
def test_a_default_is_the_specification_s(name, default):
    field = {f.name: f for f in dataclasses.fields(AsyncGRPOConfig)}[name]
    assert plain(field.default) == default
    assert type(plain(field.default)) is type(default) or isinstance(default, (int, float))


def test_after_construction_too():
    config = make()
    decided = {"bf16": True, "epsilon_high": 0.2, "report_to": [], "use_cpu": True}
    for name, default in (OWN | INHERITED | decided).items():
        assert plain(getattr(config, name)) == default, name


def test_every_own_field_has_a_help_text():
    for field in dataclasses.fields(AsyncGRPOConfig):
        if field.name in OWN:
            assert field.metadata.get("help"), field.name


def test_it_adds_nothing_else_but_where_the_run_is():
    own = {f.name for f in dataclasses.fields(AsyncGRPOConfig)} - {
        f.name for f in dataclasses.fields(TrainingArguments)
    }
    assert own - set(OWN) == {"vllm_server_token_file", "reward_timeout", "record_samples", "run_dir", "attempt"}
    assert set(OWN) <= own


def test_the_configuration_file_has_the_same_defaults():
    """For every name that both have."""
    fields = {f.name: f for f in dataclasses.fields(AsyncGRPOConfig)}
    common = [name for name in TrainerSection.model_fields if name in fields and name != "report_to"]
    assert len(common) > 25
    for name in common:
        assert plain(fields[name].default) == TrainerSection.model_fields[name].default, name


@pytest.mark.parametrize(("given", "expected"), [({}, True), ({"bf16": False}, False), ({"fp16": True}, False)])
def test_bfloat16_unless_float16_is_asked_for(given, expected):
    try:
        assert make(**given).bf16 is expected
    except ValueError as error:  # transformers refuses float16 on some CPU builds
        assert "fp16" in str(error).lower() and "fp16" in given  # noqa: PT017, PT018


def test_the_upper_epsilon():
    assert make(epsilon=0.1).epsilon_high == 0.1
    assert make(epsilon=0.1, epsilon_high=0.28).epsilon_high == 0.28


def test_dictionaries_may_be_json():
    assert make(chat_template_kwargs='{"enable_thinking": false}').chat_template_kwargs == {"enable_thinking": False}


class Parallelism:
    """What transformers reads of accelerate's ParallelismConfig."""

    def __init__(self, **sizes):
        self.cp_size = self.sp_size = 1
        self.__dict__.update(sizes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_generations": 1}, ["num_generations=1", "at least 2"]),
        ({"temperature": 0.0}, ["temperature=0.0", "0.01"]),
        ({"temperature": 0.009}, ["temperature=0.009", "0.01"]),
        ({"top_p": 0.0}, ["top_p=0.0", "(0, 1]"]),
        ({"top_p": 1.1}, ["top_p=1.1", "(0, 1]"]),
        ({"top_p": 0.9}, ["top_p=0.9", "top_k"]),
        ({"min_p": 0.1}, ["min_p=0.1", "top_k"]),
        ({"max_completion_length": 0}, ["max_completion_length=0", "1 or more"]),
        ({"max_concurrent_rollouts": 0}, ["max_concurrent_rollouts=0", "1 or more"]),
        ({"token_budget": 0}, ["token_budget=0", "1 or more"]),
        ({"num_sampler_logprobs": 0}, ["num_sampler_logprobs=0", "score_centering=False"]),
        ({"max_staleness": -1}, ["max_staleness=-1", "0 or more"]),
        ({"weight_sync_steps": 0}, ["weight_sync_steps=0", "1 or more"]),
        (
            {"vllm_importance_sampling_clip_min": 6.0},
            ["vllm_importance_sampling_clip_min=6.0", "vllm_importance_sampling_clip_max=5.0"],
        ),
        ({"use_liger_kernel": True}, ["use_liger_kernel", "False"]),
        ({"ignore_data_skip": False}, ["ignore_data_skip", "rollout_state.json"]),
        ({"auto_find_batch_size": True}, ["auto_find_batch_size", "token_budget"]),
        ({"label_smoothing_factor": 0.1}, ["label_smoothing_factor", "0"]),
        ({"train_sampling_strategy": "group_by_length"}, ["group_by_length", "'random' or 'sequential'"]),
        ({"deepspeed": {"zero_optimization": {}}}, ["deepspeed", "fsdp"]),
    ],
)
def test_a_refusal_names_the_key_the_value_and_the_way_out(changes, words):
    with pytest.raises(ValueError) as caught:
        make(**changes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["cp_size", "sp_size"])
def test_sequence_parallelism_is_refused(name):
    config = make()
    config.parallelism_config = Parallelism(**{name: 2})
    with pytest.raises(ValueError, match=name):
        config._check()
    config.parallelism_config = Parallelism()
    config._check()


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.01},
        {"top_p": 0.9, "top_k": 512},
        {"min_p": 0.1, "top_k": 512},
        {"min_p": 0.0},
        {"max_staleness": 0},
        {"num_sampler_logprobs": 0, "score_centering": False},
        {"train_sampling_strategy": "sequential"},
    ],
)
def test_what_lies_on_the_border_is_accepted(changes):
    config = make(**changes)
    assert {name: getattr(config, name) for name in changes} == changes


def test_a_schedule_that_decays_needs_a_number_of_steps():
    with pytest.warns(UserWarning, match="linear without max_steps"):
        AsyncGRPOConfig(use_cpu=True, lr_scheduler_type="linear")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        AsyncGRPOConfig(use_cpu=True, lr_scheduler_type="linear", max_steps=10)
        AsyncGRPOConfig(use_cpu=True)


@dataclasses.dataclass
class OwnConfig(AsyncGRPOConfig):
    difficulty: float = 0.5


def test_a_subclass_with_fields_of_its_own_survives_pickling():
    config = OwnConfig(use_cpu=True, difficulty=0.7, output_dir="somewhere", num_generations=4)
    again = pickle.loads(pickle.dumps(config))
    assert type(again) is OwnConfig
    assert (again.difficulty, again.output_dir, again.num_generations) == (0.7, "somewhere", 4)
    assert again.to_dict() == config.to_dict()


def test_the_import_needs_neither_torch_nor_vllm():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['vllm'] = None\n"
        "from slipstream import AsyncGRPOConfig\n"
        "import dataclasses\n"
        "print(next(f.default for f in dataclasses.fields(AsyncGRPOConfig) if f.name == 'max_staleness'))\n"
        "heavy = [m for m in ('torch', 'vllm', 'datasets', 'prefect') if sys.modules.get(m)]\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "4"
