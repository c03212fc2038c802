"""The layout of the memory that all tasks of a machine share: a file that exists only in memory.

Every shard has places for vectors: one where updates wait for all workers, because nobody reads it while it is
written; otherwise one for each worker, which keeps what it computes on, and one for the next vector. What workers
push lies behind them: a vector for each span of replicas (spans.py), or for each worker under async and backup.

No TensorFlow here: the launcher makes the file. Its memory is given back when the last process that uses it has ended,
however that ends.
"""

import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainer.config.schema import Launch, RunConfig, Wire
from trainer.config.typed import Mode
from trainer.faults.problems import Problem
from trainer.plan import addresses
from trainer.plan.devices import ON_HOSTS
from trainer.plan.layout import Shard
from trainer.plan.strategy import Strategy, strategy_of
from trainer.plan.table_layout import NO_TABLES, PAGE, TableLayout

SENT_BELOW_NBYTES = 2**18  # if every vector is smaller: a message with it takes less time than finding it


def wire_of(config: RunConfig, shards: Sequence[Shard], mode: Mode, *, has_tables: bool = False) -> str:
    """Returns the wire of a config; by default shared memory if it is possible, and faster or needed by tables."""
    if config.strategy.wire is not Wire.auto:
        return str(config.strategy.wire.value)
    is_small = all(shard.nbytes < SENT_BELOW_NBYTES for shard in shards) and not has_tables
    return Wire.float32.value if is_small or why_not_memory(config, mode) else Wire.memory.value


def why_not_memory(config: RunConfig, mode: Mode) -> str:
    """Returns why vectors must be sent; empty if they can stay in memory that all tasks share."""
    strategy = strategy_of(config.strategy, config.cluster)
    if not strategy.has_shard_hosts:
        return f"{strategy.name} has no shards"
    if config.launch.name is Launch.docker or mode is Mode.render:
        return "containers share no memory"
    if config.launch.name in ON_HOSTS:
        return "the tasks are on several machines"
    if config.device.log_placement:
        return "device.log_placement can follow only vectors sent as messages"
    machines = {addresses.host_of(address) for listed in config.cluster.addresses.values() for address in listed}
    if config.job is not None or config.cluster.hosts or len(machines) > 1:
        return "the tasks are on several machines"
    return why_not()


def check_wire(config: RunConfig, mode: Mode) -> Iterator[Problem]:
    """Yields a problem if shared memory is asked for but impossible."""
    is_wanted = config.strategy.wire is Wire.memory and strategy_of(config.strategy, config.cluster).has_shard_hosts
    if is_wanted and (reason := why_not_memory(config, mode)):
        yield Problem("strategy.wire", "not-available", f"memory cannot be used: {reason}", "leave it out")


def why_not() -> str:
    """Returns why this process cannot make such a file; empty if it can."""
    if sys.platform != "linux":
        return "it needs Linux"
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return "the size of files, even of those in memory, is limited (ulimit -f)"
    return ""


def vectors_of(strategy: Strategy, pushes: int) -> int:
    """Returns how many places a shard's vectors have."""
    return 1 if strategy.waits_for_all else pushes + 1


def places(shards: Sequence[Shard], strategy: Strategy, pushes: int) -> Iterator[tuple[Shard, int]]:
    """Yields every place as its shard and first byte: those of a shard's vectors first, then one per push."""
    offset = 0
    for shard in shards:
        for _ in range(vectors_of(strategy, pushes) + pushes):
            yield shard, offset
            offset += -(-shard.nbytes // PAGE) * PAGE


def nbytes(shards: Sequence[Shard], strategy: Strategy, pushes: int) -> int:
    """Returns the bytes of all places; places that are never written take no memory."""
    *_, (last, offset) = places(shards, strategy, pushes)
    return offset + last.nbytes


def tables_offset(shards: Sequence[Shard], strategy: Strategy, pushes: int) -> int:
    """Returns the first byte of the memory of tables, which lies behind all places."""
    return -(-nbytes(shards, strategy, pushes) // PAGE) * PAGE


@contextmanager
def lay_out(
    file: int, shards: Sequence[Shard], strategy: Strategy, pushes: int, tables: TableLayout = NO_TABLES
) -> Iterator[str]:
    """Gives an open memory file the size of all `places` and tables; yields its path here."""
    sizes = shards, strategy, pushes
    os.truncate(file, tables_offset(*sizes) + tables.shared_nbytes(waits_for_all=strategy.waits_for_all))
    try:
        yield f"/proc/self/fd/{file}"
    finally:
        os.truncate(file, 0)
