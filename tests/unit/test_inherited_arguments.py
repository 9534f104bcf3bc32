"""Each training argument that is inherited from transformers is honoured, refused or warned about."""

import dataclasses
import re
import warnings
from typing import Any

import pytest
from accelerate.parallelism_config import ParallelismConfig
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from slipstream.config import AsyncGRPOConfig
from slipstream.config_rules import Impossible
from slipstream.inherited_arguments import ARGUMENTS, device_problems

FIELDS = {f.name: f for f in dataclasses.fields(TrainingArguments)}

# for each argument that is refused: the values that are, and words of the way out
REFUSED: dict[str, tuple[list[Any], str]] = {
    "lr_scheduler_type": (["reduce_lr_on_plateau", "greedy"], "use another schedule"),
    "optim": (["lomo", "adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise"], "for example adamw_torch_fused"),
    "average_tokens_across_devices": ([False], "leave it out"),
    "label_smoothing_factor": ([0.1], "leave it out"),
    "bf16_full_eval": ([True], "leave it out"),
    "fp16_full_eval": ([True], "leave it out"),
    "torch_compile": ([True], "leave it out"),
    "torch_compile_backend": (["inductor"], "leave it out"),
    "torch_compile_mode": (["default"], "leave it out"),
    "use_liger_kernel": ([True], "set it to False"),
    "liger_kernel_config": ([{"rope": True}], "leave it out"),
    "use_cache": ([True], "set it to False"),
    "neftune_noise_alpha": ([5.0, 5], "leave it out"),
    "auto_find_batch_size": ([True], "lower token_budget"),
    "logging_strategy": (["no", "epoch"], "raise logging_steps"),
    "eval_strategy": (["epoch"], 'use eval_strategy="steps"'),
    "prediction_loss_only": ([True], "leave it out"),
    "eval_do_concat_batches": ([False], "leave it out"),
    "eval_use_gather_object": ([True], "leave it out"),
    "eval_accumulation_steps": ([2], "leave it out"),
    "include_for_metrics": ([["inputs"]], "leave it out"),
    "batch_eval_metrics": ([True], "leave it out"),
    "save_only_model": ([True], "use trainer.save_model"),
    "save_strategy": (["epoch", "best"], 'use save_strategy="steps"'),
    "save_on_each_node": ([True], "set it to False"),
    "enable_jit_checkpoint": ([True], "lower save_steps"),
    "load_best_model_at_end": ([True], "load the checkpoint of the step you want"),
    "metric_for_best_model": (["reward"], "load the checkpoint of the step you want"),
    "greater_is_better": ([True, False], "load the checkpoint of the step you want"),
    "ignore_data_skip": ([False], "set it to True"),
    "hub_strategy": (["checkpoint", "all_checkpoints"], 'use "every_save" or "end"'),
    "parallelism_config": (
        [ParallelismConfig(cp_size=2), ParallelismConfig(sp_size=2), ParallelismConfig(tp_size=2)],
        "use data parallel ranks",
    ),
    "fsdp_config": ([{"version": 1}, {"fsdp_version": 1}, {"xla": True}], "set version to 2"),
    "deepspeed": ([{"zero_optimization": {}}, "ds.json"], "use fsdp"),
    "dataloader_drop_last": ([True], "leave it out"),
    "dataloader_num_workers": ([2], "leave it out"),
    "dataloader_persistent_workers": ([True], "leave it out"),
    "dataloader_prefetch_factor": ([2], "leave it out"),
    "dataloader_multiprocessing_context": (["fork"], "leave it out"),
    "dataloader_in_order": ([False], "leave it out"),
    "label_names": ([["labels"]], "leave it out"),
    "train_sampling_strategy": (["group_by_length"], "'random' or 'sequential'"),
    "length_column_name": (["tokens"], "leave it out"),
    "debug": (["tpu_metrics_debug"], "use underflow_overflow"),
}
WARNED: dict[str, tuple[Any, str]] = {
    "per_device_train_batch_size": (4, "set token_budget and leave it out"),
    "per_device_eval_batch_size": (4, "leave it out"),
}
# arguments that would do nothing beside others: what is set, the key that is refused, words of the way out
USELESS: list[tuple[dict[str, Any], str, str]] = [
    ({"save_strategy": "no", "save_steps": 10}, "save_steps", 'needs save_strategy="steps"'),
    ({"save_steps": 0}, "save_steps", 'set save_strategy="no"'),
    ({"save_steps": -1}, "save_steps", 'set save_strategy="no"'),
    ({"save_strategy": "no", "save_total_limit": 2}, "save_total_limit", "needs save_strategy"),
    ({"eval_steps": 10}, "eval_steps", 'needs eval_strategy="steps"'),
    ({"eval_strategy": "steps", "eval_steps": -1}, "eval_steps", "must be at least 1"),
    ({"eval_delay": 3}, "eval_delay", 'needs eval_strategy="steps"'),
    ({"logging_steps": 0}, "logging_steps", "must be at least 1"),
    ({"lr_scheduler_kwargs": {"power": 2}}, "lr_scheduler_kwargs", "set another schedule"),
    ({"warmup_steps": 5}, "warmup_steps", 'set lr_scheduler_type = "constant_with_warmup"'),
    (
        {"warmup_steps": 0.1, "lr_scheduler_type": "constant_with_warmup"},
        "warmup_steps",
        "set max_steps, or give a number",
    ),
    ({"logging_steps": 0.1}, "logging_steps", "set max_steps, or give a number"),
    ({"save_steps": 0.1}, "save_steps", "set max_steps, or give a number"),
    ({"eval_strategy": "steps", "eval_steps": 0.1}, "eval_steps", "set max_steps, or give a number"),
    ({"optim_target_modules": "all-linear"}, "optim_target_modules", "use a galore or apollo optimizer"),
    ({"optim_args": "eps=1e-6"}, "optim_args", "set adam_beta1"),
    (
        {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        "gradient_checkpointing_kwargs",
        "needs gradient_checkpointing=True",
    ),
    (
        {"activation_checkpointing": False, "activation_checkpointing_kwargs": {"use_reentrant": False}},
        "activation_checkpointing_kwargs",
        "needs gradient_checkpointing=True",
    ),
    (
        {
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "activation_checkpointing_kwargs": {"use_reentrant": True},
        },
        "gradient_checkpointing_kwargs",
        "set one of them",
    ),
    ({"fsdp_config": {"reshard_after_forward": True}}, "fsdp_config", "needs fsdp=True"),
    ({"hub_strategy": "end"}, "hub_strategy", "needs push_to_hub=True"),
    ({"hub_always_push": True}, "hub_always_push", "needs push_to_hub=True"),
    (
        {"hub_always_push": True, "push_to_hub": True, "save_strategy": "no"},
        "hub_always_push",
        'needs save_strategy="steps"',
    ),
    ({"project": "mine"}, "project", 'needs report_to="trackio"'),
    ({"trackio_space_id": "me/space"}, "trackio_space_id", 'needs report_to="trackio"'),
    ({"trackio_bucket_id": "me/bucket"}, "trackio_bucket_id", 'needs report_to="trackio"'),
    ({"trackio_static_space_id": "me/space"}, "trackio_static_space_id", 'needs report_to="trackio"'),
    (
        {"accelerator_config": {"split_batches": True}},
        "accelerator_config.split_batches",
        "there is no data loader",
    ),
    ({"accelerator_config": {"dispatch_batches": True}}, "accelerator_config.dispatch_batches", "leave it out"),
    ({"accelerator_config": {"even_batches": False}}, "accelerator_config.even_batches", "leave it out"),
    ({"accelerator_config": {"non_blocking": True}}, "accelerator_config.non_blocking", "leave it out"),
    (
        {"accelerator_config": AcceleratorConfig(use_seedable_sampler=False)},
        "accelerator_config.use_seedable_sampler",
        "leave it out",
    ),
    (
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}},
        "accelerator_config.gradient_accumulation_kwargs.num_steps",
        "use gradient_accumulation_steps",
    ),
]
# accepted, with a word about it
REMARKED: list[tuple[dict[str, Any], str, str]] = [
    ({"optim": "sgd", "adam_beta1": 0.8}, "adam_beta1", "is not used by optim = sgd"),
    ({"optim": "adafactor", "adam_epsilon": 1e-6}, "adam_epsilon", "is not used by optim = adafactor"),
    ({"run_name": "mine"}, "run_name", "without an integration in report_to"),
]


