"""Tables: embeddings whose rows stay on the hosts, and of which a step moves only the rows that it touches. Pure.

All tables of one width lie one after the other and make a *block*; its rows are counted across them. Row g of a block
is held by host g % hosts, as that host's row g // hosts, so that frequent ids are spread and every host holds as many
rows as any other. A *place* counts the rows of all hosts, host by host: sorted places are cut by host in two numbers.

A table that grows takes any int64 as an id, and is a block of its own. The place of an id is the id scrambled. Hosts
share out all 64-bit numbers, and find the row of a place in an index (engine/tables/growing.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from trainer.config.schema import ROW_ACCUMULATOR, PlacementConfig
from trainer.plan.scramble import scrambled, unscrambled

if TYPE_CHECKING:
    import numpy as np

    Numbers = TypeVar("Numbers", int, np.ndarray)

PAGE = 4096  # bytes; regions begin at a multiple of it
HALVES, POWERS = 2, 640  # of an exact sum
NBYTES = {"float32": 4, "int32": 4, "int64": 8}
LEAST_PLACE = -(2**63)  # of a table that grows
# What a table that grows keeps of each row beside the slots of the optimizer: how many updates had its id (0: the row
# is free), and the step after which the last of them was made.
COUNT, UPDATED = "count", "updated"


class FirstValues(NamedTuple):
    """How the rows of a table begin: uniformly distributed in low..high, which may be the same."""

    low: float
    high: float


class Growing(NamedTuple):
    """Which ids have a row, in a table whose ids are any int64."""

    min_count: int  # updates that must have had an id, the one at hand among them, before its row is trained
    max_age: int | None  # steps without an id after which its row is evicted; None: it stays

    def is_evicted(self, updated: np.ndarray, step: int | np.ndarray) -> np.ndarray:
        """[n] bool: which rows are evicted at a step; `updated` [n]: the step of each row's last update."""
        return step - updated.astype("int64") > (math.inf if self.max_age is None else self.max_age)


def first_key(path: str, seed: int) -> int:
    """Returns a number of 64 bits, from which the first values of a table's rows follow."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {path}".encode(), digest_size=8).digest(), "little")


class SparsePattern(NamedTuple):
    """Layers whose embeddings are tables."""

    pattern: str  # of their paths (fnmatch)
    rows: int | None = None  # None: input_dim of the layer
    growing: Growing | None = None


class Table(NamedTuple):
    """The embeddings of a layer."""

    path: str  # of the variable that it stands for, e.g. "user/embeddings"
    rows: int  # of a table that grows: those that it has room for
    width: int  # floats of a row
    first: FirstValues
    lookups: int  # rows that one example looks up, the same one counted again
    growing: Growing | None = None


@dataclass(frozen=True)
class Block:
    """All tables of one width that do not grow."""

    tables: tuple[Table, ...]
    hosts: int

    @property
    def name(self) -> str:
        """It is in the names of files."""
        return str(self.width)

    @property
    def growing(self) -> Growing | None:
        return self.tables[0].growing

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
        """Returns the row at which each table begins, by its path."""
        begins, row = {}, 0
        for table in self.tables:
            begins[table.path] = row
            row += table.rows
        return begins

    @property
    def first_places(self) -> list[int]:
        """Of each host."""
        return [host * self.held for host in range(self.hosts)]

    def distinct(self, positions: int) -> int:
        """Returns how many places so many positions of a batch have, at most."""
        return min(positions, self.rows)

    def distinct_of_host(self, positions: int) -> int:
        """Returns how many of them may be those of one host."""
        return min(positions, self.held)

    def arrays(self, places: int, slots: Sequence[str]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name, type, shape) of the arrays of its rows."""
        yield "rows", "float32", (places, self.width)
        for slot in slots:
            yield f"slots/{slot}", "float32", (places, slot_width(slot, self.width))
        yield "updated", "int32", (places,)

    def saved(self, slots: Sequence[str]) -> list[str]:
        """Returns what a checkpoint has of a row beside its values."""
        return list(slots)

    def place_of(self, row: Numbers) -> Numbers:
        """Returns the place of a row, or of each of an array of int64."""
        return row % self.hosts * self.held + row // self.hosts

    def row_at(self, place: Numbers) -> Numbers:
        """The row at a place, or at each of an array of int64; at unused places rows that the block does not have."""
        return place % self.held * self.hosts + place // self.held


