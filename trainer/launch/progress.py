"""Shows the progress of a run: a live line and table on a terminal, a plain line every few seconds elsewhere.

Lines of the history, if requested, replace the line every few seconds, and are printed above the table.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.launch.signals import discard_output
from trainer.launch.view import Course, Standing, StepRate, TaskView, line, standing
from trainer.observe.task_page import TaskState
from trainer.storage.history import describe as history_line
from trainer.storage.json_lines import Measurement, measured

if TYPE_CHECKING:
    from rich.console import RenderableType

LINE_EVERY_SECS = 5.0
SHOWN = {"loss", "examples_per_second"}  # keys that a history line must have
USERS_SECS, OWN_SECS = 2.0, 10.0  # until a command says that it is busy with the user's code, with its own
NOTE_EVERY_SECS = 30.0  # between two lines about that
NOT_CI = ("", "0", "false", "False")  # values of $CI for an interactive terminal


class HistoryLines:
    """Reads the lines that a run adds to its history.jsonl, as text."""

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

    def _unseen(self, lines: Sequence[bytes]) -> Iterator[Measurement]:
        for values in map(measured, lines):
            if values is not None and values.keys() >= SHOWN and values["step"] > self._last_step:
                self._last_step = int(values["step"])
                yield values


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def make_progress(course: Course, history: HistoryLines | None = None, *, elapsed_secs: float = 0.0) -> Progress:
    """Returns a table on a terminal, else lines; with the lines of the history, if requested.

    Args:
        elapsed_secs: since the command was typed.
    """
    return (_TableProgress if is_interactive() else Progress)(course, history, time.monotonic() - elapsed_secs)


def is_interactive() -> bool:
    """Whether stdout is a terminal that can redraw lines, outside of CI."""
    is_plain = os.environ.get("TERM", "dumb").lower() in ("dumb", "unknown") or os.environ.get("CI", "") not in NOT_CI
    return sys.stdout.isatty() and not is_plain


@contextmanager
def note(text: str) -> Iterator[Note]:
    """Shows what a command is doing until it is done; outside a terminal, only if it takes long."""
    shown = Note(text)
    try:
        yield shown
    finally:
        shown.erase()


class Note:
    """A line that shows what a command is doing."""

    def __init__(self, text: str) -> None:
        """Shows the text on a terminal."""
        self._is_live, self._width, self._due_secs = is_interactive(), 0, 0.0
        self._draw(text)

    def runs(self, line: str, secs: float) -> None:
        """Reports the running line of the user's code, and for how long it has run; in a log, less and less often."""
        if secs < (USERS_SECS if line else OWN_SECS):
            return
        text = f"planning has taken {secs:.0f} s{f'; running the user file: {line}' if line else ''}"
        if self._is_live:
            self._draw(text)
        elif secs >= self._due_secs:
            self._due_secs = secs + min(NOTE_EVERY_SECS, 4 * secs)
            print(text, flush=True)

    def erase(self) -> None:
        self._draw("")
        self._draw("", end="\r")

    def _draw(self, text: str, end: str = "") -> None:
        if self._is_live:
            text = text[: shutil.get_terminal_size().columns - 1]  # only one line can be redrawn
            print(f"\r{text:<{self._width}}", end=end, flush=True)
            self._width = len(text)


class Progress:
    """Prints a line every few seconds, or each line of the history."""

    def __init__(self, course: Course, history: HistoryLines | None, began: float) -> None:
        """Begins.

        Args:
            began: when the command was typed, monotonic seconds.
        """
        self._course, self._history, self._began = course, history, began
        self._rate = StepRate()
        self._shown_at = time.monotonic()
        self._shows_history = False  # from its first line on; until then the state of the tasks

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing."""

    def show(self, tasks: Sequence[TaskView]) -> None:
        for text in self._history.new() if self._history else []:
            self._shows_history = True
            self.say(text)
        now = time.monotonic()
        stands = self._stands(tasks, now)
        if not self._shows_history and now - self._shown_at >= LINE_EVERY_SECS:
            self._shown_at = now
            self.say(line(tasks, self._course, stands))

    def finish(self, step: int) -> None:
        """Marks the last step of the run; lines need nothing, because the result is printed next."""

    def _stands(self, tasks: Sequence[TaskView], now: float) -> Standing:
        return standing(tasks, self._course, elapsed_secs=now - self._began, rate=self._rate, now=now)

    def say(self, text: str) -> None:
        """Prints a line; if the terminal has closed, stops the run."""
        try:
            print(text, flush=True)
        except BrokenPipeError:
            discard_output()
            signal.raise_signal(signal.SIGHUP)


class _TableProgress(Progress):
    def __init__(self, course: Course, history: HistoryLines | None, began: float) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(course, history, began)
        self._tasks: Sequence[TaskView] = ()
        self._is_over = False
        self._last_step: int | None = None  # of a run that has made it
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, get_renderable=self._draw, vertical_overflow="crop")

    def __enter__(self) -> _TableProgress:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._live.stop()

    def _draw(self) -> RenderableType:
        from trainer.launch.screen import draw  # imports rich

        stands = self._stands(self._tasks, time.monotonic())
        if self._last_step is not None:  # the pages may have been read before it
            stands = replace(stands, step=self._last_step, left_secs=None, phase=TaskState.done)
        return draw(self._tasks, self._course, stands, self._console, is_over=self._is_over)

    def finish(self, step: int) -> None:
        self._last_step = step

    def show(self, tasks: Sequence[TaskView]) -> None:
        self._tasks = tasks
        for text in self._history.new() if self._history else []:
            self.say(text)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)
