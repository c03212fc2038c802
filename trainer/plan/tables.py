"""Tables: embeddings whose rows stay on the hosts, and of which a step moves only the rows that it touches. Pure.

All tables of one width lie one after the other and make a *block*; its rows are counted across them. Row g of a block
is held by host g % hosts, as that host's row g // hosts, so that frequent ids are spread and every host holds as many
rows as any other. A *place* counts the rows of all hosts, host by host: sorted places are cut by host in two numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from trainer.config.schema import ROW_ACCUMULATOR

if TYPE_CHECKING:
    import numpy as np

    Numbers = TypeVar("Numbers", int, np.ndarray)

PAGE = 4096  # bytes; regions begin at a multiple of it
HALVES, POWERS = 2, 640  # of an exact sum
NBYTES = {"float32": 4, "int32": 4, "int64": 8}


class FirstValues(NamedTuple):
    """How the rows of a table begin: uniformly distributed in low..high, which may be the same."""

    low: float
    high: float


class Table(NamedTuple):
    """The embeddings of a layer."""

    path: str  # of the variable that it stands for, e.g. "user/embeddings"
    rows: int
    width: int  # floats of a row
    first: FirstValues
    lookups: int  # rows that one example looks up, the same one counted again


@dataclass(frozen=True)
class Block:
    """All tables of one width."""

    tables: tuple[Table, ...]
    hosts: int

    @property
    def width(self) -> int:
        return self.tables[0].width

    @cached_property
    def rows(self) -> int:
        return sum(table.rows for table in self.tables)

    @cached_property
    def held(self) -> int:
        """Rows of each host; the last of some stay unused."""
        return -(-self.rows // self.hosts)

    @property
    def lookups(self) -> int:
        """Of one example."""
        return sum(table.lookups for table in self.tables)

    @cached_property
    def begins(self) -> dict[str, int]:
        """The row at which each table begins, by its path."""
        begins, row = {}, 0
        for table in self.tables:
            begins[table.path] = row
            row += table.rows
        return begins

    def place_of(self, row: Numbers) -> Numbers:
        """The place of a row, or of each of an array of int64."""
        return row % self.hosts * self.held + row // self.hosts

    def row_at(self, place: Numbers) -> Numbers:
        """The row at a place, or at each of an array of int64; at unused places rows that the block does not have."""
        return place % self.held * self.hosts + place // self.held


def blocks_of(tables: Sequence[Table], hosts: int) -> tuple[Block, ...]:
    """The blocks of tables, by width; within a block tables are in the order of their paths."""
    widths = sorted({table.width for table in tables})
    ordered = sorted(tables, key=lambda table: table.path)
    return tuple(Block(tuple(one for one in ordered if one.width == width), hosts) for width in widths)


def slot_width(slot: str, width: int) -> int:
    """Floats that an optimizer slot has of a row of this width."""
    return 1 if slot == ROW_ACCUMULATOR else width


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
    """What lies where in the memory of tables."""

    blocks: tuple[Block, ...]
    slots: tuple[str, ...]  # of the optimizer
    pushes: int  # gradients that an update averages
    examples: int  # in each of them

    def regions(self) -> Iterator[Region]:
        """Every array, in order.

        rows, slots/NAME    [places, width] values, and what the optimizer keeps of them ([places, 1] of a whole row)
        updated             [places] the step after which each row was changed last; 0: never
        pushed_cuts         [pushes, hosts + 1] of the places that were pushed, where those of each host begin
        pushed_places       [pushes, most] sorted, and each once
        pushed_rows         [pushes, most, width] the gradients of these rows
        before_tag          [hosts] the generation and step from which `before_places` were updated
        before_count        [hosts] how many these are
        before_places       [hosts, most of all pushes]
        before_rows         [hosts, most of all pushes, width] their values before
        squares             [hosts, HALVES, POWERS] sums of the squares of their gradients (engine/tables/exact_sum.py)
        """
        offset = 0
        for number, block in enumerate(self.blocks):
            places, most = block.hosts * block.held, min(self.examples * block.lookups, block.rows)
            changed = min(self.pushes * most, block.held)
            shapes: list[tuple[str, str, tuple[int, ...]]] = [
                ("rows", "float32", (places, block.width)),
                *((f"slots/{slot}", "float32", (places, slot_width(slot, block.width))) for slot in self.slots),
                ("updated", "int32", (places,)),
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
        """Of all arrays; what is never written to takes no memory."""
        return max((region.offset + region.nbytes for region in self.regions()), default=0)

    @cached_property
    def mailbox_nbytes(self) -> tuple[int, int]:
        """Bytes, at most, of the rows behind a push, and of those behind a message that is pulled; whole pages."""
        pushed = sent = 0
        for block in self.blocks:
            positions = self.examples * block.lookups
            pushed += min(positions, block.held) * (8 + 4 * block.width) + 8 * positions + 16 * self.examples + PAGE
            sent += 4 * block.width * positions
        return _pages(pushed) + PAGE, _pages(sent) + PAGE

    @property
    def mailboxes_nbytes(self) -> int:
        """Bytes of a mailbox of each kind for each worker at each host; what is never written to takes no memory."""
        hosts = self.blocks[0].hosts if self.blocks else 0
        return self.pushes * hosts * sum(self.mailbox_nbytes)

    @property
    def row_nbytes(self) -> dict[int, int]:
        """Bytes of a row and its slots, by width."""
        return {
            block.width: 4 * (block.width + sum(slot_width(slot, block.width) for slot in self.slots) + 1)
            for block in self.blocks
        }


def _pages(nbytes: int) -> int:
    """Bytes of the whole pages that hold so many."""
    return -(-nbytes // PAGE) * PAGE


NO_TABLES = TableLayout((), (), 0, 0)
