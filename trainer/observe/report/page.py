"""Renders the report of one run, or of several beside each other, by the template page.html.j2."""

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from jinja2 import UndefinedError

from trainer.config import shell
from trainer.config.schema import RunConfig
from trainer.config.shell import printable
from trainer.config.words import count
from trainer.faults import exit_codes
from trainer.observe import runs
from trainer.observe.html import template
from trainer.observe.report import curves, settings
from trainer.observe.report.curves import Axes, Curve
from trainer.observe.runs import RunFacts
from trainer.observe.task_page import TaskPage
from trainer.observe.waits import UPDATE
from trainer.plan.layout import Slice
from trainer.plan.plan import Plan, Task
from trainer.storage.atomic import write_atomically
from trainer.storage.damage import DAMAGED, read_json
from trainer.storage.event_log import EventKind, EventLog, RunEvent
from trainer.storage.json_lines import measured_lines
from trainer.storage.run_directory import RunDirectory

REPORT = "report.html"
NOT_DRAWN = ("step", "seconds")  # of a line of history.jsonl or evaluations.jsonl
TITLES = {"loss": "loss", "examples_per_second": "examples per second", "learning_rate": "learning rate"}
NOT_FAILED = (None, exit_codes.OK, exit_codes.INTERRUPTED, exit_codes.TERMINATED)
LEFT_OUT: dict[str, Any] = {"status": {}, "summary": {}, "events": (), "placement": {}}  # for damaged files
MAX_EVENTS = 200  # of a page; the last
MAX_SHARD_ROWS = 200
FILES = ("plan.json", "placement.json", "profile/trace.json")  # that the page links to, where the run has them


@dataclass(frozen=True)
class ReportedRun:
    """All that the report shows of one run."""

    name: str
    facts: RunFacts
    config: RunConfig
    plan: Plan
    status: Mapping[str, Any]
    summary: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    events: Sequence[RunEvent]
    placement: Mapping[str, Any]  # where everything ran; empty: that was not recorded

    @property
    def folder(self) -> Path:
        return Path(self.facts.path)


def write(path: Path, others: Sequence[Path] = (), file: Path | None = None, *, is_over: bool = False) -> Path:
    """Writes the report of the run in a directory, with the curves and configs of others beside it.

    Args:
        file: where; None: report.html in the directory.
        is_over: whether the run has ended, although its launcher still uses the directory.

    Returns:
        Where it is.
    """
    records = [read(one, _name(one, [path, *others]), is_over=is_over) for one in (path, *others)]
    file = file or path / REPORT
    write_atomically(file, render(records))
    return file


def read(path: Path, name: str, *, is_over: bool = False) -> ReportedRun:
    """Reads a run directory; the rest as in `write`."""
    directory = RunDirectory(path)
    return ReportedRun(
        name=name,
        facts=runs.read(path, is_over=is_over),
        config=_read_config(path, directory.config.stat().st_mtime_ns),
        plan=directory.read_plan(),
        status=runs.read_status(directory),
        summary=runs.read_summary(directory),
        history=list(measured_lines(directory.history)),
        evaluations=list(measured_lines(directory.evaluations)),
        events=list(EventLog(directory.event_log).read()),
        placement=read_json(directory.placement),
    )


@functools.lru_cache(maxsize=64)
def _read_config(path: Path, modified_ns: int) -> RunConfig:
    """The config of a run, which takes 30 ms to read: far longer than the rest of a page that is looked at live."""
    return RunDirectory(path).read_config()


def _name(path: Path, paths: Sequence[Path]) -> str:
    """What a run is called on the page; two directories of one name are told apart by the folders that they are in."""
    is_alone = [other.name for other in paths].count(path.name) == 1
    return path.name if is_alone else f"{path.parent.name}/{path.name}"


def render(records: Sequence[ReportedRun]) -> str:
    """Renders the page; the first run is shown in full, except for files of it that are damaged."""
    first, *others = records
    changed = settings.changed(first.config)
    for damaged in chain.from_iterable(combinations(LEFT_OUT, size) for size in range(len(LEFT_OUT))):
        shown = replace(first, **{name: LEFT_OUT[name] for name in damaged})
        with suppress(*DAMAGED, UndefinedError):
            return _render([shown, *others], changed)
    return _render([replace(first, **LEFT_OUT), *others], changed)


