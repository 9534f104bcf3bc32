"""Whether a run logs what the registry says."""

from collections.abc import Callable

from slipstream.metrics.registry import applicable, find

MISSING = {"tools", "environment", "moe", "peak FLOPs", "eval"}  # what the runs of the tests do not have


def logged(names: set[str], missing: set[str], wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Every name is in the registry, and every metric is there that applies to a run without what is `missing`."""
    entries = {name: find(name) for name in names}
    assert {name for name, entry in entries.items() if entry is None} == set(), "logged, but not in the registry"
    found = {entry.name for entry in entries.values() if entry is not None}
    expected = {metric.name for metric in applicable(missing) if wanted(metric.name)}
    assert expected - found == set(), "in the registry, but not logged"
