"""Notices workers that are much slower than the others."""

from collections.abc import Mapping
from statistics import median

from trainer.observe.task_page import TaskPage, TaskState

SLOW_TIMES = 3.0  # a slow worker computes at least this many times as long as the others
SLOW_SECS = 10.0  # it is reported when it has been slow for this long


class SlowWorkers:
    """Tracks the computing time of workers, with monotonic times that are passed in."""

    def __init__(self, consequence: str) -> None:
        self._consequence = consequence
        self._slow_since: dict[str, float] = {}  # by worker
        self._reported: set[str] = set()

    def poll(self, pages: Mapping[str, TaskPage], now: float) -> list[str]:
        """Returns a sentence for each worker that has become slow, once until it is as fast as the others again.

        Args:
            pages: status page by task name; a task that does not answer has none.
        """
        times = times_as_slow(pages)
        slow = {name for name, factor in times.items() if factor >= SLOW_TIMES}
        self._slow_since = {name: self._slow_since.get(name, now) for name in slow}
        self._reported &= slow
        due = sorted(name for name in slow - self._reported if now - self._slow_since[name] >= SLOW_SECS)
        self._reported |= set(due)
        return [
            f"{name} is slow: it takes {times[name]:.1f} times as long to compute as the other workers; "
            f"{self._consequence}"
            for name in due
        ]


def times_as_slow(pages: Mapping[str, TaskPage]) -> dict[str, float]:
    """Returns by training worker its time to compute an example, as a multiple of the others' median."""
    computes = {
        name: (1 - page.wait_fraction) / page.examples_per_second
        for name, page in pages.items()
        if name.startswith("worker") and page.state is TaskState.training and page.examples_per_second > 0
    }
    times = {}
    for name, own in computes.items():
        others = [secs for other, secs in computes.items() if other != name]
        if others and median(others) > 0:
            times[name] = own / median(others)
    return times
