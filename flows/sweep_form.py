"""The form of a sweep: fields that a person can fill, and what they mean as a sweep file. Needs no Prefect."""

import json
import re
import tomllib
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slipstream.config_file import ConfigError, Problem
from slipstream.sweep.spec import HELD_OUT, MOST_CELLS, Halving, Range, SweepConfig, flat, parse_sweep

STALENESS, BUDGET = "trainer.max_staleness", "trainer.token_budget"
SOURCE = "the form"
RANGE = re.compile(r"^(?P<low>\S+)\s*\.\.\s*(?P<high>\S+?)(?P<log>\s+log)?$")
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"


class SweepForm(BaseModel):
    """One sweep."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(
        "sweep", title="Name", pattern=NAME, description="Start of the sweep's id: letters, digits, '.', '_' and '-'."
    )
    base: str = Field(
        "demo",
        title="Base",
        min_length=1,
        description="The configuration that all cells share: a preset's name, or the path of a TOML file.",
    )
    max_staleness: list[int] = Field(
        [0, 2, 8],
        title="Staleness bounds",
        description="Values of trainer.max_staleness, in weight updates; none: it is no axis.",
    )
    token_budget: list[int] = Field(
        [],
        title="Token budgets",
        description="Values of trainer.token_budget, in tokens of a row; none: it is no axis.",
    )
    more_axes: list[str] = Field(
        [],
        title="More axes",
        examples=[["trainer.learning_rate = 1e-5, 2e-5"]],
        description="One configuration key a line with its values, like trainer.learning_rate = 1e-5, 2e-5. "
        "For random cells also a range, like trainer.learning_rate = 1e-6 .. 1e-4 log.",
    )
    settings: list[str] = Field(
        [],
        title="Settings",
        examples=[["trainer.max_steps = 200"]],
        description="What else differs from the base, in all cells: one key a line, like trainer.max_steps = 200.",
    )
    method: Literal["grid", "random", "list"] = Field(
        "grid",
        title="Method",
        description="grid: all combinations; random: so many of them as samples says; list: the given cells.",
    )
    samples: int = Field(
        0, title="Samples", ge=0, le=MOST_CELLS, description="Number of random cells; 0 for the others."
    )
    seed: int = Field(0, title="Seed", ge=0, description="Seed of random cells.")
    cells: list[str] = Field(
        [],
        title="Cells",
        examples=[["trainer.max_staleness = 0, trainer.token_budget = 1024"]],
        description="Of the list method: one cell a line, like trainer.max_staleness = 0, trainer.token_budget = 1024.",
    )
    cells_at_once: int = Field(1, title="Cells at once", ge=1, description="Most cells that run at the same time.")
    gpu_hours: float = Field(
        0.0,
        title="GPU-hour budget",
        ge=0,
        description="Once the cells have used so many GPU hours, no more are started and those that run are stopped. "
        "A node without GPUs counts as one GPU. 0: no limit.",
    )
    metric: str = Field(
        HELD_OUT,
        title="Metric",
        min_length=1,
        description="What is compared, more being better; eval/reward or reward.",
    )
    target: float | None = Field(
        None,
        title="Target",
        description="Value of the metric for time-to-reward. Empty: the highest that every finished cell has reached.",
    )
    first_rung: int = Field(
        0,
        title="Early stopping: first rung",
        ge=0,
        description="Optimizer steps after which cells are compared for the first time and hopeless ones are stopped "
        "(asynchronous successive halving). 0: no early stopping.",
    )
    factor: int = Field(
        3,
        title="Early stopping: factor",
        ge=2,
        le=100,
        description="One in so many cells goes on at a rung; the next rung is so many times the steps away.",
    )


def spec_of(form: SweepForm) -> SweepConfig:
    """The sweep that the form asks for. Raises ConfigError."""
    problems: list[Problem] = []
    axes: dict[str, Any] = {}
    for key, whole in ((STALENESS, form.max_staleness), (BUDGET, form.token_budget)):
        if whole and form.method != "list":
            axes[key] = list(whole)
    for line in form.more_axes:
        key, drawn = _line("more_axes", line, problems, _axis)
        if key in axes:
            problems.append(Problem("more_axes", line, f"{key} is an axis already: give it once"))
        axes[key] = drawn
    fixed = dict(_line("settings", line, problems, _value) for line in form.settings)
    cells = [_cell(line, problems) for line in form.cells]
    if problems:
        raise ConfigError(problems, SOURCE)
    values: dict[str, Any] = {
        "name": form.name,
        "base": form.base,
        "method": form.method,
        "seed": form.seed,
        "cells_at_once": form.cells_at_once,
        "metric": form.metric,
        "axes": axes,
        "cells": cells,
        "set": fixed,
    }
    values |= {"samples": form.samples} if form.samples else {}
    values |= {"gpu_hours": form.gpu_hours} if form.gpu_hours else {}
    values |= {} if form.target is None else {"target": float(form.target)}
    if form.first_rung:
        values["halving"] = {"first_rung": form.first_rung, "factor": form.factor}
    return parse_sweep(values, SOURCE)


def form_of(sweep: SweepConfig) -> SweepForm:
    """The form that asks for this sweep: `spec_of` gives it back."""
    halving = sweep.halving or Halving(first_rung=1)
    form = SweepForm(
        name=sweep.name,
        base=sweep.base,
        max_staleness=[],
        more_axes=[f"{key} = {_axis_text(values)}" for key, values in sweep.axes.items()],
        settings=[f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in sweep.set.items()],
        method=sweep.method,
        samples=sweep.samples or 0,
        seed=sweep.seed,
        cells=[
            ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in cell.items())
            for cell in sweep.cells
        ],
        cells_at_once=sweep.cells_at_once,
        gpu_hours=sweep.gpu_hours or 0.0,
        metric=sweep.metric,
        target=sweep.target,
        first_rung=halving.first_rung if sweep.halving else 0,
        factor=halving.factor,
    )
    shorter = form.model_copy(
        update={
            "max_staleness": _whole(sweep.axes.get(STALENESS)),
            "token_budget": _whole(sweep.axes.get(BUDGET)),
        }
    )
    named = [key for key, field in ((STALENESS, "max_staleness"), (BUDGET, "token_budget")) if getattr(shorter, field)]
    shorter.more_axes = [line for line in form.more_axes if line.partition(" = ")[0] not in named]
    in_order = [*named, *(key for key in sweep.axes if key not in named)] == list(sweep.axes)
    return shorter if in_order else form


def _whole(values: Any) -> list[int]:
    """The values where all are whole numbers, else none."""
    whole = isinstance(values, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in values)
    return list(values) if whole else []


def _axis_text(values: Sequence[Any] | Range) -> str:
    if isinstance(values, Range):
        return f"{values.low!r} .. {values.high!r}" + (" log" if values.log else "")
    return ", ".join(json.dumps(value, ensure_ascii=False) for value in values)


def _line(field: str, line: str, problems: list[Problem], read: Any) -> tuple[str, Any]:
    key, equals, text = line.partition("=")
    if not equals or not key.strip() or not text.strip():
        wanted = {"more_axes": "trainer.learning_rate = 1e-5, 2e-5"}.get(field, "trainer.max_steps = 200")
        problems.append(Problem(field, line, f"is no key with a value: write it like {wanted}"))
        return key.strip(), None
    return key.strip(), read(text.strip())


def _value(text: str) -> Any:
    """A value as TOML has it, else as text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _axis(text: str) -> Any:
    """A list of values, or a range."""
    if found := RANGE.match(text):
        return {"low": _value(found["low"]), "high": _value(found["high"]), "log": bool(found["log"])}
    try:
        return tomllib.loads(f"values = [{text}]")["values"]
    except tomllib.TOMLDecodeError:
        return [_value(part.strip()) for part in text.split(",") if part.strip()]


def _cell(line: str, problems: list[Problem]) -> dict[str, Any]:
    try:
        return flat(tomllib.loads(f"cell = {{{line}}}")["cell"])
    except tomllib.TOMLDecodeError:
        problems.append(
            Problem("cells", line, "is no list of settings: write it like trainer.seed = 1, trainer.top_k = 5")
        )
        return {}
