"""Shows the progress of a run: a live table on a terminal, a plain line every few seconds elsewhere.

Lines of the history, if wanted, replace the line every few seconds, and are printed above the table.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.plan.plan import Task
from trainer.storage.history import describe as history_line

LINE_EVERY_SECS = 5.0
Pages = Mapping[str, Mapping[str, Any]]  # status page by task name; a task that does not answer has none


class HistoryLines:
    """Reads what a run adds to its history.jsonl, as text."""

    def __init__(self, path: Path, *, start: int, steps: int, batch: int) -> None:
        """Remembers the file that exists before the tasks start: it may hold steps that will be discarded.

        Args:
            start: global step that the run (re)starts at.
            batch: examples of one update.
        """
        self._path, self._last_step, self._steps, self._batch = path, start, steps, batch
        self._inode = _inode(path)
        self._read = None if path.exists() else 0  # bytes; none: the file is of an earlier run

    def new(self) -> list[str]:
        """Returns the lines since the last call; steps that a rolled-back run repeats are not returned twice."""
        inode = _inode(self._path)
        if inode != self._inode:  # a chief that starts replaces the file
            self._inode, self._read = inode, 0
        if inode is None or self._read is None:
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")  # what follows is being written
        self._read += len(whole + end)
        return [history_line(values, self._steps, self._batch) for values in self._unseen(whole.splitlines())]

    def _unseen(self, lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
        for values in map(json.loads, lines):
            if values["step"] > self._last_step:
                self._last_step = values["step"]
                yield values


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def make_progress(tasks: Sequence[Task], steps: int, history: HistoryLines | None = None) -> Progress:
    """Returns a table on a terminal, else lines; with the lines of the history, if wanted."""
    return (_TableProgress if sys.stdout.isatty() else Progress)(tasks, steps, history)


class Progress:
    """Prints a line every few seconds, or each line of the history."""

    def __init__(self, tasks: Sequence[Task], steps: int, history: HistoryLines | None) -> None:
        self._tasks, self._steps, self._history = tasks, steps, history
        self._shown_at = time.monotonic()
        self._shows_history = False  # from its first line on; until then the state of the tasks

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to do."""

    def show(self, pages: Pages, states: Mapping[str, str]) -> None:
        for text in self._history.new() if self._history else []:
            self._shows_history = True
            self.say(text)
        if not self._shows_history and time.monotonic() - self._shown_at >= LINE_EVERY_SECS:
            self._shown_at = time.monotonic()
            self.say(line(pages, states, self._steps))

    def say(self, text: str) -> None:
        print(text, flush=True)


def line(pages: Pages, states: Mapping[str, str], steps: int) -> str:
    """Returns the run on one line."""
    workers = [page for name, page in pages.items() if name.startswith("worker")]
    if not workers or not any(page["step"] for page in workers):
        return "starting: " + ", ".join(f"{name} {state}" for name, state in states.items())
    chief = pages.get("worker:0", workers[0])
    rate = sum(page["examples_per_second"] for page in workers)
    loss = "" if chief["loss"] is None else f", loss {chief['loss']:.4f}"
    slowest_page = max(workers, key=lambda page: -page["wait_fraction"])
    slowest = (
        f", slowest worker:{slowest_page['index']} (waits {slowest_page['wait_fraction']:.0%})"
        if len(workers) > 1
        else ""
    )
    evaluators = [f", {name} at step {page['step']}" for name, page in pages.items() if name.startswith("evaluator")]
    return f"step {chief['step']}/{steps}{loss}, {rate:,.0f} examples/s{slowest}{''.join(evaluators)}"


class _TableProgress(Progress):
    def __init__(self, tasks: Sequence[Task], steps: int, history: HistoryLines | None) -> None:
        from rich.live import Live

        super().__init__(tasks, steps, history)
        self._live = Live(refresh_per_second=4, transient=False)

    def __enter__(self) -> _TableProgress:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, pages: Pages, states: Mapping[str, str]) -> None:
        for text in self._history.new() if self._history else []:
            self.say(text)
        self._live.update(table(self._tasks, pages, states, self._steps))

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)


def table(tasks: Sequence[Task], pages: Pages, states: Mapping[str, str], steps: int) -> Any:
    """Returns the run as a rich table, with a row for each task."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    furthest = max((page["step"] for page in pages.values()), default=0)
    rows = Table()
    rows.add_column("task")
    rows.add_column("state")
    for heading in ("step", "examples/s", "wait", "memory"):
        rows.add_column(heading, justify="right")
    for task in tasks:
        page = pages.get(task.name)
        if page is None:
            rows.add_row(task.name, states.get(task.name, ""), "", "", "", "")
            continue
        rate = f"{page['examples_per_second']:,.0f}" if task.job == "worker" else ""
        memory = f"{page['memory_bytes'] / 2**20:,.0f} MiB"
        wait = f"{page['wait_fraction']:.0%}" if task.job != "evaluator" else ""
        step = furthest if states[task.name] == "done" else page["step"]  # its last page may be from before the end
        rows.add_row(task.name, states[task.name], str(step), rate, wait, memory)
    return Group(Text(line(pages, states, steps), style="bold"), rows)