def make(**changes: Any) -> AsyncGRPOConfig:
    """A configuration for a machine without a GPU."""
    return AsyncGRPOConfig(**({"use_cpu": True, "bf16": False} | changes))


def refusals(**changes: Any) -> dict[str, str]:
    """Message by key."""
    with pytest.raises(Impossible) as caught:
        make(**changes)
    problems = {key: f"{key} = {value!r}: {message}" for key, value, message in caught.value.problems}
    assert all(text in str(caught.value) for text in problems.values())
    return problems


def of(*treatments: str) -> set[str]:
    return {name for name, argument in ARGUMENTS.items() if argument.treatment in treatments}


def test_the_table_knows_every_field_of_transformers_and_no_other():
    """A new release's fields must be looked at, one by one."""
    assert set(ARGUMENTS) == set(FIELDS)


def test_each_refusal_is_tested():
    assert set(REFUSED) == of("refused", "limited")
    assert set(WARNED) == of("warned")


def test_what_is_not_honoured_has_a_reason():
    for name, argument in ARGUMENTS.items():
        assert argument.why or argument.treatment == "honoured", name
    assert of("irrelevant") == {
        "local_rank",
        "dataloader_pin_memory",
        "remove_unused_columns",
        "do_train",
        "do_eval",
        "do_predict",
    }


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_transformers_default_is_accepted(name):
    """But for the one that the page makes always true."""
    field = FIELDS[name]
    default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    default = getattr(default, "value", default)
    assert ARGUMENTS[name].accepted(default) == (name != "ignore_data_skip")


