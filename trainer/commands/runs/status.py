"""trainer status: shows how far a run is, and what each of its tasks does."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from trainer.config import shell
from trainer.config.command_line import program
from trainer.config.output import Output, print_json
from trainer.config.words import count
from trainer.launch.ending import shown
from trainer.launch.view import duration
from trainer.observe import runs
from trainer.observe.runs import RunFacts
from trainer.observe.task_page import TaskPage, TaskState
from trainer.observe.waits import UPDATE
from trainer.storage.damage import DAMAGED
from trainer.storage.run_directory import RunDirectory

OLD_SECS = 10.0  # a launcher writes its status four times a second


def show(directory: RunDirectory, *, as_json: bool) -> None:
    """Prints a run as text, or as one JSON object."""
    facts, status = runs.read(directory.path), runs.read_status(directory)
    if as_json:
        print_json(asdict(facts) | {"status": status})
        return
    output = Output()
    for line in describe(facts, status):
        output.print(line, markup=False, soft_wrap=True)
    try:
        tables = [_tasks(facts, status)] if status.get("attempts") else []
        if any(row.keys() - {UPDATE} for row in status.get("waits", {}).values()):
            tables.append(_waits(status["waits"]))
    except DAMAGED:
        print(f"{shown(directory.status)} is damaged: the last state of the tasks is unknown")
        return
    for table in tables:
        output.print(table)


def describe(facts: RunFacts, status: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines that describe a run."""
    state = facts.state if facts.phase == facts.state else f"{facts.state}, {facts.phase}"
    yield f"{shown(Path(facts.path))}: {state}, step {facts.step} of {facts.steps}"
    if facts.failed:
        yield f"first task that failed: {facts.failed}"
    yield ", ".join(filter(None, [facts.cluster, facts.strategy, f"model {facts.model}", f"data {facts.data}"]))
    values = {} if facts.loss is None else {"loss": facts.loss}
    numbers = [f"{name} {value:.4f}" for name, value in (values | dict(facts.metrics) | dict(facts.evaluation)).items()]
    if facts.examples_per_second is not None:
        numbers.append(f"{facts.examples_per_second:,.0f} examples/s")
    if numbers:
        yield ", ".join(numbers)
    if facts.seconds is not None:
        restarts = count(facts.restarts, "restart") if facts.restarts else "no restarts"
        yield f"{'running for' if facts.is_running else 'took'} {duration(facts.seconds)}, {restarts}"
    if facts.checkpoints:
        yield f"newest of {count(len(facts.checkpoints), 'checkpoint')}: step {facts.checkpoints[-1]}"
    if facts.checkpoints and facts.state in (runs.STOPPED, runs.DIED):
        yield f"to continue: {shell.joined([*program(), 'continue', shell.override('run', shown(Path(facts.path)))])}"
    if facts.is_running:
        if facts.launcher:
            yield f"launcher: process {facts.launcher['pid']} on {facts.launcher['host']}"
        else:
            yield f"no launcher: process {facts.owner} is its chief, or is about to start"
        silent_secs = time.time() - status["time"] if facts.launcher and status.get("time") else 0.0
        if silent_secs > OLD_SECS:
            yield f"warning: the launcher has not updated status.json for {duration(silent_secs)}; it may be frozen"


def _tasks(facts: RunFacts, status: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("task", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "examples/s", "wait", "memory", "restarts"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("host", overflow="fold")
    pages = runs.pages_of(status)
    for name, attempt in status["attempts"].items():
        page = pages.get(name)
        state = status["states"][name] if facts.is_running or attempt["code"] is not None else "unknown"
        numbers = _numbers(page, facts.step if state == TaskState.done.value else page.step) if page else [""] * 4
        table.add_row(name, escape(state), *numbers, str(attempt["restarts"]), escape(attempt["host"]))
    return table


def _numbers(page: TaskPage, step: int) -> list[str]:
    is_worker = page.job == "worker"
    return [
        str(step),
        f"{page.examples_per_second:,.0f}" if is_worker else "",
        "" if page.job == "evaluator" else f"{page.wait_fraction:.0%}",
        f"{page.memory_bytes / 2**20:,.0f} MiB",
    ]


def _waits(waits: Mapping[str, Mapping[str, float]]) -> Table:
    """Returns how long tasks have waited for others, in seconds."""
    others = sorted({other for row in waits.values() for other in row} - {UPDATE})
    table = Table(
        title="seconds that each worker has waited",
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    table.add_column("task")
    for name in [*others, UPDATE]:
        table.add_column(f"for {'the update' if name == UPDATE else name}", justify="right")
    for worker, row in waits.items():
        table.add_row(worker, *(f"{row[name]:,.1f}" if name in row else "" for name in [*others, UPDATE]))
    return table
