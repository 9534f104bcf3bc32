"""Presets: configurations that a deployment's form is filled with."""

import re
from collections.abc import Sequence
from pathlib import Path

from slipstream.config_file import ConfigError, Problem, load_config
from slipstream.run_config import RunConfig

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CUSTOM = "custom"  # the deployment without a preset
VALID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")


def load_presets(files: Sequence[Path] = ()) -> dict[str, RunConfig]:
    """The examples and `files`, by name: the file's, without its ending. A file of an example's name takes its place.

    Raises ConfigError naming the file.
    """
    found: dict[str, RunConfig] = {}
    given: dict[str, Path] = {}
    own = list(dict.fromkeys(path.absolute() for path in files))
    for path in [*sorted(EXAMPLES.glob("*.toml")), *own]:
        name = path.stem
        if not VALID.match(name) or name == CUSTOM:
            raise ConfigError(
                [
                    Problem(
                        "--preset",
                        str(path),
                        f"{name!r} cannot name a deployment: rename the file (letters, digits, _, -)",
                    )
                ]
            )
        if name in given:
            raise ConfigError([Problem("--preset", str(path), f"{given[name]} has the same name: rename one of them")])
        if path in own:
            given[name] = path
        found[name] = load_config(path)
    return found


def in_place_of_examples(files: Sequence[Path]) -> list[Path]:
    """Those of the files that have an example's name."""
    return [path.absolute() for path in files if (EXAMPLES / f"{path.stem}.toml").is_file()]
