"""Shows a plan as text and writes it as JSON."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer.config.output import Output
from trainer.config.words import count, size
from trainer.plan import traffic
from trainer.plan.layout import Shard
from trainer.plan.plan import Plan, Task
from trainer.plan.shared_memory import nbytes

ORDER = "a function of (seed, epoch, step, replica); a restart continues with the next batch"
OWN_ORDER = "that of the data itself; a restart reads and skips what was used before"

WIDE_COLUMNS = 110  # a table of tasks takes as much
NARROW_COLUMNS = 70
COMPACT: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0)}

NUMBERS = ("bytes", "share", "threads", "replica batch", "rows", "floats")  # columns of them


GBIT = 1e9  # bits per second


def show(plan: Plan, *, console: Console | None = None) -> None:
    """Prints what would run where, in tables that fit the console's width."""
    console = console or Output()
    first, *head = _head(plan)
    console.print(f"[bold]{plan.cluster}[/bold]: {first}")
    for line in head:
        console.print(line, markup=False)
    for table in (_tasks(plan, console.width), _shards(plan, console.width), *_groups(plan, console.width)):
        console.print(table)
    for table in _tables(plan, console.width):
        console.print(table)
    console.print(_traffic(plan))
    for warning in plan.warnings:
        console.print(f"warning: {warning}", markup=False)


def tables(plan: Plan) -> dict[str, Any]:
    """Returns what `show` prints, for a web page: lines around the tables, the tasks, and the warnings."""
    rows = [_task(plan, task) for task in plan.tasks]
    empty = [column for column in rows[0] if column == "log" or all(row[column] in ("", "none") for row in rows)]
    tasks = [{column: text for column, text in row.items() if column not in empty} for row in rows]
    head = [f"{plan.cluster}: {line}" if not number else line for number, line in enumerate(_head(plan))]
    return {"head": head, "tasks": tasks, "traffic": _traffic(plan).splitlines(), "warnings": plan.warnings}


def _head(plan: Plan) -> list[str]:
    """Returns the lines that say what was chosen, and where each choice comes from."""
    return [plan.describe(), plan.objective, plan.optimizer, _bits(plan), *([plan.initial] if plan.initial else [])]


def write_json(plan: Plan, path: str) -> None:
    """Writes the plan as JSON."""
    Path(path).write_text(json.dumps(plan.to_json(), indent=1) + "\n")


def _bits(plan: Plan) -> str:
    """Returns what the bits of the result depend on."""
    if not plan.effective_strategy.is_exact:
        return f"result: not repeatable under {plan.strategy}"
    threads = plan.workers[0].intra_op_threads
    each = f"{count(plan.replica_batch, 'example')} and {count(threads, 'thread')}"
    return f"result depends on: {count(plan.replicas, 'replica')}, {each} per replica"


def _tasks(plan: Plan, width: int) -> Table:
    """Returns a row for each task; narrow tables have no log, and no columns for GPUs if no task has one."""
    several = any(len(task.replicas) > 1 for task in plan.tasks)
    is_wide, has_gpus = width >= WIDE_COLUMNS, any(task.gpus for task in plan.tasks)
    left_out = [
        *([] if is_wide else ["log"]),
        *([] if is_wide or has_gpus else ["GPUs", "GPU memory"]),
        *([] if several else ["replicas"]),
        *([] if width >= NARROW_COLUMNS else ["threads", "replica batch"]),
    ]
    rows = [_task(plan, task) for task in plan.tasks]
    columns = [column for column in rows[0] if column not in left_out]
    table = _table("tasks", *columns, is_wide=is_wide)
    for row in rows:
        table.add_row(*(escape(row[column]) for column in columns))
    return table


def _task(plan: Plan, task: Task) -> dict[str, str]:
    return {
        "task": task.name + (" (chief)" if task.is_chief else ""),
        "address": _address(task),
        "GPUs": ", ".join(map(str, task.gpus)) or "none",
        "GPU memory": _memory(task),
        "threads": f"{task.intra_op_threads} intra, {task.inter_op_threads} inter",
        "replicas": _replicas(task),
        "replica batch": str(plan.replica_batch) if task.job == "worker" else "",
        "log": task.log,
    }


def _replicas(task: Task) -> str:
    """Returns the devices of a task's replicas, and how many these are if they take turns there."""
    devices = dict.fromkeys(task.replicas)
    return (f"{len(task.replicas)} on " if len(task.replicas) > len(devices) else "") + " ".join(devices)


def _memory(task: Task) -> str:
    """Describes the memory that a task takes of each visible GPU."""
    if not task.gpus:
        return ""
    if task.growth:
        return "grows"
    if task.memory_mib is not None:
        return f"{task.memory_mib:,} MiB each"
    return "nearly all" if task.memory_fraction is None else f"{task.memory_fraction:.0%} each"


def _address(task: Task) -> str:
    if task.job == "evaluator":
        return "none, reads checkpoints"
    if not task.address:
        return "none, one process"
    return task.address.removesuffix(":0") + ", a free port" if task.address.endswith(":0") else task.address


