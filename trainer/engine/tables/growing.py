"""The arrays of a growing table: it has a row for each id that has appeared, and any int64 is an id.

A host gives rows to ids in the order in which they appear, and finds them by an index with open addressing and linear
probing (Knuth, The Art of Computer Programming, volume 3, algorithm 6.4 L). Nothing that is computed depends on which
row an id has. An id without a row has its first values, which follow from the seed. So has an id that was not seen for
`max_age` steps, even if its row is still there: rows are taken back in a sweep, when a host has no other, and when that
happens changes nothing.

A worker that joins may read while a host updates. A new row has its place before the index leads to it; a row that is
touched is among `before_*`; and a read during which a sweep began or ended is repeated.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from trainer.engine.tables.first_values import first_values
from trainer.engine.tables.memory import NO_TAG, BlockMemory, OnEvict
from trainer.engine.vectors.packing import GENERATION_STRIDE
from trainer.plan.tables import COUNT, UPDATED, Growing, GrowingBlock
from trainer.workload.data.errors import DataError

NO_ROW = -1
MOST = 2**31 - 1  # that are counted
ALMOST_FULL = 0.9
WAIT_SECS = 0.001  # for the end of a sweep

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GrowingMemory(BlockMemory):
    """The arrays of a growing table."""

    block: GrowingBlock
    free: dict[int, np.ndarray] = field(default_factory=dict)  # by host: rows that sweeps have freed

    @property
    def growing(self) -> Growing:
        assert self.block.growing is not None
        return self.block.growing

    def read(self, places: np.ndarray, tag: int = NO_TAG) -> np.ndarray:
        sweeps = self.arrays["sweeps"]
        while True:
            before = sweeps.copy()
            rows = super().read(places, tag)
            if not (before % 2).any() and np.array_equal(before, sweeps):
                return rows
            time.sleep(WAIT_SECS)

    def find(self, places: np.ndarray) -> np.ndarray:
        rows = self._rows_of(places)
        return rows[rows != NO_ROW]

    def take_up(
        self, host: int, places: np.ndarray, step: int, fills: Mapping[str, float], on_evict: OnEvict
    ) -> tuple[np.ndarray, np.ndarray]:
        rows = self._rows_of(places)
        known = np.flatnonzero(rows != NO_ROW)
        begins_anew = known[self._is_too_old(rows[known], step)]
        self.updated[rows[known]] = step + 1  # so that a sweep leaves them
        new = np.flatnonzero(rows == NO_ROW)
        rows[new] = self._enter(host, places[new], step, on_evict)
        fresh = rows[np.concatenate([begins_anew, new])]
        self._begin_rows(fresh, fills)
        self.updated[fresh] = step + 1
        counts = np.minimum(self.arrays[COUNT][rows], MOST - 1) + 1
        self.arrays[COUNT][rows] = counts
        return rows, counts >= self.growing.min_count

    def places_at(self, rows: np.ndarray) -> np.ndarray:
        return np.take(self.arrays["place"], rows)

    def changed_after(self, step: int, host: int | None = None) -> np.ndarray:
        found = []
        for begin, end in (self._used(one) for one in ([*self._hosts()] if host is None else [host])):
            is_changed = (self.updated[begin:end] > step) & (self.arrays[COUNT][begin:end] > 0)
            found.append(begin + np.flatnonzero(is_changed))
        return np.concatenate(found)

    def saved_at(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        own = {COUNT: self.arrays[COUNT], UPDATED: self.updated}
        return super().saved_at(rows) | {name: np.take(values, rows)[:, None] for name, values in own.items()}

    def trained(self) -> np.ndarray:
        """Returns [n] the rows that were trained and are not evicted."""
        found = []
        for host in self._hosts():
            begin, end = self._used(host)
            rows = begin + np.flatnonzero(self.arrays[COUNT][begin:end] >= self.growing.min_count)
            found.append(rows[~self._is_too_old(rows, int(self.arrays["steps"][host]))])
        return np.concatenate(found)

    def load(
        self, host: int, ids: np.ndarray, rows: np.ndarray, saved: Mapping[str, np.ndarray], part_step: int, step: int
    ) -> None:
        places = self.block.place_of(ids)
        is_own = (self._hosts_of(places) == host) & ~self.growing.is_evicted(saved[UPDATED][:, 0], step)
        places = places[is_own]
        at = self._rows_of(places)
        new = np.flatnonzero(at == NO_ROW)
        at[new] = self._enter(host, places[new], step, lambda _: None)
        slots = {name: values[is_own] for name, values in saved.items() if name in self.slots}
        self.put(at, rows[is_own], slots, part_step)
        self.arrays[COUNT][at] = saved[COUNT][is_own, 0]
        self.updated[at] = saved[UPDATED][is_own, 0]

    def begin(self, host: int, fills: Mapping[str, float], *, seed: int) -> None:
        """Removes all rows of a host."""
        begin, end = self._used(host)
        if end > begin:
            self.arrays[COUNT][begin:end] = 0
            self.arrays["index"][host] = 0
        self.free.pop(host, None)
        for name, value in {"used": 0, "sweeps": 0, "seed": seed, "steps": 0, "before_tag": -1}.items():
            self.arrays[name][host] = value

    def values(self, places: np.ndarray, tag: int) -> np.ndarray:
        steps = self.arrays["steps"][self._hosts_of(places)]  # first: a later one would belong to later rows
        at = self._rows_of(places)
        rows = np.take(self.rows, at, axis=0, mode="clip")
        step = steps if tag == NO_TAG else tag % GENERATION_STRIDE
        missing = np.flatnonzero((at == NO_ROW) | self._is_too_old(at, step))
        if len(missing):
            ids = self.block.row_at(places[missing])
            rows[missing] = self._first_values(ids)
        return rows

    def _is_too_old(self, rows: np.ndarray, step: int | np.ndarray) -> np.ndarray:
        """Returns [n] bool: whether each row is evicted at a step."""
        return self.growing.is_evicted(np.take(self.updated, rows, mode="clip"), step)

    def _rows_of(self, places: np.ndarray) -> np.ndarray:
        """Returns [n] the row of each place, or NO_ROW."""
        found = np.full(len(places), NO_ROW)
        hosts, index, own = self._hosts_of(places), self.arrays["index"], self.arrays["place"]
        rest = np.arange(len(places))
        for entries in self._entries(places):
            numbers = index[hosts[rest], entries[rest]].astype(np.int64)
            rest, numbers = rest[numbers > 0], numbers[numbers > 0]
            rows = hosts[rest] * self.block.held + numbers - 1
            is_same = own[rows] == places[rest]
            found[rest[is_same]] = rows[is_same]
            rest = rest[~is_same]
            if not len(rest):
                break
        return found

    def _entries(self, places: np.ndarray) -> Iterator[np.ndarray]:
        """Yields [n] the entries of its host's index where a place may be, one after the other."""
        mask = self.block.index_size - 1
        entries = places & mask
        while True:
            yield entries
            entries = (entries + 1) & mask

    def _enter(self, host: int, places: np.ndarray, step: int, on_evict: OnEvict) -> np.ndarray:
        """Returns [n] rows for places [n] that have none."""
        if not len(places):
            return np.zeros(0, np.int64)
        (begin, end), held = self._used(host), self.block.held
        free = self.free.get(host, np.zeros(0, np.int64))
        if len(places) > len(free) + begin + held - end:
            free = self._sweep(host, step, on_evict)
        from_end = max(0, len(places) - len(free))
        if end + from_end > begin + held:
            raise DataError(self._full())
        rows = np.concatenate([free[: len(places) - from_end], np.arange(end, end + from_end)])
        self.free[host] = free[len(places) - from_end :]
        self.arrays["used"][host] += from_end
        if end - begin < ALMOST_FULL * held <= end - begin + from_end and self.growing.max_age is None:
            path, count = self.block.tables[0].path, end - begin + from_end
            _log.warning("%s is almost full: %d of %d rows are in use on this host", path, count, held)
        self.arrays["place"][rows] = places
        self._index(host, rows)
        return rows

    def _index(self, host: int, rows: np.ndarray) -> None:
        """Enters rows into the index, which must not have their places yet."""
        index, begin = self.arrays["index"][host], host * self.block.held
        rest = np.arange(len(rows))
        for entries in self._entries(self.places_at(rows)):
            is_free = index[entries[rest]] == 0
            wanted, first = np.unique(entries[rest[is_free]], return_index=True)
            entered = rest[is_free][first]
            index[wanted] = rows[entered] - begin + 1
            rest = np.setdiff1d(rest, entered, assume_unique=True)
            if not len(rest):
                return

    def _sweep(self, host: int, step: int, on_evict: OnEvict) -> np.ndarray:
        """Reclaims the rows of a host that are evicted at a step; returns all free rows."""
        begin, end = self._used(host)
        rows = begin + np.flatnonzero(self.arrays[COUNT][begin:end] > 0)
        evicted = rows[self._is_too_old(rows, step)]
        if not len(evicted):
            return self.free.get(host, np.zeros(0, np.int64))
        on_evict(evicted)
        self.arrays["sweeps"][host] += 1
        self.arrays[COUNT][evicted] = 0
        self.arrays["index"][host] = 0
        is_free = self.arrays[COUNT][begin:end] == 0
        self._index(host, begin + np.flatnonzero(~is_free))
        self.arrays["sweeps"][host] += 1
        return begin + np.flatnonzero(is_free)

    def _full(self) -> str:
        path, pattern = self.block.tables[0].path, self.block.tables[0].path.rpartition("/")[0]
        text = f"table {path} is full: all {self.block.rows:,} rows are in use; give its layer more with "
        return f"{text}placement.growing={{{pattern}:{2 * self.block.rows}}}, or evict rows with placement.max_age"

    def _begin_rows(self, rows: np.ndarray, fills: Mapping[str, float]) -> None:
        ids = self.block.row_at(self.places_at(rows))
        self.rows[rows] = self._first_values(ids)
        self.arrays[COUNT][rows] = 0
        for name, fill in fills.items():
            self.slots[name][rows] = fill

    def _first_values(self, ids: np.ndarray) -> np.ndarray:
        seed = self.arrays["seed"].max()  # those of other hosts may be in other memory, and are 0 here
        return first_values(self.block.tables[0], ids, seed=int(seed))

    def _hosts(self) -> range:
        return range(self.block.hosts)

    def _hosts_of(self, places: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.block.first_places[1:], places, side="right")

    def _used(self, host: int) -> tuple[int, int]:
        """Returns the first row of a host, and the end of the rows that were ever taken."""
        begin, _ = self._own(host)
        return begin, begin + int(self.arrays["used"][host])
