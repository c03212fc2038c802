"""Reads what the comments of a schema say about its keys and their values."""

import ast
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def comments_of(module: ModuleType) -> dict[str, dict[str, str]]:
    """Returns the comment of each field and each value of a module's classes: behind it, or in the lines above it."""
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
