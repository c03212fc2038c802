"""Makes the page of a task's log: its end, the lines with a text, or its first failure."""

import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainer.commands.console.folder import Folder, UnknownRunError
from trainer.commands.console.pages import PACKAGE, TAIL_BYTES, run_url
from trainer.observe.html import template
from trainer.plan.plan import Plan
from trainer.storage.run_directory import RunDirectory

LOG_LINES = 500  # of a page of a log
MAX_MATCHES = 500
LINES_BEFORE = 20  # a failure
BAD = re.compile(r" ERROR |^Traceback |\bfailed: ")  # begins a failure in a log


@dataclass(frozen=True)
class ShownLog:
    """A part of a task's log."""

    lines: Sequence[tuple[int | None, str]]  # the number of each, where the log was read from its begin
    is_cut: bool  # more lines are before these


def page(folder: Folder, name: str, task: str, query: Mapping[str, str]) -> str:
    """Returns the page of a task's log: its end, the lines with a text, or its first failure.

    Raises:
        UnknownRunError: if the run has no such task.
    """
    path = folder.run(name)
    file = (path / _task(RunDirectory(path).read_plan(), task, name).log).resolve()
    if not file.is_relative_to(path):
        raise UnknownRunError(f"{name} {task}")
    text, wants_failure = query.get("search", ""), "failure" in query
    failure = _first_failure(file) if wants_failure else None
    shown = _search(file, text) if text else failure or _tail(file)
    return template("log.html.j2", PACKAGE).render(
        name=name,
        url=run_url(name),
        task=task,
        file_url=f"{run_url(name)}/files/{quote(str(file.relative_to(path)))}",
        log=shown,
        search=text,
        has_no_failure=wants_failure and failure is None,
        is_bad=lambda line: bool(BAD.search(line)),
        nbytes=file.stat().st_size if file.exists() else 0,
    )


def _task(plan: Plan, task: str, name: str) -> Any:
    for one in plan.tasks:
        if one.name == task:
            return one
    raise UnknownRunError(f"{name} {task}")


def _tail(file: Path) -> ShownLog:
    if not file.exists():
        return ShownLog([], False)
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - TAIL_BYTES))
        lines = opened.read().decode(errors="replace").splitlines()
    is_cut = size > TAIL_BYTES or len(lines) > LOG_LINES
    return ShownLog([(None, line) for line in lines[-LOG_LINES:]], is_cut)


def _numbered(file: Path) -> Iterator[tuple[int, str]]:
    if file.exists():
        with file.open(errors="replace") as opened:
            yield from enumerate((line.rstrip("\n") for line in opened), 1)


def _search(file: Path, text: str) -> ShownLog:
    """Returns the last lines that contain a text, ignoring case."""
    matching = deque((line for line in _numbered(file) if text.lower() in line[1].lower()), maxlen=MAX_MATCHES + 1)
    return ShownLog(list(matching)[-MAX_MATCHES:], len(matching) > MAX_MATCHES)


def _first_failure(file: Path) -> ShownLog | None:
    """Returns the first line of a failure, with the lines around it."""
    lines, before = _numbered(file), deque[tuple[int, str]](maxlen=LINES_BEFORE)
    for number, line in lines:
        if BAD.search(line):
            return ShownLog([*before, (number, line), *islice(lines, LOG_LINES)], number > LINES_BEFORE + 1)
        before.append((number, line))
    return None
