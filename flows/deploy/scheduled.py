"""What a schedule starts: a training of a preset or a file, or a sweep.

Call `flows.connection.connect` before this module is imported.
"""

import contextlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from flows.cli.plain import HOME
from flows.deploy.apply import known_flows
from flows.deploy.deployments import FlowFacts
from flows.deploy.presets import EXAMPLES, VALID
from flows.names import care_pool, runs_pool
from slipstream.config_file import ConfigError, Problem, load_config
from tasks.prepare import check

SOURCE = "the schedule"
SWEEP_KEYS = {"axes", "cells", "base"}  # of a sweep file; no configuration has them


@dataclass(frozen=True)
class Work:
    """Attributes:
    flow: name of the flow, the first half of the deployment's name.
    preset: name of the preset, or of the file without its ending.
    facts: of the flow.
    parameters: of the flow, all of them: they become the deployment's defaults.
    pool: work pool that the runs are started in.
    cwd: folder that they start in; relative paths are relative to it.
    notes: warnings of the check.
    """

    flow: str
    preset: str
    facts: FlowFacts
    parameters: dict[str, Any]
    pool: str
    cwd: Path
    notes: list[str] = field(default_factory=list)

    @property
    def entrypoint(self) -> str:
        """Of the flow, for Prefect; in full where the runs start elsewhere than in the checkout."""
        return self.facts.entrypoint if self.cwd == HOME else f"{HOME}/{self.facts.entrypoint}"


def work_of(what: str, overrides: Sequence[str], instance: str) -> Work:
    """What PRESET|FILE with its overrides is, checked. Raises ConfigError."""
    path, cwd = _find(what)
    if SWEEP_KEYS & set(_top_level(path)):
        return _sweep(path, overrides, instance, cwd)
    with contextlib.chdir(cwd):
        config = load_config(path, overrides)
        notes = [str(problem) for problem in check(config)]
    facts = known_flows()["train"]
    return Work("train", path.stem, facts, {"config": config.to_plain()}, runs_pool(instance), cwd, notes)


def _find(what: str) -> tuple[Path, Path]:
    """The file, and the folder that its runs start in: a preset's in the checkout, a file's where the command is run."""
    if what.endswith(".toml") or Path(what).expanduser().is_file():
        path, cwd = Path(what).expanduser().absolute(), Path.cwd()
        if path.exists() and not VALID.match(path.stem):
            message = "cannot name a deployment: rename the file (letters, digits, '_' and '-')"
            raise ConfigError([Problem("FILE", what, message)], SOURCE)
        return path, cwd
    path = EXAMPLES / f"{what}.toml"
    if not VALID.match(what) or not path.is_file():
        known = ", ".join(sorted(path.stem for path in EXAMPLES.glob("*.toml")))
        message = f"there is no such preset; there are {known}, or name a .toml file"
        raise ConfigError([Problem("PRESET", what, message)], SOURCE)
    return path, HOME


def _top_level(path: Path) -> dict[str, Any]:
    """Keys of the file; {} where `load_config` is to say what is wrong with it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}


def _sweep(path: Path, overrides: Sequence[str], instance: str, cwd: Path) -> Work:
    """Raises ConfigError."""
    facts = known_flows().get("sweep")
    if facts is None:
        raise ConfigError([Problem("FILE", str(path), "is a sweep, and there is no flow for sweeps")], SOURCE)
    with contextlib.chdir(cwd):
        parameters = import_module("flows.sweep").parameters_of(path, overrides)
    return Work("sweep", path.stem, facts, parameters, care_pool(instance), cwd)
