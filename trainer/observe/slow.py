"""Tells which worker is much slower than the others."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

SLOW_TIMES = 3.0  # as long as the others
SLOW_SECS = 10.0  # for so long, before it is told


class Slow:
    """Follows how long the workers compute; the clock is passed in, seconds that only rise."""

    def __init__(self, consequence: str) -> None:
        self._consequence = consequence
        self._since: dict[str, float] = {}  # by worker that is slow
        self._told: set[str] = set()

    def look(self, pages: Mapping[str, Mapping[str, Any]], now: float) -> list[str]:
        """A sentence for each worker that has been slow for long enough, once until it is as fast as the others again.

        Args:
            pages: status page by task name; a task that does not answer has none.
        """
        times = times_as_slow(pages)
        slow = {name for name, factor in times.items() if factor >= SLOW_TIMES}
        self._since = {name: self._since.get(name, now) for name in slow}
        self._told &= slow
        due = sorted(name for name in slow - self._told if now - self._since[name] >= SLOW_SECS)
        self._told |= set(due)
        return [
            f"{name} is slow: it computes {times[name]:.1f} times as long as the other workers; {self._consequence}"
            for name in due
        ]


def times_as_slow(pages: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """By worker that trains, how many times as long as the others (median) it computes for an example."""
    computes = {
        name: (1 - page["wait_fraction"]) / page["examples_per_second"]
        for name, page in pages.items()
        if name.startswith("worker") and page["state"] == "training" and page["examples_per_second"] > 0
    }
    times = {}
    for name, own in computes.items():
        others = [secs for other, secs in computes.items() if other != name]
        if others and median(others) > 0:
            times[name] = own / median(others)
    return times
