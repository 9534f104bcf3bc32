"""The cells of a sweep, and the configuration of each."""

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.config_file import ConfigError, Problem, parse_config
from slipstream.config_schema import format_value
from slipstream.run_config import RunConfig
from slipstream.sweep.spec import MOST_CELLS, Range, SweepConfig, same

TRIES = 100  # draws of a random cell that was drawn before, until the space counts as used up
DEFAULT = ""  # as a value: the key's default


@dataclass(frozen=True)
class CellSpec:
    """One cell: `id` is c00, c01, …; `values` is what it sets, by key."""

    id: str
    values: Mapping[str, Any]

    def __str__(self) -> str:
        return ", ".join(f"{key.rpartition('.')[2]} {shown(value)}" for key, value in self.values.items())


def shown(value: Any) -> str:
    """A value of a cell, for a person."""
    if value == DEFAULT and isinstance(value, str):
        return "default"
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else format_value(value)


def expand(sweep: SweepConfig) -> tuple[CellSpec, ...]:
    """All cells, in an order that the sweep alone decides. Raises ConfigError."""
    if sweep.method == "list":
        found = [dict(cell) for cell in sweep.cells]
        problems = [
            Problem(f"cells[{index}]", cell, "is the same as an earlier cell: leave one of them out")
            for index, cell in enumerate(found)
            if any(_alike(cell, earlier) for earlier in found[:index])
        ]
        if problems:
            raise ConfigError(problems, "the sweep")
    elif sweep.method == "random":
        found = _random(sweep)
    else:
        axes = {key: values for key, values in sweep.axes.items() if not isinstance(values, Range)}
        size = math.prod(len(values) for values in axes.values())
        if size <= MOST_CELLS:
            found = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
        else:
            raise ConfigError([_too_many(size)], "the sweep")
    if len(found) > MOST_CELLS:
        message = f"are more than {MOST_CELLS}: leave some out"
        raise ConfigError([Problem("cells", len(found), message)], "the sweep")
    width = max(2, len(str(len(found) - 1)))
    return tuple(CellSpec(f"c{index:0{width}d}", values) for index, values in enumerate(found))


def _too_many(size: int) -> Problem:
    return Problem(
        "axes", size, f'that many cells are more than {MOST_CELLS}: leave values out, or set method = "random"'
    )


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)


def _random(sweep: SweepConfig) -> list[dict[str, Any]]:
    draw = random.Random(sweep.seed)
    found: list[dict[str, Any]] = []
    for _ in range(sweep.samples or 0):
        for _ in range(TRIES):
            cell = {key: _drawn(draw, values) for key, values in sweep.axes.items()}
            if not any(_alike(cell, earlier) for earlier in found):
                found.append(cell)
                break
        else:
            way_out = 'lower it, add values, or set method = "grid"'
            message = f"only {len(found)} different cells were found: {way_out}"
            raise ConfigError([Problem("samples", sweep.samples, message)], "the sweep")
    return found


def _drawn(draw: random.Random, values: list[Any] | Range) -> Any:
    if not isinstance(values, Range):
        return draw.choice(values)
    low, high = values.low, values.high
    whole = isinstance(low, int) and isinstance(high, int)
    if values.log:
        value = math.exp(draw.uniform(math.log(low), math.log(high)))
    else:
        value = draw.randint(int(low), int(high)) if whole else draw.uniform(low, high)
    value = round(value) if whole else float(f"{value:.4g}")
    return min(max(value, low), high)


def override(key: str, value: Any) -> str:
    """A value of a cell as `--set` takes it."""
    if value is None or (isinstance(value, str) and value == DEFAULT):
        return f"{key}="
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one character that only JSON allows
    return f"{key}={text}"


def configure(base: RunConfig, fixed: Mapping[str, Any], cell: CellSpec) -> RunConfig:
    """The configuration of a cell. Raises ConfigError."""
    overrides = [override(key, value) for key, value in {**fixed, **cell.values}.items()]
    return parse_config(base.model_dump(), overrides, f"cell {cell.id} ({cell})")


def configure_all(base: RunConfig, sweep: SweepConfig, cells: Sequence[CellSpec]) -> dict[str, RunConfig]:
    """The configuration of every cell. Raises ConfigError with what is wrong with any of them."""
    configs: dict[str, RunConfig] = {}
    refused: list[tuple[CellSpec, Problem]] = []
    for cell in cells:
        try:
            configs[cell.id] = configure(base, sweep.set, cell)
        except ConfigError as error:
            refused += [(cell, problem) for problem in error.problems]
    if refused:
        raise ConfigError(together(refused), "the sweep")
    if twins := list(_twins(cells, configs)):
        raise ConfigError(twins, "the sweep")
    return configs


def _twins(cells: Sequence[CellSpec], configs: Mapping[str, RunConfig]) -> Iterator[Problem]:
    """Cells that would be the same run as an earlier one, written otherwise: 1 and "1" of a text, a default and ""."""
    first: dict[str, CellSpec] = {}
    for cell in cells:
        earlier = first.setdefault(configs[cell.id].model_dump_json(), cell)
        if earlier is not cell:
            yield Problem(f"cell {cell.id}", None, f"{cell} is the same run as {earlier} ({earlier.id}): leave one out")


def together(refused: Sequence[tuple[CellSpec, Problem]]) -> list[Problem]:
    """Problems of cells, each once, with the cells that have it."""
    cells: dict[str, list[CellSpec]] = {}
    first: dict[str, Problem] = {}
    for cell, problem in refused:
        first.setdefault(str(problem), problem)
        cells.setdefault(str(problem), []).append(cell)
    found = []
    for text, problem in first.items():
        named = cells[text]
        whose = f"cell {named[0].id} ({named[0]})" + (f" and {len(named) - 1} more" if len(named) > 1 else "")
        found.append(Problem(problem.key, problem.value, f"{problem.message} [{whose}]", problem.severity))
    return found
