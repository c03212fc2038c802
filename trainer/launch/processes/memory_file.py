"""Lays out the memory file that the tasks of a machine share."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainer.plan.layout import Shard
from trainer.plan.shared_memory import nbytes
from trainer.plan.strategy import Strategy


@contextmanager
def lay_out(file: int, shards: Sequence[Shard], strategy: Strategy, workers: int) -> Iterator[str]:
    """Gives an open memory file the size of all `places`, filled with zeros; yields its path in this process."""
    os.truncate(file, nbytes(shards, strategy, workers))
    try:
        yield f"/proc/self/fd/{file}"
    finally:
        os.truncate(file, 0)
