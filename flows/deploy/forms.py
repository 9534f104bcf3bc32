"""The form of a flow's parameters: Prefect draws it from a JSON schema, which is made readable here. Pure.

What is added shows and validates nothing: titles where there are none, bounds and default at the end of each description,
words instead of type names where a field may be empty.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from slipstream.config_schema import bounds_text

EMPTY = "Empty"
DIGITS = 8
WORDS = {"string": "Text", "integer": "Number", "number": "Number", "boolean": "Yes or no", "array": "List"}


def parameter_fields(function: Callable[..., Any]) -> dict[str, FieldInfo]:
    """What a function's `Annotated[..., Field(...)]` says of its parameters, by name: Prefect does not look there."""
    found: dict[str, FieldInfo] = {}
    for name, hint in get_type_hints(function, include_extras=True).items():
        for part in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
            if isinstance(part, FieldInfo):
                found[name] = part
    return found


def readable(schema: Mapping[str, Any], parameters: Mapping[str, FieldInfo] = {}) -> dict[str, Any]:
    """A copy of a parameter schema whose form a person can fill.

    Args:
        parameters: title and description of the parameters themselves, which win over the schema's.
    """
    found = copy.deepcopy(dict(schema))
    for name, value in found.get("properties", {}).items():
        field = parameters.get(name)
        if field is not None and field.title:
            value["title"] = field.title
        if field is not None and field.description:
            value["description"] = field.description
        if value.get("title") in (None, name):  # Prefect's own choice
            value["title"] = name.replace("_", " ").capitalize()
        if text := value.get("description"):
            value["description"] = _sentence(text)
    for node in [found, *found.get("definitions", {}).values()]:
        for value in node.get("properties", {}).values():
            _explain(value)
    return found


def _sentence(text: str) -> str:
    text = text[0].upper() + text[1:]
    return text if text.endswith((".", "!", "?", ":")) else f"{text}."


def _explain(value: dict[str, Any]) -> None:
    options = value.get("anyOf", [])
    for option in options:
        option["title"] = EMPTY if option.get("type") == "null" else WORDS.get(option.get("type"), "Value")
    bounds = next((text for part in [value, *options] if (text := bounds_text(part, DIGITS))), "")
    said = [_sentence(bounds)] if bounds else []
    default = value.get("default")
    if isinstance(default, bool):
        said.append(f"Default: {'yes' if default else 'no'}.")
    elif isinstance(default, int | float):
        said.append(f"Default: {default:.{DIGITS}g}.")
    elif isinstance(default, str) and default:
        said.append(f"Default: {default}.")
    elif isinstance(default, list) and default:
        said.append(f"Default: {', '.join(map(str, default))}.")
    elif value.get("type") == "array":
        said.append("Default: none.")
    elif any(option["title"] == EMPTY for option in options):
        said.append("Default: empty.")
    if said:
        value["description"] = " ".join([_sentence(value.get("description") or ""), *said]).strip()


def fields(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of the form by its dotted name, sections too, references resolved."""
    definitions = schema.get("definitions", {})

    def visit(prefix: str, node: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, value in node.get("properties", {}).items():
            whole = value
            for reference in [value, *value.get("allOf", [])]:
                if "$ref" in reference:
                    whole = {**definitions[reference["$ref"].rpartition("/")[2]], **value}
            yield prefix + name, whole
            yield from visit(f"{prefix}{name}.", whole)

    yield from visit("", schema)
