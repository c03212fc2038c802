"""A folder of trainer/ imports lower floors only, and TensorFlow and Keras stay where they belong."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

import pytest
from layers import cycles, folder_graph, imported, module_graph, module_paths

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHECKOUT = Path(__file__).parents[1]
PATHS = module_paths(CHECKOUT)
PACKAGES = [name for name, path in PATHS.items() if path.name == "__init__.py"]

# Folder -> folders it may import; floor by floor, the lowest first.
MAY_IMPORT: dict[str, list[str]] = {
    "faults": [],
    "config": ["faults"],
    "plan": ["faults", "config"],
    "storage": ["faults", "config", "plan"],
    "workload": ["faults", "config", "plan"],
    "observe": ["faults", "config", "plan", "storage"],
    "engine": ["faults", "config", "plan", "workload", "observe"],
    "task": ["faults", "config", "plan", "storage", "workload", "observe", "engine"],
    "launch": ["faults", "config", "plan", "storage", "workload", "observe", "task"],
    "commands": ["faults", "config", "plan", "storage", "workload", "observe", "task", "launch"],
    "__main__": ["commands"],
}

MAY_IMPORT_FROM_OUTSIDE = {"tensorflow": ["task", "engine", "workload"], "keras": ["workload"]}


@functools.cache
def modules() -> dict[str, set[str]]:
    return module_graph(CHECKOUT)


def folder_of(module: str) -> str:
    return module.split(".")[1]


def imports_between_folders() -> list[tuple[str, str]]:
    pairs = [(module, target) for module, targets in modules().items() for target in sorted(targets)]
    return [(a, b) for a, b in pairs if "trainer" not in (a, b) and folder_of(a) != folder_of(b)]


def imports_from_outside() -> list[tuple[str, str]]:
    packages = {
        (module, name.split(".")[0]) for module, path in PATHS.items() for name, _ in imported(path.read_text())
    }
    return sorted((module, package) for module, package in packages if package in MAY_IMPORT_FROM_OUTSIDE)


def test_a_folder_imports_only_the_folders_it_may():
    wrong = [(a, b) for a, b in imports_between_folders() if folder_of(b) not in MAY_IMPORT[folder_of(a)]]
    assert wrong == []


def test_a_folder_may_only_import_what_it_does_import():
    real = {(folder_of(a), folder_of(b)) for a, b in imports_between_folders()}
    assert {(folder, target) for folder, targets in MAY_IMPORT.items() for target in targets} <= real


def test_the_table_of_folders_allows_no_cycle():
    lower: set[str] = set()
    for folder, targets in MAY_IMPORT.items():
        assert set(targets) <= lower
        lower.add(folder)


def test_no_modules_import_each_other():
    assert cycles(modules()) == []


@pytest.mark.parametrize("package", [package for package in PACKAGES if package != "trainer"])
def test_no_files_and_folders_inside_a_folder_import_each_other(package: str):
    assert cycles(folder_graph(modules(), package)) == []


def test_tensorflow_and_keras_are_imported_only_where_they_may():
    wrong = [(a, b) for a, b in imports_from_outside() if folder_of(a) not in MAY_IMPORT_FROM_OUTSIDE[b]]
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_says_what_it_is_for(package: str):
    assert ast.get_docstring(ast.parse(PATHS[package].read_text()))


def test_every_folder_is_installed():
    tables = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(tables["packages"]) == sorted([*PACKAGES, *tables["package-dir"]])
