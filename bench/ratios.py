"""The ratio of two rates from windows that alternate, and how sure it is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios and its bootstrap interval of 95 %."""

    median: float
    low: float
    high: float


def paired(ours: Sequence[float], other: Sequence[float]) -> list[float]:
    """Returns the ratio of each two neighbouring windows: whatever slows the machine for a while slows both.

    Args:
        ours, other: rates of windows, in the order in which they were measured.
    """
    return [a / b for a, b in zip(ours, other, strict=True)]


def ratio(pairs: Sequence[float], seed: int = 0) -> Ratio:
    """Returns the median of ratios, with the percentile interval of Efron's bootstrap.

    Raises:
        ValueError: if there are none.
    """
    if not pairs:
        raise ValueError("there is no pair of windows to take a ratio of")
    random = Random(seed)
    medians = sorted(median(random.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    tail = round((1 - CONFIDENCE) / 2 * RESAMPLES)
    return Ratio(median(pairs), medians[tail], medians[-1 - tail])
