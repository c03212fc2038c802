"""The layout of the memory of tables. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from trainer.plan.tables import Block, Table, blocks_of

PAGE = 4096  # bytes; regions begin at a multiple of it
HALVES, POWERS = 2, 640  # of an exact sum
NBYTES = {"float32": 4, "int32": 4, "int64": 8}


class Region(NamedTuple):
    """An array in the memory of tables."""

    block: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes

    @property
    def nbytes(self) -> int:
        return NBYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class TableLayout:
    """The positions of all arrays in the memory of tables."""

    blocks: tuple[Block, ...]
    slots: tuple[str, ...]  # of the optimizer
    pushes: int  # gradients that an update averages
    examples: int  # in each of them

    def regions(self) -> Iterator[Region]:
        """Yields every array, in order.

        rows, slots/NAME    [places, width] values, and what the optimizer keeps of them ([places, 1] of a whole row)
        updated             [places] the step after which each row was changed last; 0: never
        steps               [hosts] updates applied to the rows
        pushed_cuts         [pushes, hosts + 1] of the places that were pushed, where those of each host begin
        pushed_places       [pushes, most] sorted, and each once
        pushed_rows         [pushes, most, width] the gradients of these rows
        before_tag          [hosts] the generation and step from which `before_places` were updated
        before_count        [hosts] how many these are
        before_places       [hosts, most of all pushes]
        before_rows         [hosts, most of all pushes, width] their values before
        squares             [hosts, HALVES, POWERS] sums of the squares of their gradients (engine/tables/exact_sum.py)

        Of a table that grows the places that are pushed are scrambled ids, and rows are counted host by host:

        place               [rows] of the id that each row has
        count               [rows] updates that had this id; 0: the row is free
        index               [hosts, size] the row of an id, counted from 1 within its host; 0: none
        used                [hosts] rows that were ever taken
        sweeps              [hosts] how often a sweep of evicted rows has begun or ended; odd: it is under way
        seed                [hosts] of first values
        """
        offset = 0
        for number, block in enumerate(self.blocks):
            most = block.distinct(self.examples * block.lookups)
            changed = block.distinct_of_host(self.pushes * most)
            shapes: list[tuple[str, str, tuple[int, ...]]] = [
                *block.arrays(block.hosts * block.held, self.slots),
                ("steps", "int64", (block.hosts,)),
                ("pushed_cuts", "int64", (self.pushes, block.hosts + 1)),
                ("pushed_places", "int64", (self.pushes, most)),
                ("pushed_rows", "float32", (self.pushes, most, block.width)),
                ("before_tag", "int64", (block.hosts,)),
                ("before_count", "int64", (block.hosts,)),
                ("before_places", "int64", (block.hosts, changed)),
                ("before_rows", "float32", (block.hosts, changed, block.width)),
                ("squares", "int64", (block.hosts, HALVES, POWERS)),
            ]
            for name, dtype, shape in shapes:
                region = Region(number, name, dtype, shape, offset)
                yield region
                offset += _pages(region.nbytes)

    @cached_property
    def nbytes(self) -> int:
        """Returns the bytes of all arrays; pages that are never written take no memory."""
        return max((region.offset + region.nbytes for region in self.regions()), default=0)

    @cached_property
    def mailbox_nbytes(self) -> tuple[int, int]:
        """Returns the most bytes, in whole pages, of the rows behind a push, and behind a pulled message."""
        pushed = sent = 0
        for block in self.blocks:
            positions = self.examples * block.lookups
            pushed += block.distinct_of_host(positions) * (8 + 4 * block.width)
            pushed += 8 * positions + 16 * self.examples + PAGE
            sent += 4 * block.width * positions
        return _pages(pushed) + PAGE, _pages(sent) + PAGE

    def shared_nbytes(self, *, waits_for_all: bool) -> int:
        """Returns the bytes in shared memory: of all arrays, or of mailboxes if updates do not wait for all."""
        return self.nbytes if waits_for_all else self.mailboxes_nbytes

    @property
    def mailboxes_nbytes(self) -> int:
        """Returns the bytes of all mailboxes, one per kind, worker and host; unwritten pages take no memory."""
        hosts = self.blocks[0].hosts if self.blocks else 0
        return self.pushes * hosts * sum(self.mailbox_nbytes)

    def rows_nbytes(self, table: Table) -> int:
        """Returns the bytes of a table's rows, with their slots and counters."""
        (block,) = blocks_of([table], self.blocks[0].hosts)
        arrays = block.arrays(table.rows, self.slots)
        return sum(NBYTES[dtype] * math.prod(shape) for _, dtype, shape in arrays)


def _pages(nbytes: int) -> int:
    """Rounds bytes up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


NO_TABLES = TableLayout((), (), 0, 0)
