"""The form of a sweep and the sweep file say the same."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.sweep_form import SweepForm, form_of, spec_of
from slipstream.config_file import ConfigError
from slipstream.sweep.spec import load_sweep, parse_sweep

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sweeps" / "demo.toml"


def test_every_field_has_a_title_and_a_description_and_none_is_a_dict() -> None:
    schema = SweepForm.model_json_schema()
    assert "$defs" not in schema
    for name, field in schema["properties"].items():
        assert field.get("title"), name
        assert field.get("description"), name
        assert field.get("type") != "object", name
    assert next(iter(schema["properties"])) == "name"
    assert list(schema["properties"]).index("max_staleness") == 2
    assert list(schema["properties"]).index("token_budget") == 3


def test_the_example_as_a_form() -> None:
    sweep = load_sweep(EXAMPLE)
    form = form_of(sweep)
    assert (form.max_staleness, form.token_budget, form.more_axes) == ([0, 2, 8], [120, 240, 480], [])
    assert "trainer.max_steps = 40" in form.settings
    assert spec_of(form) == sweep


def test_lines_as_people_write_them() -> None:
    form = SweepForm(
        max_staleness=[],
        method="random",
        samples=3,
        more_axes=[
            "trainer.learning_rate = 1e-6 .. 1e-4 log",
            "trainer.seed=1,2",
            "trainer.lr_scheduler_type = constant, linear",
        ],
        settings=["trainer.max_steps = 9", "data.split = validation"],
        first_rung=5,
    )
    sweep = spec_of(form)
    assert sweep.axes["trainer.seed"] == [1, 2]
    assert sweep.axes["trainer.lr_scheduler_type"] == ["constant", "linear"]
    assert vars(sweep.axes["trainer.learning_rate"]) == {"low": 1e-6, "high": 1e-4, "log": True}
    assert sweep.set == {"trainer.max_steps": 9, "data.split": "validation"}
    assert sweep.halving is not None
    assert (sweep.halving.first_rung, sweep.gpu_hours) == (5, None)
    cells = spec_of(SweepForm(method="list", cells=["trainer.seed = 1, trainer.top_k = 5", "trainer.seed = 2"])).cells
    assert cells == [{"trainer.seed": 1, "trainer.top_k": 5}, {"trainer.seed": 2}]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"more_axes": ["trainer.seed"]}, 'more_axes = "trainer.seed": is no key with a value'),
        ({"more_axes": ["trainer.sed = 1"]}, "axes.trainer.sed = [1]: unknown key; did you mean trainer.seed?"),
        ({"more_axes": ["trainer.max_staleness = 1"]}, "trainer.max_staleness is an axis already"),
        ({"settings": ["trainer.max_steps ="]}, "write it like trainer.max_steps = 200"),
        ({"max_staleness": []}, "axes = {}: there are none"),
        ({"max_staleness": [1, 1]}, "axes.trainer.max_staleness = 1: is there twice"),
        ({"method": "list", "cells": ["seed is 1"]}, "is no list of settings"),
        ({"method": "random"}, "samples: a random sweep needs their number"),
    ],
)
def test_a_refusal_names_the_line_and_the_way_out(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec_of(SweepForm(**values))
    assert words in str(caught.value)


axes = st.dictionaries(
    st.sampled_from(["trainer.max_staleness", "trainer.token_budget", "trainer.seed", "data.split", "trainer.top_p"]),
    st.lists(st.integers(1, 99) | st.floats(0.1, 1) | st.text("abc, \"='\\é", max_size=5), min_size=1, max_size=3, unique_by=str),
    min_size=1,
)  # fmt: skip


@given(axes, st.none() | st.floats(0.1, 9), st.none() | st.floats(-1, 1), st.none() | st.integers(1, 9))
def test_a_sweep_comes_back_from_its_form(
    axes: dict[str, list[Any]], hours: float | None, target: float | None, rung: int | None
) -> None:
    values: dict[str, Any] = {"base": "b", "axes": axes, "gpu_hours": hours, "target": target}
    sweep = parse_sweep(values | ({"halving": {"first_rung": rung, "factor": 4}} if rung else {}))
    back = spec_of(SweepForm.model_validate(form_of(sweep).model_dump(mode="json")))
    assert back == sweep
    assert list(back.axes) == list(sweep.axes)


@given(axes)
def test_a_list_sweep_comes_back_from_its_form(axes: dict[str, list[Any]]) -> None:
    cells = [{key: values[0] for key, values in axes.items()}, {"trainer.top_k": 3}]
    sweep = parse_sweep({"base": "b", "method": "list", "cells": cells})
    assert spec_of(form_of(sweep)) == sweep
