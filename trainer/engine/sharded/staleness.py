"""Counts the gradients of each worker under async and backup: applied, dropped, and how stale. Pure.

A table [workers, COLUMNS] of integers: how many gradients were applied at staleness 0, 1, ..., BINS - 1 or more; then
the sum and the maximum staleness of those applied; then how many were dropped.
"""

import numpy as np
from numpy.typing import NDArray

from trainer.observe.task_page import Contributions

BINS = 32
TOTAL, MAXIMUM, DROPPED = BINS, BINS + 1, BINS + 2
COLUMNS = BINS + 3

Table = NDArray[np.int64]


def empty(workers: int) -> Table:
    return np.zeros([workers, COLUMNS], np.int64)


def add_applied(table: Table, worker: int, staleness: int) -> None:
    """Counts a gradient that was computed on parameters `staleness` steps old."""
    table[worker, min(staleness, BINS - 1)] += 1
    table[worker, TOTAL] += staleness
    table[worker, MAXIMUM] = max(table[worker, MAXIMUM], staleness)


def add_dropped(table: Table, worker: int) -> None:
    table[worker, DROPPED] += 1


def histogram(table: Table) -> Table:
    """Returns [workers, BINS] gradients applied, by staleness; the last bin counts everything at or above it."""
    return table[:, :BINS]


def to_json(table: Table) -> dict[str, Contributions]:
    """Returns counts by worker; a histogram's last bin has all above it too, and empty ones at its end are left out."""
    by_worker: dict[str, Contributions] = {}
    for worker, row in enumerate(table):
        applied = int(row[:BINS].sum())
        by_worker[f"worker:{worker}"] = {
            "applied": applied,
            "dropped": int(row[DROPPED]),
            "staleness_mean": round(int(row[TOTAL]) / applied, 3) if applied else None,
            "staleness_max": int(row[MAXIMUM]) if applied else None,
            "staleness_histogram": np.trim_zeros(row[:BINS], "b").tolist(),
        }
    return by_worker