def _render(records: Sequence[ReportedRun], changed: Sequence[tuple[str, str, str]]) -> str:
    return printable(template("report/page.html.j2").render(context(records, changed)))


def context(records: Sequence[ReportedRun], changed: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    """Returns what the template takes.

    Args:
        changed: settings of the first run that differ from the defaults.
    """
    first = records[0]
    return {
        "runs": records,
        "run": first,
        "tiles": list(_tiles(first)),
        "charts": list(_charts(records)),
        "width": curves.WIDTH,
        "height": curves.HEIGHT,
        "left": curves.LEFT,
        "bottom": curves.BOTTOM,
        "tasks": _tasks(first),
        "waits": _waits(first),
        "update": UPDATE,
        "contributions": first.summary.get("contributions") or {},
        "events": _events(first),
        "placement": _placement(first),
        "more_events": max(0, len(first.events) - MAX_EVENTS),
        "shards": shards(first.plan),
        "files": [name for name in FILES if (first.folder / name).exists()],
        "changed": changed,
        "differences": settings.differences([record.config for record in records]) if len(records) > 1 else [],
        "versions": first.status.get("versions"),
        "commands": list(dict.fromkeys(shell.joined(event.command) for event in first.events if event.command)),
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "log_url": lambda task: task.log,
        "file_url": str,
    }


def _tiles(run: ReportedRun) -> Iterator[tuple[str, str, str]]:
    """(label, value, a word below it)."""
    facts, summary = run.facts, run.summary
    yield "state", facts.state, facts.failed or ("" if facts.phase == facts.state else facts.phase)
    yield "steps", f"{facts.step:,}", f"of {facts.steps:,}"
    if facts.loss is not None:
        yield "loss", f"{facts.loss:.4g}", "of the last step"
    for name, value in facts.evaluation.items():
        yield name.removeprefix("eval_"), f"{value:.4g}", "evaluation"
    if facts.examples_per_second:
        yield "examples per second", f"{facts.examples_per_second:,.0f}", count(len(run.plan.workers), "worker")
    if facts.seconds is not None:
        first = summary.get("time_to_first_step_secs")
        yield "time", _duration(facts.seconds), f"first step after {first:.1f} s" if first else ""
    if (wait := summary.get("wait_fraction")) is not None:
        yield "waiting", f"{wait:.0%}", "of the chief's step"
    yield "restarts", f"{facts.restarts}", ", ".join(summary.get("restarts_of") or {})


def _duration(secs: float) -> str:
    hours, minutes = int(secs) // 3600, int(secs) // 60 % 60
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {int(secs) % 60:02} s" if minutes else f"{secs:.1f} s"


@dataclass(frozen=True)
class Chart:
    """What one value did, over all runs."""

    title: str
    linear: Axes
    logarithmic: Axes | None


def _charts(records: Sequence[ReportedRun]) -> Iterator[Chart]:
    names = dict.fromkeys(name for record in records for line in record.history for name in line)
    names |= dict.fromkeys(name for record in records for line in record.evaluations for name in line)
    order = ["loss", *(name for name in names if name not in TITLES), "examples_per_second", "learning_rate"]
    for name in order:
        drawn = [curve for hue, record in enumerate(records) for curve in _curves(record, name, hue, len(records) > 1)]
        if name in names and name not in NOT_DRAWN and (linear := curves.draw(drawn, logarithmic=False)):
            yield Chart(TITLES.get(name, name), linear, curves.draw(drawn, logarithmic=True))


def _curves(record: ReportedRun, name: str, hue: int, is_one_of_several: bool) -> Iterator[Curve]:
    of = f"{record.name}, " if is_one_of_several else ""
    for lines_, kind in ((record.history, "training"), (record.evaluations, "evaluation")):
        points = [(line["step"], line[name]) for line in lines_ if line.get(name) is not None]
        if points:
            own = hue if is_one_of_several else int(kind == "evaluation")
            yield Curve(f"{of}{kind}", points, own, is_dashed=is_one_of_several and kind == "evaluation")


@dataclass(frozen=True)
class TaskRow:
    """What the page shows of a task."""

    task: Task
    state: str
    code: int | None
    restarts: int
    host: str
    page: TaskPage | None
    has_log: bool


def _tasks(run: ReportedRun) -> list[TaskRow]:
    attempts, states = (run.status.get(key) or {} for key in ("attempts", "states"))
    pages = runs.pages_of(run.status)
    ended = run.summary.get("tasks") or {}
    codes = {name: task["code"] for name, task in ended.items()} if isinstance(ended, dict) else {}
    restarts = run.summary.get("restarts_of") or {}
    return [
        TaskRow(
            task=task,
            state=states.get(task.name, ""),
            code=codes.get(task.name),
            restarts=attempts.get(task.name, {}).get("restarts", restarts.get(task.name, 0)),
            host=attempts.get(task.name, {}).get("host", task.address.rpartition(":")[0]),
            page=pages.get(task.name),
            has_log=(run.folder / task.log).exists(),
        )
        for task in run.plan.tasks
    ]


@dataclass(frozen=True)
class WaitsTable:
    """The seconds that each worker waited for each other one, and for the update."""

    columns: Sequence[str]
    rows: Mapping[str, Mapping[str, float]]
    most: float  # seconds in one cell


def _waits(run: ReportedRun) -> WaitsTable | None:
    table = run.summary.get("waits") or run.status.get("waits") or {}
    if not table:
        return None
    others = sorted({other for row in table.values() for other in row} - {UPDATE}, key=_by_index)
    rows = {worker: table[worker] for worker in sorted(table, key=_by_index)}
    most = max((secs for row in rows.values() for secs in row.values()), default=0.0)
    return WaitsTable([*others, UPDATE], rows, most)


def _by_index(task: str) -> tuple[str, int]:
    job, _, index = task.partition(":")
    return job, int(index or 0)


@dataclass(frozen=True)
class EventRow:
    """An event as a person reads it."""

    time: str
    kind: str
    text: str
    is_bad: bool


def _events(run: ReportedRun) -> list[EventRow]:
    """Returns the last events."""
    return [
        EventRow(
            time=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time)),
            kind=event.event.value,
            text=_describe_event(event),
            is_bad=event.code not in NOT_FAILED,
        )
        for event in run.events[-MAX_EVENTS:]
    ]


