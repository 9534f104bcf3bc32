"""Reading and writing the configuration of a run as TOML; every refusal says what would be valid."""

import copy
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomlkit
from pydantic import BaseModel, ValidationError

from slipstream.config_schema import (
    accepts_text,
    field_help,
    format_value,
    is_section,
    known_keys,
    nearest_key,
    valid_values,
)
from slipstream.run_config import Impossible, RunConfig

__all__ = ["EXAMPLE", "ConfigError", "Problem", "dump_config", "field_help", "load_config", "parse_config"]

REQUIRED = ("model.name", "data.source")
SHOWN = 120  # columns of a line that is wrong

EXAMPLE = """\
[model]
name = "Qwen/Qwen3-0.6B"

[data]
source = "reasoning_gym:chain_sum?size=2000&seed=1"

[reward]
functions = ["slipstream.rewards:reasoning_gym_reward"]
"""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration.

    `key` is dotted ("trainer.max_steps"; empty for the file as a whole), `value` is what stands there (None: nothing),
    `message` says what is wrong and the way out. A "warning" does not stop a run.
    """

    key: str
    value: Any
    message: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        if not self.key:
            return self.message
        return (
            f"{self.key}: {self.message}"
            if self.value is None
            else f"{self.key} = {format_value(self.value)}: {self.message}"
        )


class ConfigError(Exception):
    """A configuration is refused. `problems` holds every reason; the text lists them, one a line."""

    def __init__(self, problems: Sequence[Problem], source: str = "the configuration") -> None:
        self.problems = list(problems)
        count = f"{len(self.problems)} problem" + ("s" if len(self.problems) != 1 else "")
        super().__init__(f"{source}: {count}\n" + "\n".join(f"  {problem}" for problem in self.problems))


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file and apply `section.key=value` overrides, later ones last.

    An override's value is read as TOML, else taken as text (also where the key takes text only); an empty value puts
    the key back to its default. Raises ConfigError with all problems.
    """
    values = read_toml(Path(path).expanduser())
    if "base" in values and any(key in values for key in ("axes", "cells")):
        message = (
            f"this is a sweep, not a run: `slipstream sweep {path}` runs it, and its base, {values['base']!r}, is one"
        )
        raise ConfigError([Problem("", None, message)], str(path))
    return parse_config(values, overrides, source=str(path))


def parse_config(values: dict[str, Any], overrides: Sequence[str] = (), source: str = "the configuration") -> RunConfig:
    """`load_config` for values that are read already. `values` is not changed."""
    merged = _merge({}, values)
    problems = [problem for text in overrides if (problem := _override(merged, text)) is not None]
    problems += _unknown_keys(merged, "")
    config, invalid = _validate(merged)
    problems += invalid
    if problems or config is None:
        raise ConfigError(problems, source)
    return config


def dump_config(config: RunConfig) -> str:
    """TOML that `load_config` reads back to an equal configuration, with what each key means as a comment."""
    document = tomlkit.document()
    _dump(document, config)
    return tomlkit.dumps(document)


def _dump(container: Any, section: BaseModel) -> None:
    tables = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            tables.append((name, value))
            continue
        container.add(tomlkit.comment(field.description or name))
        if value is None:
            container.add(tomlkit.comment(f"{name} ="))
        else:
            container.add(name, value)
    for name, value in tables:
        table = tomlkit.table()
        _dump(table, value)
        container.add(tomlkit.nl())
        container.add(name, table)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError, with the line that is wrong."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(
            [
                Problem(
                    "",
                    None,
                    f"there is no such file (looked for {path.absolute()}).\n  Copy one from the folder examples/, "
                    "or start from this:\n\n    " + EXAMPLE.strip().replace("\n", "\n    ").replace("\n    \n", "\n\n"),
                )
            ],
            str(path),
        ) from None
    except IsADirectoryError:
        raise ConfigError([Problem("", None, "this is a folder: name the .toml file in it")], str(path)) from None
    except UnicodeDecodeError as error:
        message = f"this is not UTF-8 text (byte {error.start}): save it as UTF-8"
        raise ConfigError([Problem("", None, message)], str(path)) from None
    except OSError as error:
        raise ConfigError([Problem("", None, f"cannot be read: {error.strerror}")], str(path)) from None
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError([Problem("", None, "nested too deeply: flatten it")], str(path)) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([Problem("", None, _malformed(text, str(error)))], str(path)) from None


def _malformed(text: str, error: str) -> str:
    """The decoder's message with the line that it points to."""
    lines = text.splitlines() or [""]
    found = re.search(r"^(.*) \(at line (\d+), column (\d+)\)$", error, re.DOTALL)
    what, row, column = (
        (found[1], int(found[2]), int(found[3]))
        if found
        else (
            re.sub(r" \(at end of document\)$", "", error),
            len(lines),
            len(lines[-1]) + 1,
        )
    )
    line, at = _around(lines[min(row, len(lines)) - 1], column - 1)
    hint = ' (text needs quotes: key = "value")' if what == "Invalid value" else ""
    return f"not valid TOML at line {row}, column {column}: {what}{hint}\n    {line}\n    {' ' * at}^"


