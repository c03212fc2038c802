"""Allocates the memory of tables: mapped by all tasks of a machine, or private to one process."""

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.engine.tables.growing import GrowingMemory
from trainer.engine.tables.memory import BlockMemory
from trainer.plan.table_layout import TableLayout
from trainer.plan.tables import GrowingBlock

POPULATE_READ = 22  # of madvise, since Linux 5.14


def cut(buffer: Any, layout: TableLayout, offset: int = 0) -> list[BlockMemory]:
    """Returns the arrays, by block, in a buffer with the layout from an offset on."""
    found: list[dict[str, np.ndarray]] = [{} for _ in layout.blocks]
    for region in layout.regions():
        count = region.nbytes // np.dtype(region.dtype).itemsize
        array = np.frombuffer(buffer, region.dtype, count, offset + region.offset)
        found[region.block][region.name] = array.reshape(region.shape)
    memory: list[BlockMemory] = []
    for block, arrays in zip(layout.blocks, found, strict=True):
        slots = {slot: arrays.pop(f"slots/{slot}") for slot in layout.slots}
        own = arrays.pop("rows"), slots, arrays.pop("updated"), arrays
        if isinstance(block, GrowingBlock):
            memory.append(GrowingMemory(block, *own))
        else:
            memory.append(BlockMemory(block, *own))
    return memory


def private(layout: TableLayout) -> list[BlockMemory]:
    """Returns the arrays in memory of this process; pages that are never written take none."""
    if not layout.blocks:
        return []
    memory = mmap.mmap(-1, layout.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # rows are read in no order: with larger pages fewer addresses are looked up
        with contextlib.suppress(OSError):  # a kernel may have none
            memory.madvise(mmap.MADV_HUGEPAGE)
    return cut(memory, layout)


def mapped(path: str, layout: TableLayout, offset: int) -> list[BlockMemory]:
    """Returns the arrays in a file that other tasks map too."""
    if not layout.blocks:
        return []
    with open(path, "r+b") as file:
        return cut(mmap.mmap(file.fileno(), offset + layout.nbytes), layout, offset)


def map_rows(memory: Sequence[BlockMemory]) -> None:
    """Makes the kernel map all written rows into this process at once, instead of one page at a time.

    Growing tables are left out: it would create pages for rows that no task has written.
    """
    madvise = ctypes.CDLL(None).madvise
    for block in (one for one in memory if one.block.growing is None):
        for array in (block.rows, *block.slots.values(), block.updated):
            # A kernel that does not know the advice leaves it at that.
            madvise(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), POPULATE_READ)
