"""The values that rows begin with: a pure function of seed, table and row, so any host can make any row."""

import hashlib

import numpy as np

from trainer.plan.tables import Table

AT_ONCE = 2**16  # rows; what is computed on them fits a cache
GOLDEN, MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)  # of splitmix64 (Steele et al., 2014)
LAST_MIX = np.uint64(0x94D049BB133111EB)
MANTISSA_BITS = 24


def first_values(table: Table, rows: np.ndarray, *, seed: int) -> np.ndarray:
    """[n, width] float32: the first values of rows [n] int64 of a table, each number drawn for itself."""
    low, high = np.float32(table.first.low), np.float32(table.first.high)
    if low == high:
        return np.full((len(rows), table.width), low)
    key = int.from_bytes(hashlib.blake2b(f"{seed} {table.path}".encode(), digest_size=8).digest(), "little")
    values = np.empty((len(rows), table.width), np.float32)
    for begin in range(0, len(rows), AT_ONCE):
        numbers = rows[begin : begin + AT_ONCE, None].astype(np.uint64) * np.uint64(table.width)
        bits = _mixed(numbers + np.arange(table.width, dtype=np.uint64) + np.uint64(key))
        drawn = (bits >> np.uint64(64 - MANTISSA_BITS)).astype(np.float32) * np.float32(2.0**-MANTISSA_BITS)
        values[begin : begin + AT_ONCE] = low + drawn * (high - low)
    return values


def _mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64 of each number; it wraps around."""
    x = (x + np.uint64(1)) * GOLDEN
    x = (x ^ (x >> np.uint64(30))) * MIX
    x = (x ^ (x >> np.uint64(27))) * LAST_MIX
    return x ^ (x >> np.uint64(31))
