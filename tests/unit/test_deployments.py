"""What an instance has on a Prefect server, as values: names, parameters, forms, what differs, what is superfluous."""

import re
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from flows.deploy.deployments import FlowFacts, Wanted, block_name, differences, digest, empty_form, superfluous, wanted
from flows.deploy.forms import fields, parameter_fields, readable
from flows.deploy.presets import EXAMPLES, in_place_of_examples, load_presets
from flows.names import care_pool, runs_pool
from slipstream.config_file import ConfigError, parse_config
from slipstream.instance import InstanceError, instance_id
from slipstream.run_config import RunConfig

SCHEMA = {
    "type": "object",
    "properties": {"config": {"$ref": "#/definitions/RunConfig", "title": "config", "description": "everything"}},
    "definitions": RunConfig.model_json_schema(ref_template="#/definitions/{model}")["$defs"]
    | {
        "RunConfig": {
            k: v for k, v in RunConfig.model_json_schema(ref_template="#/definitions/{model}").items() if k != "$defs"
        }
    },
}
FLOWS = {
    name: FlowFacts(f"flows/{name}.py:{name}", SCHEMA, f"About {name}.") for name in ("train", "sweep", "reconcile")
}


def all_of(instance: str = "alice", **more: Any) -> Wanted:
    return wanted(
        instance,
        more.pop("flows", FLOWS),
        load_presets(),
        {"local": {"executor": "local"}},
        command="c",
        directory="/d",
        **more,
    )


def test_there_is_a_deployment_for_each_example_one_without_and_the_two_that_care() -> None:
    found = {deployment.full_name: deployment for deployment in all_of().deployments}
    presets = {f"train/alice.{path.stem}" for path in EXAMPLES.glob("*.toml")}
    assert set(found) == presets | {"train/alice.custom", "sweep/alice.sweep", "reconcile/alice.reconcile"}
    assert {deployment.pool for name, deployment in found.items() if name.startswith("train/")} == {"slipstream-alice"}
    assert found["reconcile/alice.reconcile"].pool == found["sweep/alice.sweep"].pool == "slipstream-alice-care"
    assert found["reconcile/alice.reconcile"].limit == 1
    assert all(list(deployment.tags) == ["slipstream", "slipstream:alice"] for deployment in found.values())


def test_no_instance_has_the_pool_of_another() -> None:
    with pytest.raises(InstanceError, match=r"'alice-care' is not possible.*a work pool of 'alice'"):
        instance_id("alice-care")
    assert care_pool("alice") == runs_pool("alice-care")


def test_flows_that_are_not_there_have_no_deployment() -> None:
    found = all_of(flows={"train": FLOWS["train"]}).deployments
    assert {deployment.flow for deployment in found} == {"train"}


def test_a_preset_s_deployment_has_the_whole_preset() -> None:
    """A schedule's own parameters are lost where somebody switches it off and on, so the deployment has them all."""
    presets = load_presets()
    for deployment in all_of().deployments:
        name = deployment.name.removeprefix("alice.")
        if name in presets:
            assert parse_config(dict(deployment.parameters["config"])) == presets[name]


def test_the_form_without_a_preset_asks_for_model_and_data_only() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(empty_form())
    assert sorted(problem.key for problem in refused.value.problems) == ["data.source", "model.name"]


def test_a_preset_of_another_folder_works_there(tmp_path: Path) -> None:
    found = {d.name: d for d in all_of(elsewhere={"demo": "/there"}).deployments}
    assert (found["alice.demo"].directory, found["alice.demo"].entrypoint) == ("/there", "/d/flows/train.py:train")
    assert (found["alice.custom"].directory, found["alice.custom"].entrypoint) == ("/d", "flows/train.py:train")


def test_presets_by_file(tmp_path: Path) -> None:
    text = (EXAMPLES / "demo.toml").read_text()
    for name in ("mine", "demo"):
        (tmp_path / f"{name}.toml").write_text(text.replace("max_steps = 60", "max_steps = 7"))
    found = load_presets([tmp_path / "mine.toml", tmp_path / "demo.toml", tmp_path / "mine.toml"])
    assert found["mine"].trainer.max_steps == found["demo"].trainer.max_steps == 7
    assert in_place_of_examples([tmp_path / "mine.toml", tmp_path / "demo.toml"]) == [tmp_path / "demo.toml"]


@pytest.mark.parametrize(
    ("name", "words"), [("custom", "rename"), ("a@b", "rename"), ("a.b", "rename"), ("nowhere/x", "no such file")]
)
def test_presets_that_are_refused(tmp_path: Path, name: str, words: str) -> None:
    path = tmp_path / f"{name}.toml"
    if "nowhere" not in name:
        path.write_text("")
    with pytest.raises(ConfigError, match=words):
        load_presets([path])


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.toml").write_text((EXAMPLES / "demo.toml").read_text())
    with pytest.raises(ConfigError, match="same name"):
        load_presets([tmp_path / "a" / "x.toml", tmp_path / "b" / "x.toml"])


def as_found(deployment: Any) -> dict[str, Any]:
    return {
        "entrypoint": deployment.entrypoint,
        "description": deployment.description,
        "parameters": dict(deployment.parameters),
        "schema": dict(deployment.schema),
        "tags": list(deployment.tags),
        "pool": deployment.pool,
        "pull_steps": deployment.pull_steps,
        "paused": True,
        "schedules": ["of a person"],
        "concurrency_limit": 7,
    }


