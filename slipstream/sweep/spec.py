"""What a sweep file says."""

import difflib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from slipstream.config_file import ConfigError, Problem, read_toml, unknown_key
from slipstream.config_rules import Impossible
from slipstream.config_schema import format_value, is_section, known_keys
from slipstream.config_section import Section
from slipstream.run_config import Name

HELD_OUT, TRAINING = "eval/reward", "reward"
MOST_CELLS = 1000
BOUNDS = {"low", "high"}  # of a range; no section of a run has such keys
RANGE_WRONG = (
    "a range is written like {low = 1e-6, high = 1e-4, log = true}, with finite numbers; a list like [0, 2, 8]"
)
OF_THE_SWEEP = {
    "name": "cells are named after the sweep: set the sweep's own name",
    "storage.root": "all cells of a sweep lie in one storage root: give it under [set], or with --set storage.root=…",
}


class Range(Section):
    """Values between two bounds, for a random sweep."""

    low: int | float = Field(title="Lowest", description="Least value.")
    high: int | float = Field(title="Highest", description="Greatest value; whole numbers if both bounds are.")
    log: bool = Field(False, title="Logarithmic", description="Draw evenly on a logarithmic scale.")

    @model_validator(mode="after")
    def _possible(self) -> "Range":
        problems: list[tuple[str, Any, str]] = []
        if self.low >= self.high:
            problems.append(("low", self.low, f"is not below high = {self.high:g}: swap them, or give a list"))
        if self.log and self.low <= 0:
            problems.append(("low", self.low, "a logarithmic scale needs it above 0: raise it, or leave log out"))
        if problems:
            raise Impossible(problems)
        return self


class Halving(Section):
    """Early stopping by asynchronous successive halving."""

    first_rung: int = Field(
        title="First rung", ge=1, description="Optimizer steps after which cells are compared for the first time."
    )
    factor: int = Field(
        3,
        title="Factor",
        ge=2,
        le=100,
        description="One in so many cells goes on at a rung; the next rung is so many times the steps away.",
    )


