"""`AsyncGRPOConfig`: the specification's names and defaults, and what it refuses."""

import dataclasses
import math
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from transformers import TrainingArguments

from slipstream.config import AsyncGRPOConfig
from slipstream.preflight import without_effect
from slipstream.run_config import RunConfig
from slipstream.trainer_section import TrainerSection
from tests.page_signature import FACTORY, PAGE

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {f.name: f for f in dataclasses.fields(AsyncGRPOConfig)}

# beyond the page: a newer release's name for an argument, and where the run is
BEYOND_THE_PAGE = {
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
    "vllm_server_token_file",
    "record_samples",
    "rollout_worker_restarts",
    "reward_timeout",
    "run_dir",
    "attempt",
    "server_patience",
}


def make(**changes):
    """A configuration for a machine without a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AsyncGRPOConfig(**({"use_cpu": True} | changes))


def plain(value):
    return getattr(value, "value", value)


def kinds(annotation):
    """The members of a union, in the page's spelling."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return {part.replace("dict[str, typing.Any]", "dict") for part in text.split(" | ")}


@pytest.mark.parametrize("name", PAGE)
def test_type_and_default_are_the_specification_s(name):
    field, (kind, default) = FIELDS[name], PAGE[name]
    assert kinds(field.type) == kinds(kind)
    if default is FACTORY:
        assert field.default is dataclasses.MISSING
    else:
        assert plain(field.default) == default
        assert type(plain(field.default)) is type(default) or isinstance(default, (int, float))


def test_no_field_is_missing_and_none_is_added_unseen():
    assert set(FIELDS) - set(PAGE) == BEYOND_THE_PAGE
    assert set(PAGE) <= set(FIELDS)


def test_after_construction_too():
    """But for what transformers and the page derive from others."""
    derived = {
        "output_dir": "trainer_output",
        "bf16": True,
        "epsilon_high": 0.2,
        "report_to": [],
        "use_cpu": True,
        "debug": [],
        "include_for_metrics": [],
        "ddp_find_unused_parameters": False,
        "dataloader_pin_memory": False,  # on CPU
        "disable_tqdm": False,
    }
    config = make(disable_tqdm=False)
    for name, (_, default) in PAGE.items():
        if name not in ("accelerator_config", "local_rank"):
            assert plain(getattr(config, name)) == derived.get(name, default), name


def test_every_own_field_has_a_help_text():
    inherited = {f.name for f in dataclasses.fields(TrainingArguments)}
    for name, field in FIELDS.items():
        assert name in inherited or field.metadata.get("help"), name


