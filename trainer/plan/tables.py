"""Tables: embeddings whose rows stay on the hosts; a step moves only the rows that it touches. Pure.

All tables of one width lie one after the other and make a *block*; its rows are counted across them. Row g of a block
is held by host g % hosts, as that host's row g // hosts, so that frequent ids are spread and every host holds as many
rows as any other. A *place* counts the rows of all hosts, host by host: sorted places are cut by host in two numbers.

A table that grows takes any int64 as an id, and is a block of its own. The place of an id is the id scrambled. Hosts
divide all 64-bit numbers among them, and find the row of a place in an index (engine/tables/growing.py).
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

LEAST_PLACE = -(2**63)  # of a table that grows
# What a growing table keeps for each row besides the slots of the optimizer: how many updates had its id (0: the row
# is free), and the step after which the last of them was made.
COUNT, UPDATED = "count", "updated"


class FirstValues(NamedTuple):
    """The initial values of a table's rows: uniform in low..high, which may be equal."""

    low: float
    high: float


class Growing(NamedTuple):
    """The rules by which ids get and lose rows, in a table that takes any int64 id."""

    min_count: int  # updates that must have had an id, the one at hand among them, before its row is trained
    max_age: int | None  # steps without an id after which its row is evicted; None: it stays

    def is_evicted(self, updated: np.ndarray, step: int | np.ndarray) -> np.ndarray:
        """Returns [n] bool: the rows evicted at a step, given the step of each row's last update, `updated` [n]."""
        return step - updated.astype("int64") > (math.inf if self.max_age is None else self.max_age)


def first_key(path: str, seed: int) -> int:
    """Returns a 64-bit number that determines the initial values of a table's rows."""
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
    """All tables of one width, except growing ones."""

    tables: tuple[Table, ...]
    hosts: int

    @property
    def name(self) -> str:
        """Returns the name of the block in names of files."""
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
        """Returns the rows of each host; on some hosts the last row stays unused."""
        return -(-self.rows // self.hosts)

    @property
    def lookups(self) -> int:
        """Returns the lookups of one example."""
        return sum(table.lookups for table in self.tables)

    @cached_property
    def begins(self) -> dict[str, int]:
        """Returns the first row of each table, by its path."""
        begins, row = {}, 0
        for table in self.tables:
            begins[table.path] = row
            row += table.rows
        return begins

    @property
    def first_places(self) -> list[int]:
        """Returns the first place of each host."""
        return [host * self.held for host in range(self.hosts)]

    def distinct(self, positions: int) -> int:
        """Returns the most distinct places that this many positions of a batch can have."""
        return min(positions, self.rows)

    def distinct_of_host(self, positions: int) -> int:
        """Returns the most distinct places that can belong to one host."""
        return min(positions, self.held)

    def arrays(self, places: int, slots: Sequence[str]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Returns (name, type, shape) of the arrays of the rows."""
        yield "rows", "float32", (places, self.width)
        for slot in slots:
            yield f"slots/{slot}", "float32", (places, slot_width(slot, self.width))
        yield "updated", "int32", (places,)

    def saved(self, slots: Sequence[str]) -> list[str]:
        """Returns the arrays that a checkpoint stores beside a row's values."""
        return list(slots)

    def place_of(self, row: Numbers) -> Numbers:
        """Returns the place of a row, or the places of an array of int64 rows."""
        return row % self.hosts * self.held + row // self.hosts

    def row_at(self, place: Numbers) -> Numbers:
        """Returns the row at a place, or at an array of int64 places; unused places give rows outside the block."""
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
        """Returns the entries of each host's index, a power of two; at most half of them are used."""
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
        """Returns the places of an array of int64 ids."""
        return (scrambled(row.astype("uint64")) ^ 2**63).view("int64")

    def row_at(self, place: Any) -> Any:
        """Returns the ids at an array of int64 places."""
        return unscrambled(place.view("uint64") ^ 2**63).view("int64")


def sparse_patterns(placement: PlacementConfig) -> tuple[SparsePattern, ...]:
    """Returns the patterns of sparse layers; the first that matches a layer counts."""

    def growing(pattern: str) -> Growing:
        return Growing(placement.min_count.get(pattern, 1), placement.max_age.get(pattern))

    grow = (SparsePattern(pattern, rows, growing(pattern)) for pattern, rows in placement.growing.items())
    return (*grow, *map(SparsePattern, placement.sparse))


def blocks_of(tables: Sequence[Table], hosts: int) -> tuple[Block, ...]:
    """Returns the blocks of tables by width, then growing ones by path; tables of a block are ordered by path."""
    ordered = sorted(tables, key=lambda table: table.path)
    fixed = [table for table in ordered if table.growing is None]
    widths = sorted({table.width for table in fixed})
    blocks = (Block(tuple(one for one in fixed if one.width == width), hosts) for width in widths)
    return (*blocks, *(GrowingBlock((table,), hosts) for table in ordered if table.growing))


def slot_width(slot: str, width: int) -> int:
    """Returns the numbers that a slot has for a row of this width."""
    return 1 if slot in (ROW_ACCUMULATOR, COUNT, UPDATED) else width


def slot_dtype(slot: str) -> str:
    """Returns the dtype of a slot."""
    return "int32" if slot in (COUNT, UPDATED) else "float32"
