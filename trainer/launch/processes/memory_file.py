"""Creates the memory file that the tasks of a machine share."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainer.plan.layout import Shard
from trainer.plan.shared_memory import nbytes
from trainer.plan.strategy import Strategy


@contextmanager
def make_file(shards: Sequence[Shard], strategy: Strategy, workers: int) -> Iterator[str]:
    """Yields the path of a file laid out as in `places`, which this user's tasks can open while this process lives."""
    file = os.memfd_create("trainer")
    try:
        os.truncate(file, nbytes(shards, strategy, workers))
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)
