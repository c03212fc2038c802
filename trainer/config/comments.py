"""Reads the help texts of keys and values from the comments of the schema."""

import ast
from collections.abc import Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.config import schema, typed


def meaning(owner: Any, field: Any, of: Any) -> str:
    """Returns what a key means: the comment of its field, or else the first sentence about its values.

    Args:
        owner: the dataclass that has the field.
        of: the type of the field.
    """
    comment = _of_config().get(owner.__name__, {}).get(field.name, "")
    about_values = sentence(of.__doc__) if isinstance(of, type) and issubclass(of, Enum) else ""
    return comment or about_values[:1].lower() + about_values[1:]


def meanings_of_values(of: Any) -> dict[str, str]:
    """Returns what each value of an enum means; empty for other types."""
    about = _of_config().get(getattr(of, "__name__", ""), {})
    return {member.name: about.get(member.name, "") for member in of} if isinstance(of, type(Enum)) else {}


@cache
def _of_config() -> dict[str, dict[str, str]]:
    return comments_of(schema, typed)


def comments_of(*modules: ModuleType) -> dict[str, dict[str, str]]:
    """Returns the comment on each field and value of the classes in modules: at the end of its line, or above it.

    A class also gets the comments on fields that it inherits.
    """
    found: dict[str, dict[str, str]] = {}
    for module in modules:
        own = _comments_of(module)
        inherited = {name: [found.get(base.__name__, {}) for base in getattr(module, name).__mro__[1:]] for name in own}
        for name, comments in own.items():
            found[name] = {field: text for of_base in inherited[name] for field, text in of_base.items()} | comments
    return found


def _comments_of(module: ModuleType) -> dict[str, dict[str, str]]:
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    lines = source.splitlines()
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            names = [(_target(item), item) for item in node.body if isinstance(item, ast.Assign | ast.AnnAssign)]
            found[node.name] = {name: _comment(lines, item) for name, item in names}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and len(node.value.args) == 2:
            table = node.value.args[1]
            if isinstance(table, ast.Dict):
                items = zip(table.keys, table.values, strict=True)
                found[_target(node)] = {
                    str(key.value): _comment(lines, value) for key, value in items if isinstance(key, ast.Constant)
                }
    return found


def _target(node: Any) -> str:
    target: Any = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return str(target.id)


def _comment(lines: Sequence[str], node: Any) -> str:
    behind = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().partition("#")[2].strip()
    above: list[str] = []
    line = node.lineno - 2
    while not behind and lines[line].strip().startswith("#"):
        above.insert(0, lines[line].strip()[1:].strip())
        line -= 1
    return behind or " ".join(above)


def sentence(doc: str | None) -> str:
    """Returns the first sentence of a docstring, on one line."""
    return " ".join((doc or "").split()).partition(". ")[0].rstrip(".")
