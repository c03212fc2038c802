"""The arrays of a block of tables, with the rules for reading and writing them.

Who writes what, and when:

    host    rows, slots, `updated`, `before_*` of its own places, in an update: all workers have pushed, so none reads
    worker  its own `pushed_*`, once it has the tokens of a step: all hosts have used its last push

`before_*` is written, its tag last, before a row changes. A worker that joins at the previous step, and reads while a
host may be updating, first takes the rows and then, if the tag says so, restores those that the update changes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.engine.tables.first_values import first_values
from trainer.plan.spans import Span, all_of, each_alone
from trainer.plan.tables import Block

NO_TAG = -2  # of no step: rows are read as they are

OnEvict = Callable[[np.ndarray], None]
Pushed = tuple[np.ndarray, np.ndarray]  # places [n] int64, sorted and each once; the gradients of their rows [n, width]

LOAD_ROWS = 2**18  # at once


@dataclass(frozen=True)
class BlockMemory:
    """The arrays of one block."""

    block: Block
    rows: np.ndarray
    slots: dict[str, np.ndarray]
    updated: np.ndarray
    arrays: dict[str, np.ndarray]  # the others of `regions`

    def read(self, places: np.ndarray, tag: int = NO_TAG) -> np.ndarray:
        """Returns [n, width] the rows at places [n] as they were at a step, which no host is more than one update past.

        Args:
            tag: the generation and step, as one number.
        """
        rows = self.values(places, tag)
        for host in np.flatnonzero(self.arrays["before_tag"] == tag):
            count = int(self.arrays["before_count"][host])
            changed = self.arrays["before_places"][host, :count]
            at = np.searchsorted(changed, places)
            is_changed = np.take(changed, at, mode="clip") == places if count else np.zeros(len(places), bool)
            rows[is_changed] = self.arrays["before_rows"][host, at[is_changed]]
        return rows

    def values(self, places: np.ndarray, tag: int) -> np.ndarray:
        """Returns the current rows [n, width] at places [n]; no host has begun the update from the state of `tag`."""
        return np.take(self.rows, places, axis=0)

    def write_push(self, push: int, places: np.ndarray, rows: np.ndarray) -> None:
        """Writes gradients [n, width] of the rows at sorted places [n] for the hosts, as one push."""
        self.arrays["pushed_places"][push, : len(places)] = places
        self.arrays["pushed_rows"][push, : len(places)] = rows
        self.arrays["pushed_cuts"][push] = cuts_of(places, self.block)

    def pushed(self, push: int, host: int) -> Pushed:
        """Returns views of a push to a host."""
        begin, end = self.arrays["pushed_cuts"][push, host : host + 2]
        return self.arrays["pushed_places"][push, begin:end], self.arrays["pushed_rows"][push, begin:end]

    def keep(self, host: int, tag: int, places: np.ndarray, rows: np.ndarray) -> None:
        """Saves the rows [n, width] at sorted places [n] of a host, before an update from the state of `tag`."""
        count = len(places)
        self.arrays["before_places"][host, :count] = places
        self.arrays["before_rows"][host, :count] = rows
        self.arrays["before_count"][host] = count
        self.arrays["before_tag"][host] = tag

    # What follows is about rows by their number in the arrays; where tables do not grow, that is the place.

    def find(self, places: np.ndarray) -> np.ndarray:
        """Returns [k <= n] the rows that places [n] of a host have already."""
        return places

    def take_up(
        self, host: int, places: np.ndarray, step: int, fills: Mapping[str, float], on_evict: OnEvict
    ) -> tuple[np.ndarray, np.ndarray | slice]:
        """Returns the rows of places [n] that a host updates from a step: (all of them, which of them are trained).

        Args:
            fills: initial values of slots.
            on_evict: called with rows before they are overwritten.
        """
        return places, slice(None)

    def places_at(self, rows: np.ndarray) -> np.ndarray:
        """Returns the places of rows [n]."""
        return rows

    def changed_after(self, step: int, host: int | None = None) -> np.ndarray:
        """Returns [n] the rows, of a host or of all, that were changed after a step."""
        begin, end = (0, len(self.updated)) if host is None else self._own(host)
        return begin + np.flatnonzero(self.updated[begin:end] > step)

    def saved_at(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns what a checkpoint stores of rows [n] besides their values: [n, k] each."""
        return {name: np.take(values, rows, axis=0) for name, values in self.slots.items()}

    def put(self, at: np.ndarray, rows: np.ndarray, slots: Mapping[str, np.ndarray], step: int) -> None:
        """Writes rows [n, width] and their slots, which have changed in the update to `step`."""
        _put(self.rows, at, rows)
        for name, values in slots.items():
            _put(self.slots[name], at, values)
        self.updated[at] = step

    def load(
        self, host: int, ids: np.ndarray, rows: np.ndarray, saved: Mapping[str, np.ndarray], part_step: int, step: int
    ) -> None:
        """Writes those of rows [n, width] that a host holds, with their saved slots and counters.

        Args:
            part_step: after which these have not changed.
            step: of the checkpoint.
        """
        is_own = ids % self.block.hosts == host
        slots = {name: one[is_own] for name, one in saved.items()}
        self.put(self.block.place_of(ids[is_own]), rows[is_own], slots, part_step)

    def begin(self, host: int, fills: Mapping[str, float], *, seed: int) -> None:
        """Sets all rows of a host, and their slots, to their initial values."""
        block, (first, end) = self.block, self._own(host)
        own = slice(first, end)
        self.updated[own] = 0
        self.arrays["steps"][host] = 0
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

    def _own(self, host: int) -> tuple[int, int]:
        """Returns the range of a host's rows: the first, and the end."""
        return host * self.block.held, (host + 1) * self.block.held


def cuts_of(places: np.ndarray, block: Block) -> np.ndarray:
    """Returns [hosts + 1] int64: where the places of each host begin, among sorted places [n]."""
    return np.append(np.searchsorted(places, block.first_places), len(places))


def sum_pushed(pushed: Sequence[Pushed], spans: Sequence[Span] | None = None) -> Pushed:
    """Returns all places that were pushed, sorted, and the sums of their gradients in the order of plan/spans.py.

    The bits of a sum depend on nothing else.

    Args:
        spans: the replicas that each push is the sum of; by default one each.
    """
    if len(pushed) == 1:
        return pushed[0]
    places, which = np.unique(np.concatenate([own for own, _ in pushed]), return_inverse=True)
    at = np.split(which, np.cumsum([len(own) for own, _ in pushed])[:-1])
    spans = spans or each_alone(len(pushed))
    parts: dict[Span, Any] = {span: (own, rows) for span, own, (_, rows) in zip(spans, at, pushed, strict=True)}

    def add(first: Any, rest: Any) -> np.ndarray:
        total: np.ndarray = first
        if isinstance(first, tuple):
            total = np.full((len(places), first[1].shape[1]), -0.0, np.float32)  # adding to it changes no bit
            total[first[0]] = first[1]
        if isinstance(rest, tuple):
            total[rest[0]] += rest[1]  # each place once
        else:
            total += rest
        return total

    return places, all_of(spans).sum(parts, add)


def _put(array: np.ndarray, places: np.ndarray, rows: np.ndarray) -> None:
    """Does array[places] = rows with whole records, which is much faster."""
    record = np.dtype((np.void, array.dtype.itemsize * array.shape[1]))
    np.put(array.view(record).ravel(), places, np.ascontiguousarray(rows).view(record).ravel())
