"""Converts values to JSON, and back by the type hints of their fields, so a new field needs no further code."""

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints


def to_json(value: Any) -> Any:
    """Returns a dataclass or named tuple as a mapping of its fields, a tuple as a list, an enum as its value."""
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "_asdict"):  # a named tuple
        return {name: to_json(one) for name, one in value._asdict().items()}
    if isinstance(value, tuple | list):
        return [to_json(one) for one in value]
    if isinstance(value, Mapping):
        return {key: to_json(one) for key, one in value.items()}
    return value.value if isinstance(value, Enum) else value


def from_json(kind: Any, value: Any) -> Any:
    """Returns a value of a type from the output of `to_json`: a dataclass, a named tuple, or a type of their fields.

    A missing field gets its default; unknown keys are ignored.

    Raises:
        KeyError: if a field without a default is missing.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):  # X | None
        return None if value is None else from_json(arguments[0], value)
    if origin is tuple:  # tuple[X, ...]
        return tuple(from_json(arguments[0], one) for one in value)
    if origin is Mapping or origin is dict:
        return {key: from_json(arguments[1], one) for key, one in value.items()}
    if is_dataclass(kind) or hasattr(kind, "_asdict"):
        names = [name for name in _hints(kind) if name in value or name not in _defaulted(kind)]
        return kind(**{name: from_json(_hints(kind)[name], value[name]) for name in names})
    return kind(value) if isinstance(kind, type) and issubclass(kind, Enum) else value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)} if is_dataclass(kind) else hints


@cache
def _defaulted(kind: Any) -> frozenset[str]:
    """Returns the fields of a dataclass or named tuple that have a default."""
    if is_dataclass(kind):
        has_default = [field for field in fields(kind) if (field.default, field.default_factory) != (MISSING, MISSING)]
        return frozenset(field.name for field in has_default)
    return frozenset(kind._field_defaults)
