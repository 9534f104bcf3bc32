"""docs/configuration.md, made from the configuration model: python -m slipstream.config_reference > docs/configuration.md"""

import types
import typing
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slipstream.run_config import RunConfig

HEAD = """# Configuration

One TOML file with the sections below; `--set section.key=value` changes a key on the command line. Made from the model
(`python -m slipstream.config_reference`); a test holds it. Relative paths are relative to the folder that a run is started in.

Fields of transformers' `TrainingArguments` that are not here keep their defaults.
"""


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is typing.Literal:
        return " / ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(a) for a in arguments if a is not type(None))
    if origin is list:
        return f"list of {_type(arguments[0])}"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true / false"}.get(annotation.__name__, "text")


def _bounds(field: FieldInfo) -> str:
    signs = {Ge: ("≥", "ge"), Gt: (">", "gt"), Le: ("≤", "le"), Lt: ("<", "lt")}
    found = [f"{signs[type(m)][0]} {getattr(m, signs[type(m)][1])}" for m in field.metadata if type(m) in signs]
    return f" ({', '.join(found)})" if found else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if value is None or value == []:
        return "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def reference() -> str:
    """The whole page, as Markdown."""
    lines = [HEAD]
    for name, field in RunConfig.model_fields.items():
        section = field.annotation
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            lines.append(f"- `{name}`: {field.description} Default: {_default(field)}.\n")
            continue
        lines += [f"## [{name}]", "", f"{(section.__doc__ or '').strip().splitlines()[0]}", ""]
        lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        for key, inner in section.model_fields.items():
            kind = _type(inner.annotation) + _bounds(inner)
            lines.append(f"| `{key}` | {kind} | {_default(inner)} | {inner.description} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(reference(), end="")
