"""Figures of the code that must not grow; whoever lowers one lowers its limit."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import pytest

from trainer.config import schema, typed

CHECKOUT = Path(__file__).parents[1]
ROOMS = {  # the modules that may import what a library keeps to itself
    "trainer/config/hydra_internals.py",
    "trainer/workload/keras_internals.py",
    "trainer/workload/tensorflow_internals.py",
}
PRIVATE = re.compile(r"keras\.src\b|tensorflow\.(python|core|compiler)\b|hydra\._internal\b|omegaconf\._")
SENTENCE = re.compile(r"[A-Za-z']+(?:,? [A-Za-z']+){3}")  # four words in a row
SEARCHES = {"search", "fullmatch", "match", "findall", "startswith", "endswith", "count", "index"}
NO_VERBS = {"Its", "Hydra's", "This", "Rows", "Seconds", "Bytes", "Lines", "Keys", "Values", "Tasks", "Names", "Steps"}
NO_VERBS |= {"Parameters", "Files", "Overrides", "Milliseconds", "Pages", "Metrics", "Shards", "Gradients", "Configs"}
NO_VERBS |= {"Plans", "Problems", "Commands", "Others", "Has", "As", "Is"}

N = TypeVar("N", bound=ast.AST)


@cache
def sources(folder: str) -> dict[str, str]:
    """Text by path."""
    paths = sorted((CHECKOUT / folder).rglob("*.py"))
    return {str(path.relative_to(CHECKOUT)): path.read_text() for path in paths}


def modules_with(pattern: str) -> int:
    return sum(re.search(pattern, text) is not None for text in sources("trainer").values())


def times(pattern: str) -> int:
    return sum(len(re.findall(pattern, text)) for text in sources("trainer").values())


def about_tables() -> list[int]:
    """Conditions about tables outside the engine's, by module that has some."""
    found = set()
    for path, text in sources("trainer").items():
        for node in ast.walk(ast.parse(text)) if "engine/tables" not in path else ():
            is_condition = isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert)
            tests = [node.test] if is_condition else node.ifs if isinstance(node, ast.comprehension) else []
            tests += [node] if isinstance(node, ast.BoolOp) else []
            found |= {(path, test.lineno) for test in tests if any(map(names_tables, ast.walk(test)))}
    return list(Counter(path for path, _ in found).values())


def names_tables(node: ast.AST) -> bool:
    return getattr(node, "id", getattr(node, "attr", "")) in ("tables", "sends_rows", "has_tables")


@cache
def trees() -> dict[str, ast.Module]:
    return {path: ast.parse(text) for path, text in sources("trainer").items()}


def nodes(kind: type[N]) -> list[N]:
    return [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, kind)]


def used_twice() -> list[str]:
    """Names of several classes."""
    return [name for name, count in Counter(node.name for node in nodes(ast.ClassDef)).items() if count > 1]


def without_a_verb() -> float:
    """Share of the public functions with a docstring that begins with no verb; of a condition with "Whether"."""
    texts = [ast.get_docstring(node) for node in nodes(ast.FunctionDef) if not node.name.startswith("_")]
    firsts = [text.split()[0] for text in texts if text]
    without = [word for word in firsts if not re.fullmatch(r"[A-Z][a-z]+s|Whether", word) or word in NO_VERBS]
    return len(without) / len(firsts)


def keys_of(section: Any) -> int:
    """Number of keys of a section and of those below it."""
    types = get_type_hints(section).values()
    return sum(keys_of(kind) if dataclasses.is_dataclass(kind) else 1 for kind in types)


def lines(folder: str) -> int:
    return sum(len(text.splitlines()) for text in sources(folder).values())


