"""Messages are written out in files that `pytest -n 0 --rewrite-snapshots` writes, one in each folder of tests.

A test says which kind of error it expects, or which codes of problems; the words are compared with messages.txt beside
it. Whoever changes a sentence rewrites the files of the tests that fail, and reads the change in the diff:

    pytest -n 0 --rewrite-snapshots tests/plan
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.faults.exit_codes import TrainerError
from trainer.faults.problems import ConfigError, Problem

CHECKOUT = str(Path(__file__).parents[1])
INDENT = "    "
OTHERWISE_ELSEWHERE = {  # what differs from process to process, or with a line that is added to a test
    r"(?<=127\.0\.0\.1:)\d{5}\b": "PORT",
    r"(?<=missing after )\d+(?= s)": "N",
    r"(?<=this machine trainer ).*": "VERSION",
    r"(?<=criteo-)[0-9a-f]{16}\b": "KEY",
    r"(?<=Dataset:)\d+": "N",
    r"(?<= = \] \[)[\d ]+(?=\.\.\.\])": "",
    r"\b0x[0-9a-f]{8,}\b": "0x...",
    r"(?<=, line )\d+(?=: \w+Error)": "N",
    r"line \d+ column \d+ \(char \d+\)": "line N",
}


def cases(table: dict[Any, Any]) -> list[Any]:
    """Returns the parameters (codes, case) of a table: lists or mappings of cases, by codes or by exit code."""
    return [
        pytest.param(codes, group[case] if isinstance(group, dict) else case, id=case[:60])
        for codes, group in table.items()
        for case in group
    ]


class SnapshotFile:
    """The texts of one folder's tests, by `module::test` and the number of the comparison in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.texts = parse(path.read_text()) if path.exists() else {}

    def forget(self, is_stale: Callable[[str], bool]) -> None:
        """Leaves out the texts with these names."""
        self.texts = {name: text for name, text in self.texts.items() if not is_stale(name)}

    def write(self) -> None:
        """Writes the texts of tests that ran, and those that the file had of others."""
        content = "\n".join(f"{name}\n{_indented(self.texts[name])}" for name in sorted(self.texts))
        self.path.write_text(content) if content else self.path.unlink(missing_ok=True)


def parse(content: str) -> dict[str, str]:
    """Returns the texts of a snapshot file by their names: unindented lines, with the indented text below each."""
    texts: dict[str, list[str]] = {}
    for line in content.split("\n"):
        if line and not line.startswith(INDENT):
            texts[line] = lines = []
        else:
            lines.append(line.removeprefix(INDENT))
    return {name: "\n".join(lines).removesuffix("\n") for name, lines in texts.items()}


def name_of(item: pytest.Item) -> str:
    return f"{item.path.name}::{item.name}"


def case_of(name: str) -> str:
    """Returns the name of a text without the number of the comparison."""
    return re.sub(r" #\d+$", "", name)


def codes_of(problems: Iterable[Problem]) -> list[str]:
    return sorted(problem.code for problem in problems)


def _indented(text: str) -> str:
    return "".join(f"{INDENT}{line}\n" if line else "\n" for line in text.split("\n"))


class Snapshot:
    """What a test compares texts with: each comparison with the next text of the test in its folder's file."""

    def __init__(self, file: SnapshotFile, name: str, places: dict[str, str], is_rewriting: bool) -> None:
        self.file, self.name, self.places, self.is_rewriting = file, name, places, is_rewriting
        self.compared = 0
        self.expected: str | None = None
        self.found = ""

    def __eq__(self, value: object) -> bool:
        self.compared += 1
        key = self.name if self.compared == 1 else f"{self.name} #{self.compared}"
        self.found = self._text_of(value)
        if self.is_rewriting:
            self.file.texts[key] = self.found
        self.expected = self.file.texts.get(key)
        return self.found == self.expected

    __hash__ = None  # type: ignore[assignment]

    def _text_of(self, value: object) -> str:
        """Returns the lines of a text or of several, without what differs from machine to machine."""
        if isinstance(value, dict):
            value = [f"{key}: {text}" for key, text in value.items()]
        text = "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        for pattern, name in {**self.places, **OTHERWISE_ELSEWHERE}.items():
            text = re.sub(pattern, name, text)
        return "\n".join(line.rstrip() for line in text.rstrip("\n").split("\n"))

    def differences(self) -> list[str]:
        """Returns what the comparison that failed found, for pytest to show."""
        before = [] if self.expected is None else self.expected.split("\n")
        lines = difflib.unified_diff(before, self.found.split("\n"), str(self.file.path), "this test", lineterm="", n=2)
        return [
            "the text is not that of the snapshot; if it should be:",
            f"pytest -n 0 --rewrite-snapshots {self.file.path.parent}/{self.name}",
            *lines,
        ]


