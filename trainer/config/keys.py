"""Looks up keys in the schema: their types in words, and the nearest key to a misspelt one."""

import copy
import dataclasses
import difflib
import json
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import former_keys, synonyms
from trainer.config.typed import TypedConfig
from trainer.faults.problems import Problem

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
VALUES = {int: "1", float: "0.5", bool: "true", str: "VALUE"}
EXAMPLES = {  # where the default shows no value
    "cluster": "2ps4w",
    "model": "cnn",
    "data": "mnist_10k",
    "strategy": "sync",
    "optimizer": "adam",
    "device": "cpu",
    "cluster.addresses": "{ps:[10.0.0.1:2222],worker:[10.0.0.2:2222]}",
    "device.gpus": "{worker:[0]}",
    "device.memory_fraction": "{worker:0.5}",
    "device.memory_mib": "{worker:8000}",
    "device.growth": "{worker:true}",
    "device.intra_op_threads": "{worker:2}",
    "device.inter_op_threads": "{worker:4}",
    "device.soft_placement": "{worker:false}",
    "device.replicas": "[/cpu:0,/cpu:1]",
    "device.layers": "{dense*:/cpu:1}",
    "placement.pins": "{dense*:0}",
    "placement.growing": "{item:1000000}",
    "placement.min_count": "{item:2}",
    "placement.max_age": "{item:10000}",
    "restart.max_of": "{worker:5}",
    "container.image": "trainer:cpu",
    "container.memory_mib": "{worker:4096}",
    "container.cpus": "{worker:2}",
    "container.mounts": "[/data]",
    "cluster.hosts": "[10.0.0.1,10.0.0.2]",
    "runs.state": "failed",
    "model.name": "cnn",
    "data.name": "mnist_10k",
    "optimizer.name": "adam",
    "optimizer.clip_norm": "1.0",
    "optimizer.ema": "0.99",
    "optimizer.groups": "[{match: '*/bias', weight_decay: 0}]",
}


def schema() -> DictConfig:
    """Returns the typed, empty config; mappings except options accept new keys without Hydra's `+`, sections do not."""
    return copy.deepcopy(_schema())  # a fifth of the time that making one takes


@cache
def _schema() -> DictConfig:
    config = OmegaConf.structured(TypedConfig)
    assert isinstance(config, DictConfig)
    config._set_flag("readonly", None)  # which OmegaConf sets for a frozen dataclass
    for key in declared():
        if dataclasses.is_dataclass(hint(key.split("."))):
            OmegaConf.select(config, key)._set_flag("readonly", None)
        if get_origin(hint(key.split("."))) is dict and not key.endswith(".options"):
            OmegaConf.set_struct(OmegaConf.select(config, key), False)
    return config


_type_hints = cache(get_type_hints)  # one config asks for these a hundred times


def hint(path: Sequence[str]) -> Any:
    """Returns the declared type of a key, or None if there is no such key."""
    kind: Any = TypedConfig
    for part in path:
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            kind = _type_hints(kind).get(part)
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        elif kind is not Any:
            return None
    return kind


@cache
def declared() -> tuple[str, ...]:
    """Returns every key and section, dotted, and the group `experiment`, which sets keys of other sections."""
    return (*_names(TypedConfig, ""), "experiment")


