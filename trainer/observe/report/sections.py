"""Makes the tables of the report: tasks, who waited for whom, events, placement, shards."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.faults import exit_codes
from trainer.observe import runs
from trainer.observe.report.reported_run import ReportedRun
from trainer.observe.task_page import TaskPage
from trainer.observe.waits import UPDATE
from trainer.plan.layout import Slice
from trainer.plan.plan import Plan, Task
from trainer.storage.event_log import EventKind, RunEvent

NOT_FAILED = (None, exit_codes.OK, exit_codes.INTERRUPTED, exit_codes.TERMINATED)
MAX_EVENTS = 200  # of a page; the last
MAX_SHARD_ROWS = 200


@dataclass(frozen=True)
class TaskRow:
    """The row of a task."""

    task: Task
    state: str
    code: int | None
    restarts: int
    host: str
    page: TaskPage | None
    has_log: bool


def task_rows(run: ReportedRun) -> list[TaskRow]:
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


def waits_table(run: ReportedRun) -> WaitsTable | None:
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
    """The row of an event."""

    time: str
    kind: str
    text: str
    is_bad: bool


def event_rows(run: ReportedRun) -> list[EventRow]:
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
    """The differences from the planned placement, and the operations on each device."""

    differences: Sequence[tuple[str, str]]  # task, text
    rows: Sequence[tuple[str, str, str, int]]  # task, step or update, device, operations


def placement_table(run: ReportedRun) -> PlacementTable | None:
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
            return f"{event.task} exited with code {event.code}{f': {text}' if text else ''}"
        case EventKind.restart:
            return f"{event.task} is restarted" if event.scope == "task" else "all tasks are restarted"
    return text.split("\n")[0]


@dataclass(frozen=True)
class ShardRow:
    """The row of a shard."""

    host: str
    pieces: Sequence[Slice]
    more: int  # pieces that are not shown
    nbytes: int
    share: float  # of the bytes of all shards


def shard_rows(plan: Plan) -> list[ShardRow]:
    """Returns by host its bytes, its share of all bytes, and its parameters."""
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
