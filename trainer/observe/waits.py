"""Measures who waits for whom: the seconds that each worker has waited, by cause. Pure; times are passed in."""

import heapq
from collections import defaultdict
from collections.abc import Mapping, Set

from trainer.observe.task_page import TaskPage, TaskState

OTHERS = "others"  # workers that little was waited for, together
MOST_AWAITED = 16  # workers with a separate number: a table of all grows with their square
UPDATE = "update"  # what a worker waits for where it waits for no other worker: the update itself, and messages
AT_MOST_SECS = 5.0  # between two polls; a launcher that was frozen itself has seen nothing of that time


class Waits:
    """Adds up how long the workers of a run wait for each other.

    A worker's page gives the share of its step that it waits. The others wait for the worker that waits least: the
    time that they wait longer counts as waiting for that worker, the rest as waiting for the update. While a step
    stalls, the workers that have pushed wait for the missing ones.
    """

    def __init__(self, *, for_all: bool) -> None:
        """Starts with no waiting time.

        Args:
            for_all: whether every update waits for all workers; else no worker waits for another.
        """
        self._for_all = for_all
        self._polled_at: float | None = None
        self._secs: dict[str, dict[str, float]] = {}  # by worker that waits, and by what it waits for
        self._totals: defaultdict[str, float] = defaultdict(float)  # by worker that waits
        self._awaited: defaultdict[str, float] = defaultdict(float)  # by what was waited for

    def poll(self, pages: Mapping[str, TaskPage], now: float) -> None:
        """Adds the time since the last call.

        Args:
            pages: status page by task name.
            now: monotonic seconds.
        """
        secs = 0.0 if self._polled_at is None else min(now - self._polled_at, AT_MOST_SECS)
        self._polled_at = now
        training = {
            name: page for name, page in pages.items() if page.job == "worker" and page.state is TaskState.training
        }
        missing = {name for page in pages.values() if page.stalled_secs > 0 for name in page.missing}
        if missing:
            for name in training.keys() - missing:
                for other in missing:
                    self._add(name, other, secs / len(missing))
            return
        shares = {name: page.wait_fraction for name, page in training.items() if page.steps > 0}
        if not shares:
            return
        slowest = min(shares, key=lambda name: shares[name])
        common = shares[slowest]
        for name, share in shares.items():
            if self._for_all and name != slowest:
                self._add(name, slowest, (share - common) * secs)
                share = common
            self._add(name, UPDATE, share * secs)

    def _add(self, worker: str, waited_for: str, secs: float) -> None:
        row = self._secs.setdefault(worker, {})
        row[waited_for] = row.get(waited_for, 0.0) + secs
        self._totals[worker] += secs
        self._awaited[waited_for] += secs

    def to_json(self) -> dict[str, dict[str, float]]:
        """Returns seconds by waiting worker and by cause: a worker, "others" for all the rest, or "update"."""
        named = {UPDATE, *heapq.nlargest(MOST_AWAITED + 1, self._awaited, key=lambda name: self._awaited[name])}
        return {worker: self._row(worker, named) for worker in sorted(self._secs)}

    def _row(self, worker: str, named: Set[str]) -> dict[str, float]:
        secs = self._secs[worker]
        row = {name: secs[name] for name in sorted(named & secs.keys())}
        if len(self._awaited) > len(named):
            row[OTHERS] = max(0.0, self._totals[worker] - sum(row.values()))
        return {name: round(value, 3) for name, value in row.items()}