def _shards(plan: Plan, width: int) -> Table:
    columns = (
        ("host", "parameter", "shape", "bytes", "share") if width >= NARROW_COLUMNS else ("host", "parameter", "bytes")
    )
    table = _table("shards", *columns, is_wide=width >= WIDE_COLUMNS)

    def add_row(**cells: str) -> None:
        table.add_row(*(cells.get(column, "") for column in columns))

    total = sum(piece.nbytes for shard in plan.shards for piece in (*shard.trainable, *shard.state)) or 1
    for shard in plan.shards:
        pieces = [*shard.trainable, *shard.state]
        own = sum(piece.nbytes for piece in pieces)
        host = "every worker" if plan.effective_strategy.has_ring else _bucket(plan, shard)
        parameters = count(len({piece.path for piece in pieces}), "parameter")
        add_row(host=f"[bold]{host}[/bold]", parameter=parameters, bytes=size(own), share=f"{own / total:.1%}")
        for piece in pieces:
            kind = "" if piece in shard.trainable else " (state)"
            shape = "x".join(map(str, piece.shape)) or "scalar"
            part = f" [{piece.begin}:{piece.begin + piece.size}]" if piece.is_part else ""
            name, share = escape(piece.path + part) + kind, f"{piece.nbytes / total:.1%}"
            add_row(parameter=name, shape=shape, bytes=size(4 * piece.size), share=share)
    return table


def _tables(plan: Plan, width: int) -> Iterator[Table]:
    """Yields the rows of sparse layers, if there are any."""
    if not plan.tables:
        return
    layout = plan.table_layout
    table = _table("tables", "rows of", "rows", "floats", "bytes", "touched", is_wide=width >= WIDE_COLUMNS)
    for one in plan.tables:
        touched = min(one.rows, plan.global_batch * one.lookups)
        nbytes, rows = size(layout.rows_nbytes(one)), f"{'up to ' if one.growing else ''}{one.rows:,}"
        table.add_row(escape(one.path), rows, str(one.width), nbytes, f"at most {touched:,} a step")
    yield table


def _groups(plan: Plan, width: int) -> Iterator[Table]:
    """Yields the table of parameter groups, if there are any."""
    if plan.groups:
        table = _table("groups", "optimizer", "parameters", is_wide=width >= WIDE_COLUMNS)
        for group in plan.groups:
            table.add_row(group.settings, escape(", ".join(group.parameters)))
        yield table


def _bucket(plan: Plan, shard: Shard) -> str:
    """Names the task that holds a shard, and the bucket if it has several."""
    own = [other for other in plan.shards if other.host == shard.host]
    return shard.host if len(own) == 1 else f"{shard.host}, bucket {own.index(shard) + 1} of {len(own)}"


def _traffic(plan: Plan) -> str:
    links = plan.link_nbytes()
    batch = f"batch: {plan.global_batch} global, {plan.replica_batch} per replica x {count(plan.replicas, 'replica')}"
    steps = f"steps: {plan.steps}"
    if plan.train_examples:
        epochs = count(plan.epochs, "epoch") if plan.epochs else f"{plan.steps / plan.epoch_steps:.2f} epochs"
        steps += f", {epochs} of {plan.train_examples:,} examples"
        if plan.epochs and (rest := plan.steps * plan.step_examples - plan.epochs * plan.train_examples):
            steps += f" and {rest:,} of the next, which fill up the last batch"
    steps += f"\norder of examples: {OWN_ORDER if plan.is_stream else ORDER}"
    if plan.frozen.paths:
        weights = f"{count(len(plan.frozen.paths), 'variable')}, {size(plan.frozen.nbytes)}"
        steps += f"\nfrozen: {weights}, in every worker and not in messages"
    if not links:
        return f"{batch}\n{steps}\ntraffic: none"
    per_link = sorted({(host.split(" - ")[1], nbytes) for host, nbytes in links.items()})
    shares = ", ".join(f"{size(nbytes)} per link to {host}" for host, nbytes in per_link)
    if plan.effective_strategy.has_ring:
        shares = f"{size(per_link[0][1])} from each worker to the next, around a ring"
    text = f"traffic: {size(sum(links.values()))} per step over {count(len(links), 'link')}; {shares}"
    if plan.wire_format.is_shared:
        in_memory = nbytes(plan.shards, plan.effective_strategy, plan.pushes)
        of_tables = plan.table_layout.shared_nbytes(waits_for_all=plan.effective_strategy.waits_for_all)
        shared = ("at most " if plan.sends_rows else "") + size(in_memory + of_tables)
        text += f"\n    parameters and gradients stay in shared memory ({shared}); messages only say where"
    else:
        name, each_way = traffic.narrowest(plan)
        least_ms = 1000 * 8 * each_way / GBIT
        text += f"\n    {name} sends {size(each_way)} and receives as much: at least {least_ms:,.0f} ms at 1 Gbit/s"
    if plan.sends_rows and not plan.wire_format.is_shared:
        examples, each = plan.global_batch // len(plan.workers), 2 if plan.wire == "bfloat16" else 4
        rows = sum(min(one.rows, examples * one.lookups) * (4 + each * one.width) for one in plan.tables)
        text += f"\n    and rows of tables: at most {size(2 * rows)} for each worker"
    return f"{batch}\n{steps}\n{text}"


def _table(title: str, *columns: str, is_wide: bool) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", **{} if is_wide else COMPACT)
    for column in columns:
        table.add_column(column, justify="right" if column in NUMBERS else "left", overflow="fold")
    return table
