"""Memory that all tasks of a machine share: a file that exists in memory only, and what lies where in it.

No TensorFlow here: the launcher makes the file. Its memory is given back when the last process that uses it has ended,
however that ends.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainer.placement import Shard

PAGE = 4096  # bytes; places begin at a multiple of it


def why_not() -> str:
    """Why this process cannot make such a file; empty if it can."""
    if sys.platform != "linux":
        return "only Linux has such memory"
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return "a file in memory is a file, and their size is limited here (ulimit -f)"
    return ""


@contextmanager
def make_file(shards: Sequence[Shard], workers: int) -> Iterator[str]:
    """A file for `places`; gives the path by which tasks that this user starts reach it, while this process lives."""
    file = os.memfd_create("trainer")
    try:
        os.truncate(file, nbytes(shards, workers))
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)


def places(shards: Sequence[Shard], workers: int) -> Iterator[tuple[Shard, int | None, int]]:
    """Every place: of a shard's vector (None), and of the gradients that a worker pushes to it; and its first byte."""
    offset = 0
    for shard in shards:
        for worker in (None, *range(workers)):
            yield shard, worker, offset
            offset += -(-shard.nbytes // PAGE) * PAGE


def nbytes(shards: Sequence[Shard], workers: int) -> int:
    """Of all places."""
    *_, (last, _, offset) = places(shards, workers)
    return offset + last.nbytes