@pytest.mark.parametrize(
    ("name", "value", "way_out"),
    [(name, value, way_out) for name, (values, way_out) in REFUSED.items() for value in values],
)
def test_a_refusal_names_the_key_the_value_and_the_way_out(name, value, way_out):
    message = refusals(**{name: value})[name]
    assert message.startswith(f"{name} = {value!r}: ")
    assert way_out in message


@pytest.mark.parametrize(("changes", "key", "way_out"), USELESS)
def test_what_would_have_no_effect_is_refused(changes, key, way_out):
    message = refusals(**changes)[key]
    assert way_out in message


@pytest.mark.parametrize(
    ("changes", "key", "way_out"),
    [*((({name: value}), name, way_out) for name, (value, way_out) in WARNED.items()), *REMARKED],
)
def test_a_warning_names_the_key_the_value_and_the_way_out(changes, key, way_out):
    with pytest.warns(UserWarning, match=re.escape(f"{key} = {changes[key]!r}: ")) as caught:
        make(**changes)
    assert [way_out in str(warning.message) for warning in caught] == [True]
    assert caught[0].filename == __file__


def test_every_problem_is_named_at_once():
    assert set(refusals(use_cache=True, dataloader_num_workers=1, top_p=0.5, num_generations=1)) == {
        "use_cache",
        "dataloader_num_workers",
        "top_p",
        "num_generations",
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"max_steps": 10, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.2, "save_steps": 0.5},
        {"eval_strategy": "steps", "eval_steps": 5, "eval_delay": 2},
        {"save_strategy": "no"},
        {"parallelism_config": ParallelismConfig(dp_replicate_size=2)},
        {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
        {"accelerator_config": AcceleratorConfig()},
        {"optim": "sgd", "optim_args": "momentum=0.9"},
        {"optim": "adamw_torch", "adam_beta1": 0.8},
        {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}},
        {"report_to": "trackio", "project": "mine", "trackio_space_id": "me/space", "run_name": "mine"},
        {"push_to_hub": True, "hub_strategy": "end"},
        {"hub_model_id": "me/model"},
        {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 3},
        {"debug": "underflow_overflow"},
        {"dataloader_pin_memory": False},
    ],
)
def test_what_makes_sense_is_accepted_without_a_word(changes):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make(**changes)