class SweepConfig(Section):
    """Everything about one sweep."""

    name: Name = Field("sweep", title="Name", description="Start of the sweep's id: letters, digits, '.', '_' and '-'.")
    base: str = Field(
        title="Base",
        min_length=1,
        description="The configuration that all cells share: a TOML file, relative to the sweep file, or a preset's name.",
    )
    method: Literal["grid", "list", "random"] = Field(
        "grid", title="Method", description="grid: all combinations; list: the given cells; random: some combinations."
    )
    samples: int | None = Field(None, title="Samples", ge=1, le=MOST_CELLS, description="Cells of a random sweep.")
    seed: int = Field(0, title="Seed", ge=0, description="Seed of a random sweep.")
    cells_at_once: int = Field(1, title="Cells at once", ge=1, description="Most cells that run at the same time.")
    gpu_hours: float | None = Field(
        None,
        title="GPU-hour budget",
        gt=0,
        description="Once the cells have used so many GPU hours, no more are started and those that run are stopped. "
        "A node without GPUs counts as one GPU. Empty: no limit.",
    )
    metric: str = Field(
        HELD_OUT,
        title="Metric",
        min_length=1,
        description=f"What is compared, more being better. Where no cell measures it, it is {TRAINING}, which is said.",
    )
    target: float | None = Field(
        None,
        title="Target",
        description="Value of the metric for time-to-reward. Empty: the highest that every finished cell has reached.",
    )
    halving: Halving | None = Field(
        None, title="Successive halving", description="Stop cells that look hopeless early. Empty: off."
    )
    axes: dict[str, list[Any] | Range] = Field(
        default_factory=dict,
        title="Axes",
        description="Configuration keys with the values that each takes; of a random sweep also {low, high, log}.",
    )
    cells: list[dict[str, Any]] = Field(
        default_factory=list, title="Cells", description="Of a list sweep: configuration keys and values of each cell."
    )
    set: dict[str, Any] = Field(
        default_factory=dict, title="Settings", description="Configuration keys that differ from the base in all cells."
    )

    @model_validator(mode="after")
    def _possible(self) -> "SweepConfig":
        problems = [*self._method_problems(), *self._axis_problems(), *self._key_problems(), *self._value_problems()]
        if problems:
            raise Impossible(problems)
        return self

    def _method_problems(self) -> Iterator[tuple[str, Any, str]]:
        if self.method == "list":
            if not self.cells:
                yield "cells", [], "a list sweep needs cells: give a [[cells]] table for each"
            if self.axes:
                yield "axes", list(self.axes), 'are for grids: give [[cells]] instead, or set method = "grid"'
        else:
            if not self.axes:
                yield "axes", {}, "there are none: give configuration keys with lists of values under [axes]"
            if self.cells:
                yield "cells", len(self.cells), 'are for method = "list": set that, or leave them out'
        if self.method == "random" and self.samples is None:
            yield "samples", None, "a random sweep needs their number: set samples = 20, for example"
        if self.method != "random" and self.samples is not None:
            yield "samples", self.samples, 'is for method = "random": set that, or leave it out'

    def _axis_problems(self) -> Iterator[tuple[str, Any, str]]:
        for key, values in self.axes.items():
            name = f"axes.{key}"
            if isinstance(values, Range):
                if self.method != "random":
                    yield name, values.model_dump(), 'a range is for method = "random": give a list of values'
                continue
            if not values:
                yield name, [], "has no values: give at least one, or leave the key out"
            for index, value in enumerate(values):
                if any(same(value, earlier) for earlier in values[:index]):
                    yield name, value, "is there twice: leave one of them out"
                    break

    def _key_problems(self) -> Iterator[tuple[str, Any, str]]:
        places = [("axes", self.axes), ("set", self.set), *((f"cells[{n}]", c) for n, c in enumerate(self.cells))]
        for place, values in places:
            for key, value in values.items():
                shown = value.model_dump() if isinstance(value, Range) else value
                if key not in known_keys():
                    yield f"{place}.{key}", shown, unknown_key(key)
                elif is_section(key):
                    yield f"{place}.{key}", shown, "is a section: name a key in it, like trainer.max_staleness"
                elif key in OF_THE_SWEEP and (place != "set" or key == "name"):
                    yield f"{place}.{key}", shown, OF_THE_SWEEP[key]
                elif place != "set" and key in self.set:
                    yield f"set.{key}", self.set[key], "is given for each cell too: leave it out in one of the places"

    def _value_problems(self) -> Iterator[tuple[str, Any, str]]:
        axes = ((f"axes.{key}", value) for key, values in self.axes.items() for value in _listed(values))
        fixed = ((f"set.{key}", value) for key, value in self.set.items())
        cells = ((f"cells[{n}].{key}", value) for n, cell in enumerate(self.cells) for key, value in cell.items())
        for name, value in (*axes, *fixed, *cells):
            if why := _no_setting(value):
                yield name, value, why

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that cells differ in, in the order of the file."""
        if self.method != "list":
            return tuple(self.axes)
        return tuple(dict.fromkeys(key for cell in self.cells for key in cell))


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same setting: 1 and 1.0 are, 1 and true are not."""
    return bool(isinstance(one, bool) == isinstance(other, bool) and one == other)


def _listed(values: "list[Any] | Range") -> list[Any]:
    return values if isinstance(values, list) else []


def _no_setting(value: Any) -> str:
    """Why a value of TOML can be no value of a setting; '' where it can."""
    if isinstance(value, list):
        return next(filter(None, map(_no_setting, value)), "")
    if isinstance(value, float) and not math.isfinite(value):
        return "is no number that a setting takes: give a finite one"
    if isinstance(value, bool | int | float | str):
        return ""
    if isinstance(value, dict):
        return "is a table: give a text, a number, true, false or a list of those"
    return "is a date or a time: put it in quotes where it is meant as text"


def load_sweep(path: Path) -> SweepConfig:
    """Read a sweep file. Raises ConfigError with all problems."""
    if path.is_dir():
        message = (
            "this is a folder that holds no sweep: name the sweep's .toml file, or the folder that a sweep has made"
        )
        raise ConfigError([Problem("", None, message)], str(path))
    if not path.exists():
        message = (
            f"there is no such file (looked for {path.absolute()}): examples/sweeps/demo.toml is one to start from"
        )
        raise ConfigError([Problem("", None, message)], str(path))
    return parse_sweep(read_toml(path), str(path))


