"""A logging window: everything measured since the last log, reduced by the metric's name."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["sum", "max", "min", "mean"]


def kind_of(name: str) -> Kind:
    """How a metric is reduced: by the words of the last part of its name.

    `…count…` is summed; `…max…` and `…min…` keep the extreme; anything else is a weighted mean.
    """
    words = name.rsplit("/", 1)[-1].split("_")
    if "count" in words:
        return "sum"
    if "max" in words:
        return "max"
    if "min" in words:
        return "min"
    return "mean"


@dataclass
class _Cell:
    value: float
    weight: float


class Window:
    """Observations of one window, mergeable over processes."""

    def __init__(self) -> None:
        self._cells: dict[str, _Cell] = {}

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Record one observation. NaN and weight 0 are ignored. For a rate, `weight` is the seconds it holds for."""
        if weight <= 0 or math.isnan(value):
            return
        kind = kind_of(name)
        cell = self._cells.get(name)
        if cell is None:
            self._cells[name] = _Cell(value * weight if kind == "mean" else value, weight)
        elif kind == "mean":
            cell.value += value * weight
            cell.weight += weight
        elif kind == "sum":
            cell.value += value
        else:
            cell.value = max(cell.value, value) if kind == "max" else min(cell.value, value)

    def add_all(self, observations: Iterable[tuple[str, float, float]]) -> None:
        for name, value, weight in observations:
            self.add(name, value, weight)

    def state(self) -> dict[str, tuple[float, float]]:
        """Plain values for another process's `merge`."""
        return {name: (cell.value, cell.weight) for name, cell in self._cells.items()}

    def merge(self, state: dict[str, tuple[float, float]]) -> None:
        """Add another process's window."""
        for name, (value, weight) in state.items():
            if kind_of(name) == "mean":
                self.add(name, value / weight, weight)
            else:
                self.add(name, value, weight)

    def peek(self) -> dict[str, float]:
        """The window's value of each metric by now."""
        return {
            name: cell.value / cell.weight if kind_of(name) == "mean" else cell.value
            for name, cell in self._cells.items()
        }

    def reduce(self, only: Callable[[str], bool] = lambda name: True) -> dict[str, float]:
        """The window's value of each metric (whose name `only` accepts); they are not in the window any more."""
        found = {name: value for name, value in self.peek().items() if only(name)}
        self._cells = {name: cell for name, cell in self._cells.items() if name not in found}
        return found