def test_a_copy_of_a_configuration_is_accepted_too():
    """transformers fills in values after construction; they must not be taken for given ones."""
    config = make(
        max_steps=10,
        eval_strategy="steps",
        gradient_checkpointing_kwargs={"use_reentrant": False},
        lr_scheduler_type="linear",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        again = dataclasses.replace(config, seed=7)
        plain = {key: value for key, value in config.to_dict().items() if key in FIELDS and key != "hub_token"}
        AsyncGRPOConfig(**plain)
    assert (again.seed, again.max_steps, again.activation_checkpointing_kwargs) == (7, 10, {"use_reentrant": False})


WITHOUT_END = {"constant", "constant_with_warmup", "inverse_sqrt"}
OF_AN_EVALUATION = {"reduce_lr_on_plateau", "greedy"}


@pytest.mark.parametrize("schedule", sorted(s.value for s in SchedulerType if s.value not in OF_AN_EVALUATION))
def test_a_schedule_that_decays_needs_a_number_of_steps(schedule):
    if schedule in WITHOUT_END:
        make(lr_scheduler_type=schedule)
    else:
        message = refusals(lr_scheduler_type=SchedulerType(schedule))["lr_scheduler_type"]
        assert schedule in message
        assert "set max_steps" in message
        make(lr_scheduler_type=schedule, max_steps=10)


@pytest.mark.parametrize("optim", sorted(o.value for o in OptimizerNames))
def test_an_optimizer_is_accepted_or_refused_by_name(optim):
    if optim in ("lomo", "adalomo") or optim.endswith("layerwise"):
        assert set(refusals(optim=optim)) == {"optim"}
    else:
        make(optim=optim)


def test_several_gpus_in_one_process_are_refused_with_the_command_to_use():
    [(key, value, message)] = device_problems(4)
    assert (key, value) == ("n_gpu", 4)
    assert "torchrun --nproc-per-node 4" in message
    assert "CUDA_VISIBLE_DEVICES=0" in message
    assert not device_problems(1)
    assert not device_problems(0)


def test_several_gpus_are_seen_where_transformers_counts_them(monkeypatch):
    from transformers.training_args import TrainingArguments as Base

    def four(self: Any) -> None:
        self._n_gpu = 4

    monkeypatch.setattr(Base, "__post_init__", four)
    monkeypatch.setattr(AsyncGRPOConfig, "accelerator_config", AcceleratorConfig())
    assert "torchrun --nproc-per-node 4" in refusals()["n_gpu"]


def test_a_launcher_s_deepspeed_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    message = refusals()["ACCELERATE_USE_DEEPSPEED"]
    assert "= 'true'" in message
    assert "use fsdp" in message
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    make()


def test_configurations_in_files_are_read_too(tmp_path):
    accelerator, fsdp = tmp_path / "accelerator.json", tmp_path / "fsdp.json"
    accelerator.write_text('{"even_batches": false}')
    fsdp.write_text('{"version": 1}')
    assert set(refusals(accelerator_config=str(accelerator))) == {"accelerator_config.even_batches"}
    assert "set version to 2" in refusals(fsdp=True, fsdp_config=str(fsdp))["fsdp_config"]
    assert "set version to 2" in refusals(fsdp=True, fsdp_config='{"version": 1}')["fsdp_config"]