@dataclass(frozen=True)
class PlacementTable:
    """What did not run where it was planned, and how many operations ran on each device."""

    differences: Sequence[tuple[str, str]]  # task, text
    rows: Sequence[tuple[str, str, str, int]]  # task, step or update, device, operations


def _placement(run: ReportedRun) -> PlacementTable | None:
    if not run.placement:
        return None
    records = run.placement["records"]
    return PlacementTable(
        [(one["task"], text) for one in records for text in one["differences"]],
        [
            (one["task"], one["run"], device, len(operations))
            for one in records
            for device, operations in one["devices"].items()
        ],
    )


def _describe_event(event: RunEvent) -> str:
    text = event.text or ""
    match event.event:
        case EventKind.launch:
            return ", ".join(filter(None, [event.cluster, event.strategy, text]))
        case EventKind.start:
            return f"{event.task} started{f' again, attempt {event.attempt + 1}' if event.attempt else ''}"
        case EventKind.exit:
            return f"{event.task} ended with {event.code}{f': {text}' if text else ''}"
        case EventKind.restart:
            return f"{event.task} is restarted" if event.scope == "task" else "all tasks are restarted"
    return text.split("\n")[0]


@dataclass(frozen=True)
class ShardRow:
    """What the page shows of a shard."""

    host: str
    pieces: Sequence[Slice]
    more: int  # pieces that are not shown
    nbytes: int
    share: float  # of the bytes of all shards


def shards(plan: Plan) -> list[ShardRow]:
    """By host: its bytes and its share of all, with its parameters."""
    total = sum(4 * piece.size for shard in plan.shards for piece in (*shard.trainable, *shard.state)) or 1
    return [
        ShardRow(
            host="every worker" if plan.effective_strategy.has_ring else shard.host,
            pieces=[*shard.trainable, *shard.state][:MAX_SHARD_ROWS],
            more=max(0, len(shard.trainable) + len(shard.state) - MAX_SHARD_ROWS),
            nbytes=(nbytes := sum(4 * piece.size for piece in (*shard.trainable, *shard.state))),
            share=nbytes / total,
        )
        for shard in plan.shards
    ]
