"""Sums squares exactly and rounds once, so that sums do not depend on how rows are distributed.

A float64 is a whole number of 53 bits times a power of two. The whole numbers are summed for each power, in two halves
so that no sum of them overflows; sums of sums are exact, too.
"""

import math

import numpy as np

from trainer.plan.table_layout import POWERS

LOWEST = -320  # exponent; squares of float32 numbers, and their sums, have exponents from -298 to 280
BITS, LOW_BITS = 53, 27


def square_sums(rows: np.ndarray) -> np.ndarray:
    """Returns [HALVES, POWERS] int64: the exact sum of the squares of each row of [n, width] float32."""
    squares = np.square(rows, dtype=np.float64)
    sums = np.zeros(len(rows))
    for column in range(rows.shape[1]):  # each row alone, in this order
        sums += squares[:, column]
    mantissas, exponents = np.frexp(sums)
    numbers = np.ldexp(mantissas, BITS).astype(np.int64)
    at = exponents - LOWEST
    halves = (numbers >> LOW_BITS, numbers & ((1 << LOW_BITS) - 1))
    return np.stack([np.bincount(at, weights=one, minlength=POWERS)[:POWERS].astype(np.int64) for one in halves])


def total(sums: np.ndarray) -> np.float32:
    """Returns the sum of several `square_sums` [k, HALVES, POWERS], rounded."""
    high, low = (one.tolist() for one in sums.sum(axis=0))
    numbers = [(upper << LOW_BITS) + lower for upper, lower in zip(high, low, strict=True)]
    whole = sum(number << power for power, number in enumerate(numbers))
    return np.float32(math.ldexp(float(whole), LOWEST - BITS)) if whole else np.float32(0)