def parse_sweep(values: Mapping[str, Any], source: str = "the sweep") -> SweepConfig:
    """`load_sweep` for values that are read already. Keys with dots may be quoted or not. Raises ConfigError."""
    given, twice = dict(values), list[Problem]()
    for name in ("axes", "set"):
        if isinstance(given.get(name), dict):
            given[name] = _flat(given[name], name, twice)
    if isinstance(given.get("cells"), list):
        given["cells"] = [
            _flat(cell, f"cells[{n}]", twice) if isinstance(cell, dict) else cell
            for n, cell in enumerate(given["cells"])
        ]
    if twice:
        raise ConfigError(twice, source)
    try:
        return SweepConfig.model_validate(given, strict=True)
    except ValidationError as error:
        raise ConfigError(list(_problems(error)), source) from None


def _flat(values: Mapping[str, Any], place: str, twice: list[Problem]) -> dict[str, Any]:
    """`flat`; what is there by two ways of writing a key is added to `twice`."""
    found: dict[str, Any] = {}
    for key, value in flat_items(values):
        if key in found:
            twice.append(
                Problem(f"{place}.{key}", value, f"is there twice (also {format_value(found[key])}): leave one out")
            )
        found[key] = value
    return found


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables as dotted keys; a range stays a table."""
    return dict(flat_items(values))


def flat_items(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The items of `flat`, one way of writing a key after another."""
    for key, value in values.items():
        if isinstance(value, dict) and not BOUNDS & set(value):
            yield from flat_items(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _problems(error: ValidationError) -> Iterator[Problem]:
    seen: set[str] = set()
    for detail in error.errors(include_url=False):
        loc = [str(part) for part in detail["loc"] if not str(part).startswith(("list[", "function-", "Range"))]
        key = ".".join(loc)
        impossible = detail.get("ctx", {}).get("error")
        if isinstance(impossible, Impossible):
            for name, value, message in impossible.problems:
                yield Problem(f"{key}.{name}" if key else name, value, message)
        elif key.startswith("axes."):
            axis, ranged = ".".join(loc[:2]), len(loc) > 2
            if axis not in seen and not (isinstance(detail["input"], dict) and detail["type"] == "list_type"):
                seen.add(axis)
                wrong = RANGE_WRONG if ranged else "is no list of values: write it like [0, 2, 8]"
                missing = detail["type"] == "missing"
                yield Problem(".".join(loc[:3]), None if missing else detail["input"], wrong)
        elif detail["type"] == "extra_forbidden":
            yield Problem(key, detail["input"], _unknown_field(loc[-1]))
        elif detail["type"] == "missing":
            yield Problem(key, None, f"missing, and there is no default. It takes: {_about(loc)}")
        else:
            yield Problem(key, detail["input"], f"{_said(detail)}: {_about(loc)}")


def _said(detail: Mapping[str, Any]) -> str:
    """A refusal in words of the file, not of the code."""
    kind = str(detail["type"])
    if kind in ("dict_type", "model_type"):
        return "must be a table"
    if kind == "list_type":
        return "must be a list"
    if kind == "string_pattern_mismatch":
        return "is not possible"
    if kind == "string_too_short":
        return "must not be empty"
    return f"must be {str(detail['msg']).removeprefix('Input should be ')}"


def _unknown_field(name: str) -> str:
    fields = [*SweepConfig.model_fields, *Halving.model_fields]
    close = difflib.get_close_matches(name, fields, n=1, cutoff=0.7)
    if close:
        return f"unknown key; did you mean {close[0]}?"
    if name in {key.partition(".")[0] for key in known_keys()}:
        return f"is a section of a run: write its keys under [set] or [axes], like {format_value(name + '.…')} = …"
    return "unknown key; known keys: " + ", ".join(SweepConfig.model_fields)


def _about(loc: list[str]) -> str:
    model: Any = Halving if loc[0] == "halving" and len(loc) > 1 else SweepConfig
    field = model.model_fields.get(loc[1] if model is Halving else loc[0])
    return field.description or "" if field is not None else ""
