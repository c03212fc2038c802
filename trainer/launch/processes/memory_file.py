"""Lays out the memory file that the tasks of a machine share."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainer.plan.layout import Shard
from trainer.plan.shared_memory import tables_offset
from trainer.plan.strategy import Strategy
from trainer.plan.table_layout import NO_TABLES, TableLayout


@contextmanager
def lay_out(
    file: int, shards: Sequence[Shard], strategy: Strategy, workers: int, tables: TableLayout = NO_TABLES
) -> Iterator[str]:
    """Gives an open memory file the size of all `places` and tables; yields its path here."""
    sizes = shards, strategy, workers
    os.truncate(file, tables_offset(*sizes) + tables.shared_nbytes(waits_for_all=strategy.waits_for_all))
    try:
        yield f"/proc/self/fd/{file}"
    finally:
        os.truncate(file, 0)
