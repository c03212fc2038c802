"""Computes initial values of rows: a pure function of seed, table and row, so any host can make any row."""

import numpy as np

from trainer.plan.scramble import scrambled
from trainer.plan.tables import Table, first_key

AT_ONCE = 2**16  # rows; what is computed on them fits a cache
MANTISSA_BITS = 24


def first_values(table: Table, rows: np.ndarray, *, seed: int) -> np.ndarray:
    """Returns [n, width] float32: the initial values of rows [n] int64 of a table, each number drawn separately."""
    low, high = np.float32(table.first.low), np.float32(table.first.high)
    if low == high:
        return np.full((len(rows), table.width), low)
    key = first_key(table.path, seed)
    values = np.empty((len(rows), table.width), np.float32)
    for begin in range(0, len(rows), AT_ONCE):
        numbers = rows[begin : begin + AT_ONCE, None].astype(np.uint64) * np.uint64(table.width)
        bits = scrambled(numbers + np.arange(table.width, dtype=np.uint64) + np.uint64(key))
        drawn = (bits >> np.uint64(64 - MANTISSA_BITS)).astype(np.float32) * np.float32(2.0**-MANTISSA_BITS)
        values[begin : begin + AT_ONCE] = low + drawn * (high - low)
    return values