class Plugin:
    """Adds the option, the fixtures, and the writing at the end of a session."""

    def __init__(self, is_rewriting: bool) -> None:
        self.is_rewriting = is_rewriting
        self.files: dict[Path, SnapshotFile] = {}

    def file_of(self, item: pytest.Item) -> SnapshotFile:
        path = item.path.with_name("messages.txt")
        return self.files.setdefault(path, SnapshotFile(path))

    @pytest.fixture
    def snapshot(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
        """Compares a text, or a list or mapping of texts, with what the folder's messages.txt has of this test."""
        places = {re.escape(str(tmp_path_factory.getbasetemp())) + r"/\w+": "TMP", re.escape(CHECKOUT): "CHECKOUT"}
        return Snapshot(self.file_of(request.node), name_of(request.node), places, self.is_rewriting)

    @pytest.fixture
    def raises(self, snapshot: Snapshot) -> Callable[..., Any]:
        """raises(Error): a block that must raise it, with the message of the snapshot."""

        @contextlib.contextmanager
        def catch(error: type[BaseException]) -> Iterator[pytest.ExceptionInfo[BaseException]]:
            with pytest.raises(error) as caught:
                yield caught
            assert str(caught.value) == snapshot

        return catch

    @pytest.fixture
    def refused(self, snapshot: Snapshot) -> Callable[..., Any]:
        """refused(expected, function, *arguments): expects the codes of problems, separated by spaces, or an exit code.

        The problems are raised, or returned by a check. Returns them.
        """

        def refuse(expected: str | int, function: Callable[..., Any], *arguments: Any, **named: Any) -> list[Problem]:
            if isinstance(expected, int):
                with pytest.raises(TrainerError) as raised:
                    function(*arguments, **named)
                assert raised.value.exit_code == expected
                assert str(raised.value) == snapshot
                return []
            try:
                problems = function(*arguments, **named)
            except ConfigError as error:
                problems = error.problems
            assert isinstance(problems, Iterable), "it was not refused"
            problems = list(problems)
            assert codes_of(problems) == sorted(expected.split())
            assert problems == snapshot
            return problems

        return refuse

    @pytest.hookimpl(tryfirst=True)  # before cases are left out by their markers
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Forgets the texts of cases that a test no longer has, if all of its cases were asked for."""
        if self.is_rewriting and not any("[" in argument for argument in config.args):
            names = set(map(name_of, items))
            tests = {name.partition("[")[0] for name in names}
            for file in set(map(self.file_of, items)):
                file.forget(lambda key: case_of(key) not in names and case_of(key).partition("[")[0] in tests)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Forgets the texts of a test that is about to write those that it still has."""
        if self.is_rewriting:
            self.file_of(item).forget(lambda key: case_of(key) == name_of(item))

    def pytest_assertrepr_compare(self, left: object, right: object) -> list[str] | None:
        return right.differences() if isinstance(right, Snapshot) else None

    def pytest_sessionfinish(self) -> None:
        if self.is_rewriting:
            for file in self.files.values():
                file.write()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-snapshots", action="store_true", help="write messages.txt anew; with -n 0")


def pytest_configure(config: pytest.Config) -> None:
    is_rewriting = config.getoption("rewrite_snapshots")
    if is_rewriting and hasattr(config, "workerinput"):
        raise pytest.UsageError("--rewrite-snapshots needs -n 0: each worker would write the files")
    config.pluginmanager.register(Plugin(is_rewriting))
