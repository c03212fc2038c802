"""Rows of tables between memory and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from trainer.engine.tables.memory import BlockMemory, private
from trainer.plan.tables import Table, TableLayout, blocks_of
from trainer.storage import checkpoint, table_rows
from trainer.storage.checkpoint import Checkpoint
from trainer.storage.table_rows import ChangedRows, Rows

AT_ONCE = 2**18  # rows


def load(path: str | Path, memory: Sequence[BlockMemory], host: int) -> None:
    """Gives the rows of a host the values that a checkpoint has."""
    source = checkpoint.read_manifest(Path(path))
    for block in memory:
        for step, rows in table_rows.read(source, block.block, list(block.slots)):
            is_own = rows.ids % block.block.hosts == host
            places = block.block.place_of(rows.ids[is_own])
            block.put(places, rows.values[is_own], {name: one[is_own] for name, one in rows.slots.items()}, step)


def loaded(path: str | Path, tables: Sequence[Table], *, seed: int) -> list[BlockMemory]:
    """The rows that a checkpoint has, in memory of this process, without slots."""
    memory = private(TableLayout(blocks_of(tables, 1), (), 1, 0))
    load_into(memory, path, seed=seed)
    return memory


def load_into(memory: Sequence[BlockMemory], path: str | Path, *, seed: int) -> None:
    """Gives all rows of memory for one host the values of a checkpoint."""
    for block in memory:
        block.begin(0, {}, seed=seed)
    load(path, memory, 0)


def changed_rows(memory: Sequence[BlockMemory], step: int, base: Checkpoint | None) -> ChangedRows:
    """Copies of the rows that were changed after another checkpoint, which has the others; no host may be updating."""
    found = []
    for block in memory:
        places = np.flatnonzero(block.updated > (base.step if base else 0))
        slots = {name: np.take(values, places, axis=0) for name, values in block.slots.items()}
        found.append(Rows(block.block.row_at(places), np.take(block.rows, places, axis=0), slots))
    return ChangedRows(step, [block.block for block in memory], found, list(memory[0].slots), base)


def received_rows(
    layout: TableLayout,
    rows: Sequence[tuple[np.ndarray, np.ndarray, Mapping[str, np.ndarray]]],
    step: int,
    base: Checkpoint | None,
) -> ChangedRows:
    """The same of rows that hosts have sent: (places, values, slots) of each block."""
    found = [
        Rows(block.row_at(places), values, slots)
        for block, (places, values, slots) in zip(layout.blocks, rows, strict=True)
    ]
    return ChangedRows(step, layout.blocks, found, layout.slots, base)


def values_of(memory: Sequence[BlockMemory], table: Table) -> Iterator[np.ndarray]:
    """[n, width] of a table's rows, in order, some at a time."""
    block = next(one for one in memory if table.path in one.block.begins)
    first = block.block.begins[table.path]
    for begin in range(0, table.rows, AT_ONCE):
        rows = np.arange(first + begin, first + min(begin + AT_ONCE, table.rows), dtype=np.int64)
        yield np.take(block.rows, block.block.place_of(rows), axis=0)


def tables_in(memory: Sequence[BlockMemory]) -> dict[str, Table]:
    """All tables by path."""
    return {table.path: table for block in memory for table in block.block.tables}
