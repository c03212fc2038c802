"""The JSON schema of a config, by which editors complete, explain and check its YAML files.

It has a definition for each section, and for a file of each group: `#/definitions/optimizer_file`.
"""

import dataclasses
import json
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from trainer.config import sources, typed
from trainer.config.comments import meaning, meanings_of_values

Schema = dict[str, Any]

DIALECT = "http://json-schema.org/draft-07/schema#"  # the newest that editors of YAML know
TYPES = {int: "integer", float: "number", bool: "boolean", str: ["string", "number"]}  # text may look like a number
BOUNDS = {"at_least": "minimum", "above": "exclusiveMinimum", "at_most": "maximum", "below": "exclusiveMaximum"}
KEYS_OF = {"job": "^(ps|worker|evaluator)$", "task": "^(ps|worker|evaluator)(:[0-9]+)?$"}
LATER = {"type": "string", "pattern": r"^\?\?\?$|\$\{"}  # ??? and references, which stand for any value
HYDRA = {"type": "object", "description": "settings of Hydra, which composes the config"}


def text() -> str:
    """Returns the schema as the text of a file."""
    return json.dumps(config_schema(), indent=1) + "\n"


def config_schema() -> Schema:
    """Returns the schema of a whole config, which is also that of an experiment."""
    definitions: Schema = {"later": LATER, "defaults": _defaults()}
    properties = _properties("", typed.TypedConfig, definitions)
    for group in _groups():
        if group != "experiment":
            definitions[f"{group}_file"] = _file(definitions[group])
    return {
        "$schema": DIALECT,
        "title": "Config of python -m trainer",
        **_closed({"defaults": {"$ref": "#/definitions/defaults"}, "hydra": HYDRA} | properties),
        "definitions": definitions,
    }


def _properties(prefix: str, kind: Any, definitions: Schema) -> Schema:
    """Returns the keys of a section; those below it become definitions."""
    hints, properties = get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        of, key = hints[field.name], f"{prefix}{field.name}"
        if dataclasses.is_dataclass(of):
            section = _closed(_properties(f"{key}.", of, definitions))
            definitions[key] = _about(_doc(of)) | section
            properties[field.name] = {"$ref": f"#/definitions/{key}"}
        else:
            properties[field.name] = _about(_meaning(kind, field, of)) | _value(of, field.metadata) | _default(field)
    return properties


def _closed(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _file(section: Schema) -> Schema:
    """Returns a file of a group: the keys of its section, and the files it builds on."""
    return section | {"properties": {"defaults": {"$ref": "#/definitions/defaults"}} | section["properties"]}


def _about(text: str) -> Schema:
    return {"description": text} if text else {}


def _value(kind: Any, metadata: Mapping[str, Any] = types.MappingProxyType({})) -> Schema:
    """Returns the schema of the values that a key of this type takes, with references."""
    if kind is Any:
        return {}
    parts = [part for part in (get_args(kind) if _is_union(kind) else (kind,)) if part is not type(None)]
    values = [_typed(part, metadata) for part in parts]
    if type(None) in get_args(kind):
        values.append({"type": "null"})
    return {"anyOf": [*values, {"$ref": "#/definitions/later"}]}


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _typed(kind: Any, metadata: Mapping[str, Any]) -> Schema:
    if get_origin(kind) is list:
        return {"type": "array", "items": _value(get_args(kind)[0])}
    if get_origin(kind) is dict:
        names = {"propertyNames": {"pattern": KEYS_OF[metadata["keys"]]}} if "keys" in metadata else {}
        return {"type": "object", **names, "additionalProperties": _value(get_args(kind)[1])}
    if issubclass(kind, Enum):
        return {"enum": [member.name for member in kind]}
    return {"type": TYPES[kind]} | {BOUNDS[name]: bound for name, bound in metadata.items() if name in BOUNDS}


def _default(field: Any) -> Schema:
    value = field.default
    if value in (dataclasses.MISSING, MISSING):
        return {}
    return {"default": value.name if isinstance(value, Enum) else value}


def _meaning(kind: Any, field: Any, of: Any) -> str:
    """Returns the comment of a key, with those of its values, and what reads it."""
    about = meaning(kind, field, of)
    if readers := field.metadata.get("read_by"):
        about = f"{about} (used by {', '.join(readers)})".strip()
    values = [f"{value}: {text}" for value, text in meanings_of_values(of).items() if text]
    return "\n".join(filter(None, [about, *values]))


def _doc(kind: Any) -> str:
    doc = kind.__doc__ or ""
    return "" if doc.startswith(f"{kind.__name__}(") else " ".join(doc.split())  # a dataclass gets one by itself


def _groups() -> dict[str, list[str]]:
    """Returns the shipped choices of each group."""
    folders = sorted(path for path in sources.conf_dir().iterdir() if path.is_dir())
    return {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}


def _defaults() -> Schema:
    """Returns the schema of a defaults list, the files that a file builds on: names, or choices of groups."""
    choices = dict(_choices())
    of_group = {"type": "object", "properties": choices, "additionalProperties": False, "maxProperties": 1}
    others = {rf"^(optional |override )*/?({'|'.join(_groups())}|hydra/\w+)(@[\w.]+)?$": _choice([])}
    about = "files that this one builds on, e.g. override /cluster: 2ps4w"
    return {
        "description": about,
        "type": "array",
        "items": {"anyOf": [{"type": "string"}, of_group | {"patternProperties": others}]},
    }


def _choices() -> Iterator[tuple[str, Schema]]:
    for group, options in _groups().items():
        yield f"override /{group}", _choice(options)


def _choice(options: list[str]) -> Schema:
    """Returns the schema of a choice of a group: a shipped file, or a file or function of the user."""
    shipped = [{"enum": options}] if options else []
    return {"anyOf": [*shipped, {"type": ["string", "null"]}, {"type": "array", "items": {"type": "string"}}]}