def flatten(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Splits a value for a section, `train={steps: 5}`, into values for each of its keys."""
    kind = hint(path)
    if isinstance(value, dict) and (dataclasses.is_dataclass(kind) or get_origin(kind) is dict):
        for name, item in value.items():
            yield from flatten((*path, str(name)), item)
    else:
        yield path, value


def fault(where: str, path: tuple[str, ...], value: Any, schema: Any) -> Problem | None:
    """Returns the problem of a value that an override or a file (`where`) sets; a valid value goes into `schema`."""
    kind = hint(path)
    if kind is None:
        if hint(".".join(path).split(".")) is not None:  # a file says train.steps: 5
            message = "has a dot in its name; in a file sections are nested"
            return Problem(where, "malformed", message, f"write {_nested(path, value)}", about=".".join(path))
        return unknown(where, ".".join(path), value, declared())
    if kind is Any:
        return None
    section = schema
    for part in path[:-1]:
        section = section[part]
    try:
        section[path[-1]] = value
    except OmegaConfBaseException:
        return wrong_type(where, ".".join(path), value, kind)
    return None


def _nested(path: Sequence[str], value: Any) -> str:
    """Returns a key as a file writes it: train: {steps: 5}."""
    first, *rest = ".".join(path).split(".")
    return f"{first}: {{{_nested(rest, value)}}}" if rest else f"{first}: {shown(value)}"


def unknown(where: str, key: str, value: Any, known: Iterable[str], program: str = "trainer --cfg job") -> Problem:
    """Returns the problem of an unknown key, with the nearest known one."""
    known = list(known)
    sections = {name.rpartition(".")[0] for name in known}
    section = key
    while section and section not in sections:
        section = section.rpartition(".")[0]
    prefix = f"{section}." if section else ""
    names = [name[len(prefix) :] for name in known if name.startswith(prefix) and "." not in name[len(prefix) :]]
    message, owner = f"unknown key {key}", section or "config"
    if (new := former_keys.successor(key, value)) is not None:
        remedy = f"type {typed(new, value)}" if new else "leave it out"
        return Problem(where, "former-key", f"{key} is no longer a key", remedy, about=key)
    if (setting := meant(key, value)) is not None:
        return Problem(where, "unknown-key", message, f"type {setting}", about=owner)
    near = nearest(key, known)
    if section or near is None:
        message += f"; {section or 'the config'} has {', '.join(names) or 'no keys'}"
    if near is None:
        return Problem(where, "unknown-key", message, f"python -m {program} lists all keys", about=owner)
    return Problem(where, "unknown-key", message, f"did you mean {typed(near, value)}?", about=owner)


def meant(key: str, value: Any) -> str | None:
    """Returns the setting that corresponds to an option of another program, or None."""
    setting = synonyms.meant(key, value)
    if setting is None or hint(setting.split(".")) is None:
        return setting
    return typed(setting, value) if value not in (None, "") else example(setting)


def typed(key: str, value: Any) -> str:
    """Returns an assignment to a known key, with the value of the misspelt one if the known key can hold it."""
    kind = hint(key.split("."))
    is_choice = kind is None or dataclasses.is_dataclass(kind)
    holds_it = is_choice or not fault("", tuple(key.split(".")), value, schema())
    return f"{key}={shown(value)}" if holds_it else example(key)


def nearest(key: str, known: Iterable[str]) -> str | None:
    """Returns the key that was probably meant, by initials, name or one of its words, in this section or another."""
    known = list(known)
    section, _, name = key.rpartition(".")
    by_name: dict[str, list[str]] = {}
    for other in known:
        by_name.setdefault(other.rpartition(".")[2], []).append(other)
    siblings = [other for other in known if other.rpartition(".")[0] == section]
    names = [other.rpartition(".")[2] for other in siblings]
    near = (
        [full for full in siblings if name in _short(full)]
        or [f"{section}.{match}".removeprefix(".") for match in difflib.get_close_matches(name, names, n=1, cutoff=0.7)]
        or difflib.get_close_matches(key, by_name.get(name, []), n=1, cutoff=0.0)
        or (difflib.get_close_matches(key, known, n=1, cutoff=0.8) if section and not siblings else [])
        or [full for match in difflib.get_close_matches(name, by_name, n=1, cutoff=0.8) for full in by_name[match]]
        or [full for full in known if name in _short(full)]
    )
    return near[0] if near else None


def _short(key: str) -> list[str]:
    """Returns short forms of a key of several words: lr, learning and rate for optimizer.learning_rate."""
    words = key.rpartition(".")[2].split("_")
    return ["".join(word[:1] for word in words), *words] if len(words) > 1 else []


def wrong_type(where: str, key: str, value: Any, kind: Any) -> Problem:
    """Returns the problem of a value that its key cannot hold."""
    if dataclasses.is_dataclass(kind):
        names = ", ".join(field.name for field in dataclasses.fields(kind))
        return Problem(where, "wrong-type", f"{key} is a section with {names}", f"e.g. {example(key)}", about=key)
    better = example(key)
    if isinstance(value, float) and value.is_integer() and int in (kind, *get_args(kind)):
        better = f"{key}={int(value)}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        near = difflib.get_close_matches(str(value).lower(), [member.name for member in kind], n=1)
        better = f"{key}={near[0]}" if near else better
    return Problem(where, "wrong-type", f"{shown(value)!r} is not {describe(kind)}", f"e.g. {better}", about=key)


def describe(kind: Any) -> str:
    """Returns a type in words."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else describe(part) for part in get_args(kind))
    if get_origin(kind) is list:
        values = describe(get_args(kind)[0])
        return "a list [a,b]" + (f", each {values}" if values else "")
    if get_origin(kind) is dict:
        values = describe(get_args(kind)[1])
        return "a mapping {name:value}" + (f", each value {values}" if values else "")
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(member.name for member in kind)}"
    return WORDS.get(kind, "")


def example(key: str) -> str:
    """Returns an assignment to type, with the key's default or else a value of its type."""
    kind = hint(key.split("."))
    if dataclasses.is_dataclass(kind) and key not in EXAMPLES:
        return example(f"{key}.{dataclasses.fields(kind)[0].name}")
    section, _, name = key.rpartition(".")
    if get_origin(hint(section.split("."))) is dict and section not in ("model.options", "data.options"):
        escaped = name.replace(":", "\\:")  # Hydra takes : for the end of the name
        shows_one = re.fullmatch(r"\{[^:,]*:([^,]*)\}", EXAMPLES.get(section, ""))
        return f"{section}={{{escaped}:{shows_one[1] if shows_one else _value(kind)}}}"
    default = OmegaConf.select(_schema(), key)
    return f"{key}={EXAMPLES.get(key) or _value(kind, default)}"


def _value(kind: Any, default: Any = None) -> str:
    if default is not None:
        return shown(default)
    if get_origin(kind) is list:
        return f"[{_value(get_args(kind)[0])}]"
    return VALUES.get(next(iter(get_args(kind)), kind), "VALUE")


def default(key: str) -> str:
    """Returns the default of a key, as it is typed."""
    return shown(OmegaConf.select(_schema(), key, throw_on_missing=False))


def shown(value: Any) -> str:
    """Returns a value as typed on the command line."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, dict):
        escaped = {str(name).replace(":", r"\:"): item for name, item in value.items()}  # as in worker:1
        return "{" + ",".join(f"{name}:{shown(item)}" for name, item in escaped.items()) + "}"
    return str(value)


def _names(kind: Any, prefix: str) -> Iterator[str]:
    for name, inner in get_type_hints(kind).items():
        yield f"{prefix}{name}"
        if dataclasses.is_dataclass(inner):
            yield from _names(inner, f"{prefix}{name}.")