def quotes_a_sentence(node: ast.AST) -> bool:
    """Whether a text in it, or an f-string without its values, has four words in a row; not names of cases."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and SENTENCE.search(node.value) is not None
    if isinstance(node, ast.keyword) and node.arg == "id":
        return False
    parts = node.values if isinstance(node, ast.Dict) else ast.iter_child_nodes(node)
    return any(map(quotes_a_sentence, parts))


def expectations(test: ast.FunctionDef, tables: dict[str, ast.AST]) -> Iterator[ast.AST]:
    """Yields what a test compares with: in comparisons and searches, `match=`, and the cases that it is given."""
    for node in (node for statement in test.body for node in ast.walk(statement)):
        is_search = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SEARCHES
        if isinstance(node, ast.Compare) or is_search or (isinstance(node, ast.keyword) and node.arg == "match"):
            yield node
    for decorator in test.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("parametrize"):
            yield from decorator.args[1:]
            names = [node.id for node in ast.walk(decorator) if isinstance(node, ast.Name)]
            yield from (tables[name] for name in names if name in tables)


def count_of_tests_that_quote() -> int:
    """Tests that would have to change with the words of a message; snapshots have them elsewhere."""
    count = 0
    for text in sources("tests").values():
        module = ast.parse(text)
        assigned = [node for node in module.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
        names = [ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) for node in assigned]
        tables = {name: node.value for name, node in zip(names, assigned, strict=True)}
        functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
        tests = [function for function in functions if function.name.startswith("test_")]
        count += sum(any(map(quotes_a_sentence, expectations(test, tables))) for test in tests)
    return count


@pytest.mark.parametrize(
    ("figure", "at_most"),
    [
        (lambda: modules_with(r"\bRunConfig\b"), 45),
        (lambda: keys_of(schema.RunKeys), 142),
        (lambda: modules_with(r"sys\.argv"), 2),
        (lambda: times(r'page\["'), 0),
        (lambda: times(r'"event"'), 3),  # in the files of journals, and a filter of Docker's
        (lambda: times(r"dict\[str, Any\]"), 119),
        (lambda: times(r": TaskRuntime"), 17),
        (lambda: sum(about_tables()), 24),
        (lambda: len(about_tables()), 16),
        (lambda: len(used_twice()), 0),
        (without_a_verb, 0.201),
        (count_of_tests_that_quote, 58),
        (lambda: lines("trainer"), 47_200),
        (lambda: lines("tests"), 38_000),
    ],
    ids=[
        *("modules that name the whole config", "keys of a run", "modules that read the command line"),
        *(
            "pages as dicts",
            "events as dicts",
            "untyped mappings",
            "functions that take a runtime",
            "conditions about tables",
        ),
        *("modules with conditions about tables", "class names used twice", "docstrings without a verb"),
        *("tests that quote a sentence", "lines of the package", "lines of the tests"),
    ],
)
def test_a_figure_has_not_grown(figure, at_most):
    assert figure() <= at_most


def test_nothing_can_write_to_a_config():
    sections = [kind for module in (schema, typed) for kind in vars(module).values() if dataclasses.is_dataclass(kind)]
    assert [kind for kind in sections if not kind.__dataclass_params__.frozen] == []


def test_what_libraries_keep_to_themselves_is_imported_in_one_module_for_each():
    importing = set()
    for path, tree in trees().items():
        for node in ast.walk(tree):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if any(map(PRIVATE.match, names)):
                importing.add(path)
    assert importing == ROOMS


def test_only_one_module_replaces_functions_of_libraries():
    """Others call patched()."""
    replacing = re.compile(r"^ *(keras|tf|gen_\w+|seed_generator|Trainer|FuncGraph)\.[\w.]+ = ", re.MULTILINE)
    found = {path for path, text in sources("trainer").items() if replacing.search(text)}
    assert found == set()


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_each_name_that_a_library_keeps_to_itself_has_a_reason(room):
    text = sources("trainer")[room]
    listed = re.findall(r'^    "(\w+)",  # \S', text, re.MULTILINE)
    (names,) = (ast.literal_eval(node.value) for node in ast.parse(text).body if isinstance(node, ast.Assign))
    assert listed == names
