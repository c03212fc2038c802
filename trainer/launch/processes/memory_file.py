"""Lays out the memory file that the tasks of a machine share."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainer.plan.layout import Shard
from trainer.plan.shared_memory import nbytes, tables_offset
from trainer.plan.strategy import Strategy
from trainer.plan.tables import NO_TABLES, TableLayout


@contextmanager
def lay_out(
    file: int, shards: Sequence[Shard], strategy: Strategy, workers: int, tables: TableLayout = NO_TABLES
) -> Iterator[str]:
    """Gives an open memory file the size of all `places`, and of tables or mailboxes; yields its path here."""
    sizes = shards, strategy, workers
    of_tables = tables.nbytes if strategy.waits_for_all else tables.mailboxes_nbytes
    os.truncate(file, tables_offset(*sizes) + of_tables if tables.blocks else nbytes(*sizes))
    try:
        yield f"/proc/self/fd/{file}"
    finally:
        os.truncate(file, 0)
