"""What `RunConfig` accepts, in words: the known keys, what each takes, the nearest known key. No I/O."""

import difflib
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from slipstream.run_config import RunConfig


@cache
def known_keys() -> dict[str, dict[str, Any]]:
    """JSON schema of every key by its dotted name, in the order of the model; sections have `properties`."""
    schema = RunConfig.model_json_schema()
    keys: dict[str, dict[str, Any]] = {}

    def visit(prefix: str, node: dict[str, Any]) -> None:
        for name, child in node["properties"].items():
            reference = child.get("$ref")
            resolved = schema["$defs"][reference.rsplit("/", 1)[-1]] if reference else child
            keys[prefix + name] = {**resolved, **child}
            if "properties" in resolved:
                visit(f"{prefix}{name}.", resolved)

    visit("", schema)
    return keys


def is_section(key: str) -> bool:
    return "properties" in known_keys().get(key, {})


def accepts_text(key: str) -> bool:
    """Whether any text is a value of `key`."""
    schema = known_keys().get(key, {})
    return any(option.get("type") == "string" and "enum" not in option for option in schema.get("anyOf", [schema]))


def bounds_text(schema: Mapping[str, Any], digits: int = 6) -> str:
    """The bounds of a number, in words; empty where it has none. Beyond so many digits a number has an exponent."""
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    words = []
    if low is not None:
        words.append(f"at least {low:.{digits}g}")
    if above is not None:
        words.append(f"above {above:.{digits}g}")
    if high is not None:
        words.append(f"at most {high:.{digits}g}")
    if below is not None:
        words.append(f"below {below:.{digits}g}")
    return " and ".join(words)


def _describe(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        examples = {"examples": schema["examples"]} if "examples" in schema else {}
        return " or ".join(
            _describe({**option, **examples}) for option in schema["anyOf"] if option.get("type") != "null"
        )
    if "enum" in schema:
        return "one of " + ", ".join(format_value(choice) for choice in schema["enum"])
    kind = schema.get("type")
    if kind in ("integer", "number"):
        name = "a whole number" if kind == "integer" else "a number"
        return f"{name} {bounds_text(schema)}".rstrip()
    if kind == "boolean":
        return "true or false"
    if kind == "array":
        least = "" if not schema.get("minItems") else f" with at least {schema['minItems']} entry"
        return f'a list of text, like ["a", "b"]{least}'
    if "properties" in schema:
        return "a section: keys under a heading like [trainer]"
    if "pattern" in schema:
        return (
            "text like " + format_value(schema["examples"][0]) if "examples" in schema else f"text {schema['pattern']}"
        )
    return "text that is not empty" if schema.get("minLength") else "text"


def valid_values(key: str, entry: bool = False) -> str:
    """What `key` takes (or one entry of its list), in words: type, bounds, choices. Empty for an unknown key."""
    schema = known_keys().get(key)
    if schema is None:
        return ""
    return _describe(schema["items"] if entry else schema)


def field_help(dotted: str) -> str:
    """A paragraph about a key: name, meaning, what it takes, its default. Raises KeyError on an unknown key."""
    schema = known_keys()[dotted]
    text = f"{dotted}: {schema['description']}"
    if is_section(dotted):
        return f"{text} Keys: {', '.join(schema['properties'])}."
    optional = any(option.get("type") == "null" for option in schema.get("anyOf", []))
    if "default" in schema:
        default = "not set" if schema["default"] is None else format_value(schema["default"])
    else:
        default = "not set" if optional else _factory_default(dotted)
    return f"{text} Takes {valid_values(dotted)}. " + (f"Default: {default}." if default else "Required.")


def _factory_default(dotted: str) -> str:
    model: Any = RunConfig
    *sections, name = dotted.split(".")
    for section in sections:
        model = model.model_fields[section].annotation
    field = model.model_fields[name]
    return "" if field.is_required() else format_value(field.get_default(call_default_factory=True))


def nearest_key(key: str) -> str | None:
    """The known key most like `key`: the same name in another section first, then similar spelling."""
    keys = known_keys()
    section, _, name = key.rpartition(".")
    same_name = [k for k in keys if k.rpartition(".")[2] == name and not is_section(k)]
    if len(same_name) == 1:
        return same_name[0]
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == section}
    anywhere = {k.rpartition(".")[2]: k for k in keys if "." in k}
    for names in (siblings, anywhere):
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
        if close:
            return names[close[0]]
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    return close[0] if close else None


def format_value(value: Any) -> str:
    """`value` as it would stand in TOML, shortened."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, list):
        text = "[" + ", ".join(format_value(item) for item in value) + "]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{k} = {format_value(v)}" for k, v in value.items()) + "}"
    else:
        text = str(value)
    return text if len(text) <= 200 else text[:197] + "…"
