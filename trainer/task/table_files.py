"""Moves rows of tables between memory and checkpoints."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from trainer.engine.tables.growing import GrowingMemory
from trainer.engine.tables.mapping import private
from trainer.engine.tables.memory import BlockMemory
from trainer.plan.table_layout import TableLayout
from trainer.plan.tables import Table, blocks_of
from trainer.storage import checkpoint, table_rows
from trainer.storage.checkpoint import Checkpoint
from trainer.storage.table_rows import ChangedRows, Rows

AT_ONCE = 2**18  # rows

# Rows that changed after a step, of each block: places, values, and what else is saved of them.
Ask = Callable[[int], Sequence[tuple[np.ndarray, np.ndarray, Mapping[str, np.ndarray]]]]
Changes = Callable[[int, Checkpoint | None], ChangedRows]  # at a step, after a checkpoint


def load(path: str | Path, memory: Sequence[BlockMemory], host: int) -> None:
    """Loads the rows of a host from a checkpoint."""
    source = checkpoint.read_manifest(Path(path))
    for block in memory:
        for part_step, rows in table_rows.read(source, block.block, list(block.slots)):
            block.load(host, rows.ids, rows.values, rows.saved, part_step, source.step)
        block.arrays["steps"][host] = source.step


def loaded(path: str | Path, tables: Sequence[Table], *, seed: int) -> list[BlockMemory]:
    """Returns the rows of a checkpoint, in memory of this process, without slots."""
    memory = private(TableLayout(blocks_of(tables, 1), (), 1, 0))
    load_into(memory, path, seed=seed)
    return memory


def load_into(memory: Sequence[BlockMemory], path: str | Path, *, seed: int) -> None:
    """Loads all rows in memory for one host from a checkpoint."""
    for block in memory:
        block.begin(0, {}, seed=seed)
    load(path, memory, 0)


def source_of_changes(layout: TableLayout, memory: Sequence[BlockMemory], ask: Ask | None) -> Changes | None:
    """Returns a source of changed rows, in memory or from hosts that send them; None without tables."""
    if memory:
        return partial(changed_rows, memory)
    return partial(received_rows, layout, ask) if layout.blocks and ask else None


def changed_rows(memory: Sequence[BlockMemory], step: int, base: Checkpoint | None) -> ChangedRows:
    """Copies the rows that changed since another checkpoint, which has the others; no host may be updating."""
    found = []
    for block in memory:
        rows = block.changed_after(base.step if base else 0)
        ids = block.block.row_at(block.places_at(rows))
        found.append(Rows(ids, np.take(block.rows, rows, axis=0), block.saved_at(rows)))
    return ChangedRows(step, [block.block for block in memory], found, list(memory[0].slots), base)


def received_rows(layout: TableLayout, ask: Ask, step: int, base: Checkpoint | None) -> ChangedRows:
    """Returns the same for rows that hosts send."""
    found = [
        Rows(block.row_at(places), values, saved)
        for block, (places, values, saved) in zip(layout.blocks, ask(base.step if base else 0), strict=True)
    ]
    return ChangedRows(step, layout.blocks, found, layout.slots, base)


def rows_of(memory: Sequence[BlockMemory], table: Table) -> tuple[np.ndarray | None, Iterator[np.ndarray]]:
    """Returns (ids, values) of a table's rows, in the order of their ids.

    `values`: [n, width], some at a time. `ids`: int64, those that a table which grows has trained and not evicted; None
    if it does not grow, and has a row for each.
    """
    block = next(one for one in memory if table.path in one.block.begins)
    if not isinstance(block, GrowingMemory):
        return None, _all_values(block, table)
    trained = block.trained()
    ids = block.block.row_at(block.places_at(trained))
    order = np.argsort(ids)
    return ids[order], _values_at(block, trained[order])


def _all_values(block: BlockMemory, table: Table) -> Iterator[np.ndarray]:
    first = block.block.begins[table.path]
    for begin in range(0, table.rows, AT_ONCE):
        rows = np.arange(first + begin, first + min(begin + AT_ONCE, table.rows), dtype=np.int64)
        yield np.take(block.rows, block.block.place_of(rows), axis=0)


def _values_at(block: BlockMemory, rows: np.ndarray) -> Iterator[np.ndarray]:
    for begin in range(0, len(rows), AT_ONCE):
        yield np.take(block.rows, rows[begin : begin + AT_ONCE], axis=0)


def trained_rows(memory: Sequence[BlockMemory]) -> dict[str, int]:
    """Returns how many rows each growing table has trained and not evicted."""
    return {block.block.tables[0].path: len(block.trained()) for block in memory if isinstance(block, GrowingMemory)}


def tables_in(memory: Sequence[BlockMemory]) -> dict[str, Table]:
    """Returns all tables by path."""
    return {table.path: table for block in memory for table in block.block.tables}