def test_the_configuration_file_has_the_same_defaults():
    """For every name that both have."""
    common = [name for name in TrainerSection.model_fields if name in FIELDS and name != "report_to"]
    assert len(common) > 25
    for name in common:
        assert plain(FIELDS[name].default) == TrainerSection.model_fields[name].default, name


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "fp8"}, ["dtype = 'fp8'", "'float32'"]),
        ({"router_aux_loss_coef": -0.1}, ["router_aux_loss_coef = -0.1", "at least 0", "0: off"]),
        ({"num_generations": 1}, ["num_generations = 1", "at least 2"]),
        ({"temperature": 0.0}, ["temperature = 0.0", "at least 0.01", "ratio does not exist"]),
        ({"temperature": 0.009}, ["temperature = 0.009", "at least 0.01"]),
        ({"top_p": 0.0}, ["top_p = 0.0", "above 0 and at most 1"]),
        ({"top_p": 1.1}, ["top_p = 1.1", "above 0 and at most 1"]),
        ({"top_p": 0.9}, ["top_p = 0.9", "top_k = 512"]),
        ({"min_p": 0.1}, ["min_p = 0.1", "top_k = 512"]),
        ({"min_p": 1.1}, ["min_p = 1.1", "at least 0 and at most 1"]),
        ({"top_k": -1}, ["top_k = -1", "at least 0", "0: off"]),
        ({"max_completion_length": 0}, ["max_completion_length = 0", "at least 1"]),
        ({"max_concurrent_rollouts": 0}, ["max_concurrent_rollouts = 0", "at least 1"]),
        ({"max_concurrent_rollouts": 7}, ["max_concurrent_rollouts = 7", "num_generations = 8", "raise it"]),
        ({"max_tool_calling_iterations": 0}, ["max_tool_calling_iterations = 0", "at least 1", "None"]),
        ({"token_budget": 0}, ["token_budget = 0", "at least 1"]),
        ({"epsilon": 0.0}, ["epsilon = 0.0", "above 0 and below 1"]),
        ({"epsilon": 1.0}, ["epsilon = 1.0", "above 0 and below 1"]),
        ({"epsilon_high": 0.0}, ["epsilon_high = 0.0", "above 0"]),
        ({"num_sampler_logprobs": 0}, ["num_sampler_logprobs = 0", "score_centering = false"]),
        ({"num_sampler_logprobs": -1, "score_centering": False}, ["num_sampler_logprobs = -1", "at least 0"]),
        ({"max_staleness": -1}, ["max_staleness = -1", "at least 0"]),
        ({"weight_sync_steps": 0}, ["weight_sync_steps = 0", "at least 1"]),
        ({"vllm_importance_sampling_clip_min": 6.0}, ["vllm_importance_sampling_clip_min = 6.0", "at most 1"]),
        ({"vllm_importance_sampling_clip_max": 0.5}, ["vllm_importance_sampling_clip_max = 0.5", "at least 1"]),
        ({"vllm_server_timeout": 0.0}, ["vllm_server_timeout = 0.0", "above 0", "Seconds"]),
        ({"rollout_worker_timeout": 0.0}, ["rollout_worker_timeout = 0.0", "above 0", "Seconds"]),
        ({"reward_timeout": 0.0}, ["reward_timeout = 0.0", "above 0", "Seconds"]),
        ({"vllm_server_base_url": "localhost:8000"}, ["vllm_server_base_url = 'localhost:8000'", "http://"]),
        ({"num_completions_to_print": 0, "log_completions": True}, ["num_completions_to_print = 0", "at least 1"]),
        ({"max_steps": 0}, ["max_steps = 0", "set it to -1"]),
        ({"max_steps": -2}, ["max_steps = -2", "at least -1"]),
        ({"num_train_epochs": 0.0}, ["num_train_epochs = 0.0", "above 0"]),
        ({"learning_rate": 0.0}, ["learning_rate = 0.0", "above 0"]),
        ({"warmup_steps": -1}, ["warmup_steps = -1", "at least 0"]),
        ({"adam_beta1": 1.0}, ["adam_beta1 = 1.0", "below 1"]),
        ({"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps = 0", "at least 1"]),
        ({"save_total_limit": 0}, ["save_total_limit = 0", "at least 1"]),
        ({"seed": -1}, ["seed = -1", "at least 0"]),
        ({"bf16": True, "fp16": True}, ["bf16 = True", "set one of them to false"]),
        ({"temperature": "hot"}, ["temperature = 'hot'", "must be a number"]),
        ({"temperature": math.inf}, ["temperature = inf", "must be a number that is finite"]),
        ({"learning_rate": math.inf}, ["learning_rate = inf", "must be a number that is finite"]),
        ({"learning_rate": None}, ["learning_rate = None", "must be a number"]),
        ({"num_generations": 8.5}, ["num_generations = 8.5", "must be a whole number"]),
        ({"max_staleness": True}, ["max_staleness = True", "must be a whole number"]),
        ({"max_steps": None}, ["max_steps = None", "must be a whole number"]),
        ({"token_budget": 100.5}, ["token_budget = 100.5", "must be a whole number"]),
        ({"score_centering": "false"}, ["score_centering = 'false'", "must be true or false"]),
        ({"max_tool_calling_iterations": "3"}, ["max_tool_calling_iterations = '3'", "must be at least 1"]),
        ({"report_to": 5}, ["report_to = 5", "a list of names"]),
        ({"report_to": ["none", "tensorboard"]}, ["'none' stands alone"]),
    ],
)
def test_a_refusal_names_the_key_the_value_and_the_way_out(changes, words):
    with pytest.raises(ValueError) as caught:
        make(**changes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.01},
        {"top_p": 0.9, "top_k": 512},
        {"min_p": 0.1, "top_k": 512},
        {"min_p": 0.0},
        {"max_staleness": 0},
        {"max_staleness": 0, "weight_sync_steps": 4},
        {"num_sampler_logprobs": 0, "score_centering": False},
        {"train_sampling_strategy": "sequential"},
        {"max_concurrent_rollouts": 8},
        {"max_grad_norm": 0.0},
        {"num_train_epochs": 0.5},
        {"num_train_epochs": 2},
        {"max_steps": 10, "warmup_steps": 0.1, "lr_scheduler_type": "linear"},
        {"max_grad_norm": math.inf, "epsilon_high": math.inf, "vllm_importance_sampling_clip_max": math.inf},
    ],
)
def test_what_lies_on_the_border_is_accepted(changes):
    config = make(**changes)
    assert {name: getattr(config, name) for name in changes} == changes


# accepted, but said: (what is set, key, words)
REMARKS = [
    ({"max_steps": 10, "num_train_epochs": 2.0}, "num_train_epochs", "is not used: max_steps = 10 decides"),
    (
        {"max_steps": 10, "warmup_steps": 10, "lr_scheduler_type": "constant_with_warmup"},
        "warmup_steps",
        "training ends before the warm-up does: max_steps = 10",
    ),
    ({"epsilon_high": 0.1}, "epsilon_high", "is below epsilon = 0.2"),
    ({"num_sampler_logprobs": 4, "score_centering": False}, "num_sampler_logprobs", "leave it out"),
    ({"token_budget": 2048}, "token_budget", "lower max_completion_length"),
    ({"num_completions_to_print": 4}, "num_completions_to_print", "set log_completions = true"),
]


@pytest.mark.parametrize(("changes", "key", "words"), REMARKS)
def test_what_has_no_effect_is_said(changes, key, words):
    with pytest.warns(UserWarning, match=re.escape(f"{key} = {changes[key]}: ")) as caught:
        AsyncGRPOConfig(use_cpu=True, **changes)
    assert [words in str(warning.message) for warning in caught] == [True]


@pytest.mark.parametrize(("changes", "key", "words"), REMARKS)
def test_a_configuration_file_says_it_before_anything_is_started(changes, key, words):
    config = RunConfig(model={"name": "m"}, data={"source": "d"}, trainer=changes)
    [problem] = without_effect(config)
    assert (problem.key, problem.value, problem.severity) == (f"trainer.{key}", changes[key], "warning")
    assert words in problem.message


def test_the_defaults_say_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        AsyncGRPOConfig(use_cpu=True)
    assert not without_effect(RunConfig(model={"name": "m"}, data={"source": "d"}))


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
