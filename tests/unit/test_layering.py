"""Imports point one way: flows → tasks → cluster → slipstream."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ["slipstream", "cluster", "tasks", "flows"]
FORBIDDEN = {
    "slipstream": {"cluster", "tasks", "flows", "prefect", "submitit"},
    "cluster": {"tasks", "flows", "prefect"},
    "tasks": {"flows", "prefect", "submitit"},
    "flows": {"submitit"},
}


def imported(source: str) -> set[str]:
    """Top-level names of everything that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_what_lies_below(layer: str) -> None:
    files = sorted((ROOT / layer).rglob("*.py"))
    assert files
    found = {str(path.relative_to(ROOT)): imported(path.read_text()) & FORBIDDEN[layer] for path in files}
    assert not {path: names for path, names in found.items() if names}


def test_flow_modules_do_not_postpone_annotations() -> None:
    """Prefect resolves a flow's pydantic parameters at run time."""
    for path in (ROOT / "flows").rglob("*.py"):
        assert "__future__" not in imported(path.read_text()), path


def test_the_check_sees_an_import_inside_a_function() -> None:
    assert imported("def f():\n    from cluster.jobs import JobState\n    import prefect.client") == {
        "cluster",
        "prefect",
    }
