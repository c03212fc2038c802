"""Memory that all tasks of a machine share: a file that exists in memory only, and what lies where in it.

Of every shard there are places for vectors: one where all workers move in step, for nobody reads it while it is
written. Where they do not, one for each worker, which keeps what it computes on, and one for the next vector. Behind
them lie the gradients of each worker.

No TensorFlow here: the launcher makes the file. Its memory is given back when the last process that uses it has ended,
however that ends.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Sequence

from trainer.plan.layout import Shard

PAGE = 4096  # bytes; places begin at a multiple of it


def why_not() -> str:
    """Why this process cannot make such a file; empty if it can."""
    if sys.platform != "linux":
        return "only Linux has such memory"
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return "a file in memory is a file, and their size is limited here (ulimit -f)"
    return ""


def vectors_of(intake: str, workers: int) -> int:
    """How many places a shard's vectors have, by the intake of its host."""
    return 1 if intake == "all" else workers + 1


def places(shards: Sequence[Shard], intake: str, workers: int) -> Iterator[tuple[Shard, int]]:
    """Every place, as its shard and first byte; of a shard those of vectors go first, then one for each worker."""
    offset = 0
    for shard in shards:
        for _ in range(vectors_of(intake, workers) + workers):
            yield shard, offset
            offset += -(-shard.nbytes // PAGE) * PAGE


def nbytes(shards: Sequence[Shard], intake: str, workers: int) -> int:
    """Of all places; those that are never written to take no memory."""
    *_, (last, offset) = places(shards, intake, workers)
    return offset + last.nbytes
