"""Shows a run while it goes: a live table on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from trainer.plan import Task

LINE_EVERY_SECS = 5.0
Pages = Mapping[str, Mapping[str, Any]]  # status page by task name; a task that does not answer has none


class Progress(Protocol):
    """Where the state of the tasks is shown."""

    def __enter__(self) -> Progress: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def show(self, pages: Pages, states: Mapping[str, str]) -> None: ...
    def say(self, text: str) -> None: ...


def make_progress(tasks: Sequence[Task], steps: int) -> Progress:
    """A table where there is a terminal, else lines."""
    return _Table(tasks, steps) if sys.stdout.isatty() else _Lines(tasks, steps)


class _Lines:
    def __init__(self, tasks: Sequence[Task], steps: int) -> None:
        self._tasks, self._steps = tasks, steps
        self._shown_at = time.monotonic()

    def __enter__(self) -> _Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to take down."""

    def show(self, pages: Pages, states: Mapping[str, str]) -> None:
        if time.monotonic() - self._shown_at >= LINE_EVERY_SECS:
            self._shown_at = time.monotonic()
            self.say(line(pages, states, self._steps))

    def say(self, text: str) -> None:
        print(text, flush=True)


def line(pages: Pages, states: Mapping[str, str], steps: int) -> str:
    """The run on one line."""
    workers = [page for name, page in pages.items() if name.startswith("worker")]
    if not workers or not any(page["step"] for page in workers):
        return "starting: " + ", ".join(f"{name} {state}" for name, state in states.items())
    chief = pages.get("worker:0", workers[0])
    rate = sum(page["examples_per_second"] for page in workers)
    loss = "" if chief["loss"] is None else f", loss {chief['loss']:.4f}"
    waits = max(workers, key=lambda page: -page["wait_fraction"])
    slowest = f", slowest worker:{waits['index']} (waits {waits['wait_fraction']:.0%})" if len(workers) > 1 else ""
    return f"step {chief['step']}/{steps}{loss}, {rate:,.0f} examples/s{slowest}"


class _Table:
    def __init__(self, tasks: Sequence[Task], steps: int) -> None:
        from rich.live import Live

        self._tasks, self._steps = tasks, steps
        self._live = Live(refresh_per_second=4, transient=False)

    def __enter__(self) -> _Table:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, pages: Pages, states: Mapping[str, str]) -> None:
        self._live.update(table(self._tasks, pages, states, self._steps))

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)


def table(tasks: Sequence[Task], pages: Pages, states: Mapping[str, str], steps: int) -> Any:
    """The run as a rich table, a row a task."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    furthest = max((page["step"] for page in pages.values()), default=0)
    shown = Table()
    shown.add_column("task")
    shown.add_column("state")
    for heading in ("step", "examples/s", "wait", "memory"):
        shown.add_column(heading, justify="right")
    for task in tasks:
        page = pages.get(task.name)
        if page is None:
            shown.add_row(task.name, states.get(task.name, ""), "", "", "", "")
            continue
        rate = f"{page['examples_per_second']:,.0f}" if task.job == "worker" else ""
        memory = f"{page['memory_bytes'] / 2**20:,.0f} MiB"
        step = furthest if states[task.name] == "done" else page["step"]  # its last page may be from before the end
        shown.add_row(task.name, states[task.name], str(step), rate, f"{page['wait_fraction']:.0%}", memory)
    return Group(Text(line(pages, states, steps), style="bold"), shown)
