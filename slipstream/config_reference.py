"""docs/configuration.md, made from the configuration model: python -m slipstream.config_reference > docs/configuration.md"""

import types
import typing
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slipstream.inherited_arguments import ARGUMENTS, Treatment
from slipstream.run_config import RunConfig

HEAD = """# Configuration

One TOML file with the sections below; `--set section.key=value` changes a key on the command line. Made from the model
(`python -m slipstream.config_reference`); a test holds it. Relative paths are relative to the folder that a run is started in.

Fields of transformers' `TrainingArguments` that are not here keep their defaults; in a script, `AsyncGRPOConfig` takes all of
them: see the end.
"""

INHERITED = """## Inherited training arguments

`AsyncGRPOConfig` inherits every field of transformers' `TrainingArguments`. None is silently ignored: what is not
listed below does what transformers says. An argument that would have no effect beside the others (`warmup_steps` with
the constant schedule, `save_steps` with `save_strategy="no"`, …) is refused, with the argument that it needs. An
*epoch* is a pass over the prompts, counted by settled prompts: how many steps it has is not known in advance. A step is
`gradient_accumulation_steps` micro-batches of one row per process. So a schedule that decays, and any number of steps
given as a fraction, needs `max_steps`; the default schedule is constant.
"""
TITLES: dict[Treatment, str] = {
    "limited": "Refused for some values",
    "refused": "Refused, but for the value that changes nothing",
    "warned": "Accepted with a warning",
    "irrelevant": "Without effect in any trainer, or here",
}


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


def _inherited() -> list[str]:
    lines = [INHERITED]
    for treatment, title in TITLES.items():
        lines += [f"{title}:", "", "| argument | why, and the way out |", "| --- | --- |"]
        found = {name: argument.why for name, argument in ARGUMENTS.items() if argument.treatment == treatment}
        for why in dict.fromkeys(found.values()):
            lines.append(f"| {', '.join(f'`{name}`' for name, other in found.items() if other == why)} | {why} |")
        lines.append("")
    return lines


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
    lines += _inherited()
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(reference(), end="")