@pytest.mark.parametrize("key", ["entrypoint", "description", "parameters", "schema", "tags", "pool", "pull_steps"])
def test_only_what_we_set_is_compared(key: str) -> None:
    deployment = all_of().deployments[0]
    assert differences(deployment, as_found(deployment)) == []
    assert differences(deployment, as_found(deployment) | {key: None}) == [key]


ALL = all_of()
NAMES = st.sampled_from(
    [
        "train/alice.demo",
        "train/alice.gone",
        "train/alice.demo@nightly",
        "train/bob.gone",
        "sweep/alice.old",
        "other/x",
        "train/alicex.a",
    ]
)
TAGS = st.sampled_from([["slipstream", "slipstream:alice"], ["slipstream", "slipstream:bob"], [], ["slipstream"]])


@given(st.lists(st.tuples(NAMES, TAGS)))
def test_only_our_own_leftovers_are_superfluous(found: list[tuple[str, list[str]]]) -> None:
    tagged = {name for name, tags in found if "slipstream:alice" in tags}
    assert set(superfluous(ALL, found)) == tagged & {"train/alice.gone", "sweep/alice.old"}


def test_names_of_blocks_are_what_prefect_takes() -> None:
    assert block_name("alice", "my-cluster") == "alice-my-cluster"
    assert re.fullmatch(r"alice-b-my-cluster-[0-9a-f]{6}", block_name("Alice_B", "my.cluster"))
    people = [("jan_k", "slurm"), ("jan-k", "slurm"), ("Jan-K", "slurm"), ("jan", "k-slurm"), ("jan", "k_slurm")]
    assert len({block_name(*one) for one in people}) == len(people)


def test_a_fingerprint_tells_an_edit_from_what_is_only_empty() -> None:
    assert digest({"executor": "slurm"}) == digest({"executor": "slurm", "sbatch": [], "account": None})
    assert digest({"executor": "slurm"}) != digest({"executor": "slurm", "account": "a"})


FORM = dict(fields(readable(SCHEMA)))


def test_every_field_of_the_form_has_a_title_and_a_description_with_bounds_and_default() -> None:
    assert len(FORM) > 90
    for name, field in FORM.items():
        assert field.get("title"), name
        assert field["title"] != name.rpartition(".")[2], name
        about = field.get("description", "")
        assert about.endswith("."), name
        parts = [field, *field.get("anyOf", [])]
        for bound, words in (
            ("minimum", "t least"),
            ("maximum", "t most"),
            ("exclusiveMinimum", "bove"),
            ("exclusiveMaximum", "elow"),
        ):
            assert not any(bound in part for part in parts) or words in about, (name, about)
        required = name in ("config", "config.model.name", "config.data.source")
        assert required or "properties" in field or "Default: " in about, (name, about)


def test_a_parameter_is_named_and_described_as_its_annotation_says() -> None:
    """Prefect's own schema has the parameter's name and the docstring's words."""

    def flow(config: Annotated[int, Field(title="Run", description="all of it")], run_id: str = "") -> None: ...

    told = parameter_fields(flow)
    assert list(told) == ["config"]
    drawn = {"properties": {"config": {"title": "config", "description": "x"}, "run_id": {"title": "run_id"}}}
    form = readable(drawn, told)["properties"]
    assert (form["config"]["title"], form["config"]["description"]) == ("Run", "All of it.")
    assert form["run_id"]["title"] == "Run id"


def test_no_field_of_the_form_takes_raw_json() -> None:
    """Sections have fixed fields, lists hold text, and everything else is a text, a number, a switch or a choice."""
    for name, field in FORM.items():
        for part in field.get("anyOf", [field]):
            kind = part.get("type") or ("object" if "$ref" in part else None)
            assert kind in ("object", "array", "string", "integer", "number", "boolean", "null"), (name, part)
            if kind == "object":
                assert part["properties"], name
                assert part.get("additionalProperties") is False, name
            if kind == "array":
                assert part["items"]["type"] == "string", name


def test_the_walk_sees_a_field_that_takes_raw_json() -> None:
    schema = {
        "properties": {"a": {"$ref": "#/definitions/A"}},
        "definitions": {"A": {"properties": {"free": {"type": "object"}}}},
    }
    assert dict(fields(readable(schema)))["a.free"]["type"] == "object"


def test_what_may_be_empty_says_so_instead_of_a_type() -> None:
    options = FORM["config.trainer.token_budget"]["anyOf"]
    assert [option["title"] for option in options] == ["Number", "Empty"]
    assert "At least 1. Default: empty." in FORM["config.trainer.token_budget"]["description"]
    assert "Above 0 and at most 2000000. Default: 300." in FORM["config.trainer.reward_timeout"]["description"]


def test_choices_stay_choices() -> None:
    assert FORM["config.cluster.shape"]["enum"] == ["separate", "one_allocation"]


def test_what_is_added_validates_nothing() -> None:
    """Only titles and descriptions differ."""

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: bare(v) for k, v in value.items() if not (k in ("title", "description") and isinstance(v, str))}
        return [bare(part) for part in value] if isinstance(value, list) else value

    assert bare(readable(SCHEMA)) == bare(SCHEMA)
