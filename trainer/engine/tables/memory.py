"""The arrays of tables, over memory that all tasks of a machine map, or that one process has for itself.

Who writes what, and when:

    host    rows, slots, `updated`, `before_*` of its own places, in an update: all workers have pushed, so none reads
    worker  its own `pushed_*`, once it has the tokens of a step: all hosts have used its last push

`before_*` is written, its tag last, before a row changes. So whoever joins at the step before, and reads while a host
may be updating, first takes the rows and then, if the tag says so, puts back those that the update changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.engine.tables.first_values import first_values
from trainer.plan.tables import Block, TableLayout

Pushed = tuple[np.ndarray, np.ndarray]  # places [n] int64, sorted and each once; the gradients of their rows [n, width]

LOAD_ROWS = 2**18  # at once
POPULATE_READ = 22  # of madvise, since Linux 5.14


@dataclass(frozen=True)
class BlockMemory:
    """The arrays of one block."""

    block: Block
    rows: np.ndarray
    slots: dict[str, np.ndarray]
    updated: np.ndarray
    arrays: dict[str, np.ndarray]  # the others of `regions`

    def read(self, places: np.ndarray, tag: int) -> np.ndarray:
        """[n, width] the rows at places [n] as they were at a step, which no host is more than one update past.

        Args:
            tag: the generation and step, as one number.
        """
        rows = np.take(self.rows, places, axis=0)
        for host in np.flatnonzero(self.arrays["before_tag"] == tag):
            count = int(self.arrays["before_count"][host])
            changed = self.arrays["before_places"][host, :count]
            at = np.searchsorted(changed, places)
            is_changed = np.take(changed, at, mode="clip") == places if count else np.zeros(len(places), bool)
            rows[is_changed] = self.arrays["before_rows"][host, at[is_changed]]
        return rows

    def write_push(self, worker: int, places: np.ndarray, rows: np.ndarray) -> None:
        """Leaves a worker's gradients [n, width] of the rows at sorted places [n] for the hosts."""
        self.arrays["pushed_places"][worker, : len(places)] = places
        self.arrays["pushed_rows"][worker, : len(places)] = rows
        self.arrays["pushed_cuts"][worker] = cuts_of(places, self.block)

    def pushed(self, worker: int, host: int) -> Pushed:
        """What a worker has pushed to a host; views."""
        begin, end = self.arrays["pushed_cuts"][worker, host : host + 2]
        return self.arrays["pushed_places"][worker, begin:end], self.arrays["pushed_rows"][worker, begin:end]

    def keep(self, host: int, tag: int, places: np.ndarray, rows: np.ndarray) -> None:
        """Notes the rows [n, width] at sorted places [n] of a host, before an update from the state of `tag`."""
        count = len(places)
        self.arrays["before_places"][host, :count] = places
        self.arrays["before_rows"][host, :count] = rows
        self.arrays["before_count"][host] = count
        self.arrays["before_tag"][host] = tag

    def put(self, places: np.ndarray, rows: np.ndarray, slots: dict[str, np.ndarray], step: int) -> None:
        """Writes rows [n, width] and their slots at places [n], which have changed in the update to `step`."""
        _put(self.rows, places, rows)
        for name, values in slots.items():
            _put(self.slots[name], places, values)
        self.updated[places] = step

    def begin(self, host: int, fills: Mapping[str, float], *, seed: int) -> None:
        """Gives all rows of a host, and their slots, their first values."""
        block, first = self.block, host * self.block.held
        own = slice(first, first + block.held)
        self.updated[own] = 0
        self.arrays["before_tag"][host] = -1
        for name, fill in fills.items():
            self.slots[name][own] = fill
        for table in block.tables:
            begin = block.begins[table.path]
            own_first, own_end = (-(-(row - host) // block.hosts) for row in (begin, begin + table.rows))
            for at in range(own_first, own_end, LOAD_ROWS):
                numbers = np.arange(at, min(at + LOAD_ROWS, own_end), dtype=np.int64)
                values = first_values(table, numbers * block.hosts + host - begin, seed=seed)
                self.rows[first + at : first + at + len(values)] = values


def cut(buffer: Any, layout: TableLayout, offset: int = 0) -> list[BlockMemory]:
    """The arrays in a buffer that has the layout from an offset on, by block."""
    found: list[dict[str, np.ndarray]] = [{} for _ in layout.blocks]
    for region in layout.regions():
        count = region.nbytes // np.dtype(region.dtype).itemsize
        array = np.frombuffer(buffer, region.dtype, count, offset + region.offset)
        found[region.block][region.name] = array.reshape(region.shape)
    return [
        BlockMemory(
            block,
            arrays.pop("rows"),
            {slot: arrays.pop(f"slots/{slot}") for slot in layout.slots},
            arrays.pop("updated"),
            arrays,
        )
        for block, arrays in zip(layout.blocks, found, strict=True)
    ]


def private(layout: TableLayout) -> list[BlockMemory]:
    """The arrays in memory of this process; what is never written to takes none."""
    if not layout.blocks:
        return []
    memory = mmap.mmap(-1, layout.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # rows are read in no order: with larger pages fewer addresses are looked up
        with contextlib.suppress(OSError):  # a kernel may have none
            memory.madvise(mmap.MADV_HUGEPAGE)
    return cut(memory, layout)


def mapped(path: str, layout: TableLayout, offset: int) -> list[BlockMemory]:
    """The arrays in a file that others map too."""
    if not layout.blocks:
        return []
    with open(path, "r+b") as file:
        return cut(mmap.mmap(file.fileno(), offset + layout.nbytes), layout, offset)


def map_rows(memory: Sequence[BlockMemory]) -> None:
    """Has the kernel map all rows that others have written into this process, which else it does one page at a time."""
    madvise = ctypes.CDLL(None).madvise
    for block in memory:
        for array in (block.rows, *block.slots.values(), block.updated):
            # A kernel that does not know the advice leaves it at that.
            madvise(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), POPULATE_READ)


def cuts_of(places: np.ndarray, block: Block) -> np.ndarray:
    """[hosts + 1] int64: where the places of each host begin, among sorted places [n]."""
    return np.searchsorted(places, np.arange(block.hosts + 1) * block.held)


def sum_pushed(pushed: Sequence[Pushed]) -> Pushed:
    """The places that any pushed, sorted, and the sums of their gradients: one after the other, in the order given.

    The bits of a sum depend on nothing else.
    """
    if len(pushed) == 1:
        return pushed[0]
    places, rows = (np.concatenate(parts) for parts in zip(*pushed, strict=True))
    touched, first, which = np.unique(places, return_index=True, return_inverse=True)
    total = np.take(rows, first, axis=0)
    is_more = np.ones(len(places), bool)
    is_more[first] = False
    begin = 0
    for own, _ in pushed:  # each names a place once
        more = begin + np.flatnonzero(is_more[begin : begin + len(own)])
        total[which[more]] += rows[more]
        begin += len(own)
    return touched, total


def _put(array: np.ndarray, places: np.ndarray, rows: np.ndarray) -> None:
    """Like array[places] = rows, as whole records, which is much faster."""
    record = np.dtype((np.void, array.dtype.itemsize * array.shape[1]))
    np.put(array.view(record).ravel(), places, np.ascontiguousarray(rows).view(record).ravel())