class GrowingBlock(Block):
    """A table that grows."""

    SPREAD = 6  # standard deviations from its share of the ids for which a host has room, too

    @property
    def name(self) -> str:
        return f"{self.width}-{self.tables[0].path.replace('/', '.')}"

    @cached_property
    def held(self) -> int:
        share = -(-self.rows // self.hosts)
        return share + (math.ceil(self.SPREAD * math.sqrt(share)) if self.hosts > 1 else 0)

    @cached_property
    def index_size(self) -> int:
        """Entries of each host's index, a power of two: at most half of them are in use."""
        return 1 << (2 * self.held - 1).bit_length()

    @property
    def first_places(self) -> list[int]:
        return [LEAST_PLACE - -(host * 2**64) // self.hosts for host in range(self.hosts)]

    def distinct(self, positions: int) -> int:
        return positions

    def distinct_of_host(self, positions: int) -> int:
        return positions

    def arrays(self, places: int, slots: Sequence[str]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        yield from super().arrays(places, slots)
        yield from (("place", "int64", (places,)), (COUNT, "int32", (places,)))
        yield "index", "int32", (self.hosts, self.index_size)
        yield from ((name, "int64", (self.hosts,)) for name in ("used", "sweeps", "seed"))

    def saved(self, slots: Sequence[str]) -> list[str]:
        return [*slots, COUNT, UPDATED]

    def place_of(self, row: Any) -> Any:
        """Returns the place of each of an array of int64, which are ids."""
        return (scrambled(row.astype("uint64")) ^ 2**63).view("int64")

    def row_at(self, place: Any) -> Any:
        """Returns the id that has each of an array of int64 as its place."""
        return unscrambled(place.view("uint64") ^ 2**63).view("int64")


def sparse_patterns(placement: PlacementConfig) -> tuple[SparsePattern, ...]:
    """Returns the first that matches a layer counts."""

    def growing(pattern: str) -> Growing:
        return Growing(placement.min_count.get(pattern, 1), placement.max_age.get(pattern))

    grow = (SparsePattern(pattern, rows, growing(pattern)) for pattern, rows in placement.growing.items())
    return (*grow, *map(SparsePattern, placement.sparse))


def blocks_of(tables: Sequence[Table], hosts: int) -> tuple[Block, ...]:
    """The blocks of tables, by width, and then those that grow, by path; within a block, too, tables are by path."""
    ordered = sorted(tables, key=lambda table: table.path)
    fixed = [table for table in ordered if table.growing is None]
    widths = sorted({table.width for table in fixed})
    blocks = (Block(tuple(one for one in fixed if one.width == width), hosts) for width in widths)
    return (*blocks, *(GrowingBlock((table,), hosts) for table in ordered if table.growing))


def slot_width(slot: str, width: int) -> int:
    """Numbers that a slot has of a row of this width."""
    return 1 if slot in (ROW_ACCUMULATOR, COUNT, UPDATED) else width


def slot_dtype(slot: str) -> str:
    """Their type."""
    return "int32" if slot in (COUNT, UPDATED) else "float32"


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
        """Of all arrays; what is never written to takes no memory."""
        return max((region.offset + region.nbytes for region in self.regions()), default=0)

    @cached_property
    def mailbox_nbytes(self) -> tuple[int, int]:
        """Bytes, at most, of the rows behind a push, and of those behind a message that is pulled; whole pages."""
        pushed = sent = 0
        for block in self.blocks:
            positions = self.examples * block.lookups
            pushed += block.distinct_of_host(positions) * (8 + 4 * block.width)
            pushed += 8 * positions + 16 * self.examples + PAGE
            sent += 4 * block.width * positions
        return _pages(pushed) + PAGE, _pages(sent) + PAGE

    def shared_nbytes(self, *, waits_for_all: bool) -> int:
        """Bytes in the memory that tasks share: of all arrays, or of mailboxes where updates do not wait for all."""
        return self.nbytes if waits_for_all else self.mailboxes_nbytes

    @property
    def mailboxes_nbytes(self) -> int:
        """Bytes of a mailbox of each kind for each worker at each host; what is never written to takes no memory."""
        hosts = self.blocks[0].hosts if self.blocks else 0
        return self.pushes * hosts * sum(self.mailbox_nbytes)

    def rows_nbytes(self, table: Table) -> int:
        """Bytes of the rows of a table and of what belongs to them."""
        (block,) = blocks_of([table], self.blocks[0].hosts)
        arrays = block.arrays(table.rows, self.slots)
        return sum(NBYTES[dtype] * math.prod(shape) for _, dtype, shape in arrays)


def _pages(nbytes: int) -> int:
    """Bytes of the whole pages that hold so many."""
    return -(-nbytes // PAGE) * PAGE


NO_TABLES = TableLayout((), (), 0, 0)
