"""Checks what a YAML file of the config may contain, on its nodes, before any value is built from them.

A config is data: it names functions of a table and cannot run code, so tags and `_target_` keys are refused here,
and so is a file whose aliases expand to gigabytes. OmegaConf would expand it first.
"""

import math
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from trainer.faults.problems import Kind, Problem

_of_file = partial(Problem, about="file")

MAX_BYTES = 256 * 1024
MAX_NODES = 50_000  # keys and values, each alias counted as what it stands for
OPENS = re.compile(rb"[\[{]|(?<=- )- ")  # starts a list or a mapping within a line
MOST_OPEN = 1000
CODE_KEYS = ("_target_", "()")  # what Hydra and Python's logging take for a callable to import
PLAIN_TAGS = {
    f"tag:yaml.org,2002:{name}"
    for name in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge", "value")
}


def load(text: bytes) -> Any:
    """Parses YAML that a run wrote, which may have been damaged since.

    Raises:
        ValueError, RecursionError, yaml.YAMLError: if it is not YAML.
    """
    return yaml.load(text, Loader=_loader(text))


def _loader(text: bytes) -> Any:
    """Returns libyaml's loader, which is five times as fast, unless a text might overflow its stack."""
    is_deep = len(OPENS.findall(text)) > MOST_OPEN
    return yaml.SafeLoader if is_deep else getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def faults(path: Path) -> list[Problem]:
    """Returns the faults of a YAML file itself; its keys and values are checked against the schema."""
    where = shown(path)
    try:
        root = _compose(path)
        if root is None:
            return [_of_file(where, "not-set", "is empty", "write the keys it should set, or {} if there are none")]
        if _size(root, {}) > MAX_NODES:
            message = f"holds more than {MAX_NODES} keys and values once its aliases (*name) are expanded"
            return [_of_file(where, "over-capacity", message, "refer to other keys as ${key}")]
        if not isinstance(root, yaml.MappingNode):
            message = "is a list at top level" if isinstance(root, yaml.SequenceNode) else "is a scalar, not a mapping"
            return [
                _of_file(f"{where}:1", "wrong-type", f"{message}; a config file maps keys to values", "e.g. name: cnn")
            ]
        return [
            _of_file(f"{where}:{node.start_mark.line + 1}", kind, message, remedy)
            for node, kind, message, remedy in _node_faults(root)
        ]
    except OSError as error:
        return [_of_file(where, "unreadable", f"cannot be read: {error.strerror}", "check its path and permissions")]
    except UnicodeDecodeError as error:
        message = f"is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}"
        return [_of_file(where, "unreadable", message, "save the file as UTF-8")]
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        message = ": ".join(part for part in (error.context, error.problem) if part)
        return [_of_file(f"{where}{line}", "unreadable", f"is not YAML: {message}", "correct that line")]
    except yaml.YAMLError as error:
        return [_of_file(where, "unreadable", f"is not YAML: {str(error).splitlines()[0]}", "remove that character")]
    except RecursionError:
        return [_of_file(where, "over-capacity", "is nested too deeply", "use fewer levels")]
    except ValueError as error:
        return [_of_file(where, "unreadable", str(error), "save it again, as plain UTF-8 text")]


def shown(path: Path) -> str:
    """Returns a path as the user would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def line_of(path: Path, key: str) -> tuple[int, str] | None:
    """Returns the line number of a dotted key, from 1, and the comment at the end of that line."""
    node, number = _compose(path), None
    for part in key.split("."):
        pairs = {name.value: (name, value) for name, value in node.value} if isinstance(node, yaml.MappingNode) else {}
        if part not in pairs:
            break
        number, node = pairs[part][0].start_mark.line, pairs[part][1]
    if number is None:
        return None
    comment = re.search(r"\s#\s*(.*)$", path.read_text(encoding="utf-8").splitlines()[number])
    return number + 1, comment[1] if comment else ""


def _compose(path: Path) -> yaml.Node | None:
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"has more than {MAX_BYTES // 1024} KiB, too large for a config file")
    text = path.read_text(encoding="utf-8")
    if text.startswith("\ufeff"):
        raise ValueError("starts with a byte order mark, which hides its first line from Hydra")
    try:
        return yaml.compose(text, Loader=_loader(text.encode()))
    except yaml.YAMLError:
        return yaml.compose(text, Loader=yaml.SafeLoader)  # its errors say more than libyaml's


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _size(node: yaml.Node, known: dict[int, float]) -> float:
    """Counts the nodes from `node` down; aliases share a node, so it is measured once and counted every time."""
    if id(node) not in known:
        known[id(node)] = math.inf  # what a node that holds itself will see
        known[id(node)] = 1 + sum(_size(child, known) for child in _children(node))
    return known[id(node)]


def _node_faults(node: yaml.Node) -> Iterator[tuple[yaml.Node, Kind, str, str]]:
    if node.tag not in PLAIN_TAGS:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        message = f"has the tag {tag}; a config is plain data and runs no code"
        yield node, "unsafe", message, "write a plain value without a tag"
    if isinstance(node, yaml.MappingNode):
        yield from _key_faults(node)
    for child in _children(node):
        yield from _node_faults(child)


def _key_faults(node: yaml.MappingNode) -> Iterator[tuple[yaml.Node, Kind, str, str]]:
    seen: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            yield key, "malformed", "has a key that is a list or a mapping", "write keys as text"
        elif key.value in CODE_KEYS:
            message = f"has a key {key.value}, which names code to import"
            yield key, "unsafe", message, "choose by name, e.g. model=cnn"
        elif key.value in seen:
            message = f"duplicate key {key.value}, first on line {seen[key.value]}"
            yield key, "duplicate", message, "keep one of the two lines"
        else:
            seen[key.value] = key.start_mark.line + 1
