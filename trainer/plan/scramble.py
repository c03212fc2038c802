"""A permutation of 64-bit numbers that spreads near ones far apart: splitmix64 (Steele et al., 2014). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

GOLDEN, MIX, LAST_MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # odd, so each has an inverse


def scrambled(x: np.ndarray) -> np.ndarray:
    """Returns splitmix64 of each number [...] uint64; it wraps around."""
    x = (x + 1) * GOLDEN
    x = (x ^ (x >> 30)) * MIX
    x = (x ^ (x >> 27)) * LAST_MIX
    return x ^ (x >> 31)


def unscrambled(x: np.ndarray) -> np.ndarray:
    """Returns the numbers [...] uint64 that `scrambled` maps to these."""
    x = (x ^ (x >> 31) ^ (x >> 62)) * _inverse(LAST_MIX)
    x = (x ^ (x >> 27) ^ (x >> 54)) * _inverse(MIX)
    x = (x ^ (x >> 30) ^ (x >> 60)) * _inverse(GOLDEN)
    return x - 1


def _inverse(number: int) -> int:
    return pow(number, -1, 2**64)
