"""The configuration model itself: light, complete, and fit for a form."""

import json
import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import slipstream
from slipstream.run_config import Impossible, RunConfig

BASE: dict[str, Any] = {"model": {"name": "m"}, "data": {"source": "d"}}
HEAVY = ("torch", "transformers", "vllm", "datasets", "prefect", "submitit", "math_verify", "reasoning_gym", "numpy")


@pytest.mark.parametrize(
    "module",
    ["slipstream", "slipstream.run_config", "slipstream.config_file", "slipstream.preflight", "slipstream.rewards"],
)
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, json, {module}; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_data_and_reward_checks_do_not_load_torch() -> None:
    code = (
        "import sys; from slipstream.data import load_dataset_source; from slipstream.rewards.resolve import resolve_reward\n"
        "load_dataset_source('reasoning_gym:chain_sum?size=2'); resolve_reward('slipstream.rewards:format_reward')\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    found = [model]
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += sections(field.annotation)
    return found


@pytest.mark.parametrize("section", sections(RunConfig))
def test_every_field_has_title_and_description(section: type[BaseModel]) -> None:
    assert section.__doc__
    for name, field in section.model_fields.items():
        assert field.title, name
        assert field.description, name
        assert field.description.endswith((".", ")")), name


def test_schema_has_no_free_form_objects() -> None:
    schema = RunConfig.model_json_schema()

    def visit(node: Any, path: str) -> None:
        if isinstance(node, dict):
            if node.get("type") == "object":
                assert node.get("properties"), path
                assert node.get("additionalProperties") is False, path
            if node.get("type") == "array":
                assert node["items"].get("type") == "string", path
            for key, value in node.items():
                visit(value, f"{path}.{key}")
        elif isinstance(node, list):
            for value in node:
                visit(value, path)

    visit(schema, "")
    assert json.dumps(schema)


def test_no_two_fields_of_a_section_share_a_title() -> None:
    for section in sections(RunConfig):
        titles = [field.title for field in section.model_fields.values()]
        assert len(titles) == len(set(titles)), section


def test_world_size_and_plain_values() -> None:
    config = RunConfig(**BASE, learner={"nodes": 3, "processes_per_node": 2, "gpus": 0})
    assert config.world_size == 6
    plain = config.to_plain()
    assert "eval_source" not in plain["data"]
    assert RunConfig.model_validate(plain) == config


def test_assignment_is_validated() -> None:
    config = RunConfig(**BASE)
    with pytest.raises(ValidationError, match="trains nothing"):
        config.trainer.max_steps = 0


def test_impossible_names_each_key_with_its_value() -> None:
    with pytest.raises(ValidationError) as caught:
        RunConfig(**BASE, trainer={"bf16": True, "fp16": True, "max_steps": 0})
    error = caught.value.errors()[0]["ctx"]["error"]
    assert isinstance(error, Impossible)
    assert [problem[:2] for problem in error.problems] == [("bf16", True), ("max_steps", 0)]


def test_package_resolves_its_names_lazily() -> None:
    assert slipstream.RunConfig is RunConfig
    assert set(slipstream.__all__) <= set(dir(slipstream))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = slipstream.Nothing