def _around(line: str, at: int) -> tuple[str, int]:
    """What of a line fits on a terminal around a place in it, and the place in that."""
    begin = max(0, min(at - SHOWN // 2, len(line) - SHOWN))
    end = begin + SHOWN
    left, right = "…" * (begin > 0), "…" * (end < len(line))
    return f"{left}{line[begin:end]}{right}", at - begin + len(left)


def _merge(into: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    for key, value in values.items():
        if isinstance(value, dict):
            old = into.get(key)
            into[key] = _merge(old if isinstance(old, dict) else {}, value)
        else:
            into[key] = value
    return into


def _override(values: dict[str, Any], text: str) -> Problem | None:
    """Apply one `section.key=value` to `values` in place; the problem where it cannot be."""
    key, equals, raw = text.partition("=")
    key, raw = key.strip(), raw.strip()
    parts = key.split(".")
    if not equals or not all(re.fullmatch(r"[A-Za-z0-9_-]+", part) for part in parts):
        return Problem("", None, f"--set {text!r}: write section.key=value, like --set trainer.max_steps=100")
    for depth in range(1, len(parts)):
        prefix = ".".join(parts[:depth])
        if prefix in known_keys() and not is_section(prefix):
            return Problem(key, raw, f"{prefix} is a value, not a section: write --set {prefix}=…")
    section: dict[str, Any] = values
    for part in parts[:-1]:
        child = section.get(part)
        if not isinstance(child, dict):
            child = section[part] = {}
        section = child
    if raw == "":
        if key not in known_keys():
            return Problem(key, raw, unknown_key(key))
        section.pop(parts[-1], None)
        return None
    try:
        value: Any = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    if accepts_text(key) and not isinstance(value, str):
        value = raw  # a revision such as 1234567 is text although it looks like a number
    _merge(section, {parts[-1]: value})
    return None


def unknown_key(key: str) -> str:
    """What is said of a key that there is none of: the nearest one, or all of its section."""
    nearest = nearest_key(key)
    if nearest:
        return f"unknown key; did you mean {nearest}?"
    section = key.rpartition(".")[0]
    known = [k.rpartition(".")[2] for k in known_keys() if k.rpartition(".")[0] == section]
    return "unknown key; known " + (f"in {section}: " if section else "sections and keys: ") + ", ".join(known)


def _unknown_keys(values: dict[str, Any], prefix: str) -> Iterator[Problem]:
    """Problems of unknown keys; they are taken out of `values`, so that the rest can be judged."""
    for name in list(values):
        key = prefix + name
        if key not in known_keys():
            yield Problem(key, values.pop(name), unknown_key(key))
        elif isinstance(values[name], dict) and is_section(key):
            yield from _unknown_keys(values[name], f"{key}.")


def _validate(values: dict[str, Any]) -> tuple[RunConfig | None, list[Problem]]:
    """The configuration, or every problem: what is faulty gives way to its default, so that the rest is judged."""
    values = copy.deepcopy(values)
    problems: list[Problem] = []
    faulty: set[str] = set()
    while True:
        try:
            config = RunConfig.model_validate(values, strict=True)
        except ValidationError as error:
            found = list(_translate(error))
        else:
            return (None, problems) if problems else (config, [])
        names = {key.rpartition(".")[2] for key in faulty}
        # a combination with a value that is only a stand-in says nothing
        problems += [p for p in found if p.key not in faulty and not names & set(re.findall(r"\w+", p.message))]
        new = {problem.key for problem in found} - faulty
        if not new:  # a combination of given values with a default: only the whole section can give way
            sections = {problem.key.partition(".")[0] for problem in found} - faulty
            if not sections:
                return None, problems
            faulty |= {f"{section}.{name}" for section in sections for name in values.get(section, {})}
            new = sections
        faulty |= new
        for key in new:
            _stand_in(values, key)


def _translate(error: ValidationError) -> Iterator[Problem]:
    for detail in error.errors(include_url=False):
        key = ".".join(part for part in detail["loc"] if isinstance(part, str))
        impossible = detail.get("ctx", {}).get("error")
        if isinstance(impossible, Impossible):
            for name, value, message in impossible.problems:
                yield Problem(f"{key}.{name}" if key else name, value, message)
        elif detail["type"] == "missing":
            for required in [k for k in REQUIRED if k == key or k.startswith(f"{key}.")]:
                about = known_keys()[required]["description"]
                yield Problem(required, None, f"missing, and there is no default. It takes: {about}")
        else:
            index = next((part for part in detail["loc"] if isinstance(part, int)), None)
            entry = "" if index is None else f"entry {index + 1} of the list "
            about = f" ({known_keys()[key]['description']})" if detail["type"] == "string_pattern_mismatch" else ""
            yield Problem(key, detail["input"], f"{entry}must be {valid_values(key, index is not None)}{about}")


def _stand_in(values: dict[str, Any], key: str) -> None:
    """Put `key` back to its default, or to a stand-in where it has none."""
    *sections, name = key.split(".")
    for part in sections:
        child = values.get(part)
        if not isinstance(child, dict):
            child = values[part] = {}
        values = child
    values.pop(name, None)
    if key in REQUIRED:
        values[name] = "stand-in"
