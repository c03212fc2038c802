"""Validates by those keywords of JSON schema, draft 7, that the trainer's schema uses; any other is an error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
ABOUT = {"$schema", "title", "description", "default", "definitions"}  # keywords that refuse nothing
WITH_PROPERTIES = {"properties", "patternProperties", "additionalProperties"}


def errors(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Yields what a schema refuses of a value, each with its dotted place."""
    for keyword, rule in schema.items():
        if keyword not in ABOUT:
            yield from _errors(value, keyword, rule, schema, root, where)


def at(pointer: str, root: Any) -> Any:
    """What a pointer leads to: `#/definitions/model`."""
    for part in pointer.removeprefix("#").split("/")[1:]:
        root = root[part]
    return root


def _errors(value: Any, keyword: str, rule: Any, schema: Any, root: Any, where: str) -> Iterator[str]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match keyword:
        case "$ref":
            yield from errors(value, at(rule, root), root, where)
        case "type":
            if not any(_is_a(value, name) for name in ([rule] if isinstance(rule, str) else rule)):
                yield f"{where}: {value!r} is no {rule}"
        case "enum":
            if value not in rule:
                yield f"{where}: {value!r} is none of {rule}"
        case "pattern":
            if isinstance(value, str) and not re.search(rule, value):
                yield f"{where}: {value!r} does not match {rule}"
        case "minimum" | "exclusiveMinimum" | "maximum" | "exclusiveMaximum":
            if is_number and not _is_within(value, keyword, rule):
                yield f"{where}: {value} breaks {keyword} {rule}"
        case "anyOf":
            if all(any(errors(value, one, root)) for one in rule):
                yield f"{where}: {value!r} is none of what may stand here"
        case "items":
            for index, item in enumerate(value if isinstance(value, list) else []):
                yield from errors(item, rule, root, f"{where}[{index}]")
        case "maxProperties":
            if isinstance(value, dict) and len(value) > rule:
                yield f"{where}: has more than {rule} keys"
        case "propertyNames":
            for name in value if isinstance(value, dict) else ():
                yield from errors(name, rule, root, f"{where}.{name}")
        case "properties" | "patternProperties" | "additionalProperties":
            if isinstance(value, dict) and keyword == next(name for name in schema if name in WITH_PROPERTIES):
                for name, inner in value.items():
                    yield from _of_property(name, inner, schema, root, f"{where}.{name}".removeprefix("."))
        case _:
            raise AssertionError(f"{keyword} is not a keyword of this validator")


def _of_property(name: str, value: Any, schema: Any, root: Any, where: str) -> Iterator[str]:
    rules = [schema["properties"][name]] if name in schema.get("properties", {}) else []
    rules += [rule for pattern, rule in schema.get("patternProperties", {}).items() if re.search(pattern, name)]
    other = schema.get("additionalProperties", {})
    if not rules and other is False:
        yield f"{where}: unknown key"
    for rule in rules or ([] if other is False else [other]):
        yield from errors(value, rule, root, where)


def _is_a(value: Any, name: str) -> bool:
    if name in ("integer", "number"):
        return isinstance(value, int if name == "integer" else int | float) and not isinstance(value, bool)
    return isinstance(value, TYPES[name])


def _is_within(value: float, keyword: str, bound: float) -> bool:
    return {
        "minimum": value >= bound,
        "exclusiveMinimum": value > bound,
        "maximum": value <= bound,
        "exclusiveMaximum": value < bound,
    }[keyword]
