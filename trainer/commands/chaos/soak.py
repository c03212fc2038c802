"""A long run under random faults: schedules them, and detects tasks that leak memory or open files."""

import os
from collections.abc import Callable, Sequence
from statistics import median

from trainer.commands.chaos.schedule import Fault
from trainer.config.words import size
from trainer.launch.fault_hooks import RunView

STEPS = 10**9  # the time decides
SAMPLE_SECS = 1.0
SAMPLES_AT_LEAST = 30  # of a task's longest attempt; fewer say nothing
MEMORY_SHARE, MEMORY_BYTES = 0.1, 16 * 2**20  # that it may grow by, together
FILES = 8
PATIENCE_SECS = 120.0  # at the end, for a run that has not recovered


class Timed:
    """Injects a random fault at intervals, and at the end a SIGTERM to one task, after which all save and exit."""

    def __init__(self, draw: Callable[[int], Fault], last: str, *, every_secs: float, secs: float) -> None:
        """Draws a fault every `every_secs`, or once the run has recovered; after `secs`, `last` gets a SIGTERM."""
        self._draw, self._last, self._every_secs, self._secs = draw, last, every_secs, secs
        self._next_at = self._end_at = 0.0
        self._has_begun = self.has_ended = False

    def due(self, step: int, now: float, *, is_quiet: bool) -> Sequence[Fault]:
        if not self._has_begun:
            self._has_begun = step > 0
            self._next_at, self._end_at = now + self._every_secs, now + self._secs
        elif now >= self._end_at and not self.has_ended and (is_quiet or now >= self._end_at + PATIENCE_SECS):
            self.has_ended = True
            return [Fault("term", self._last, (self._last,), step)]
        elif self._next_at <= now < self._end_at and is_quiet:
            self._next_at = now + self._every_secs
            return [self._draw(step)]
        return []


class Resources:
    """Memory and open files of every attempt of every task."""

    def __init__(self, count_files: Callable[[int], int] | None = None) -> None:
        self._count_files = count_files or _count_files
        self._samples: dict[tuple[str, int], list[tuple[int, int]]] = {}  # by task and pid
        self._next_at = 0.0

    def poll(self, seen: RunView) -> None:
        if seen.now < self._next_at:
            return
        self._next_at = seen.now + SAMPLE_SECS
        for task, page in seen.pages.items():
            if page.state.is_at_work and task in seen.pids:
                sample = page.memory_bytes, self._count_files(seen.pids[task])
                self._samples.setdefault((task, seen.pids[task]), []).append(sample)

    def growth(self) -> list[str]:
        """Describes the tasks that held more in the last third of their longest attempt than in the first."""
        longest: dict[str, list[tuple[int, int]]] = {}
        for (task, _), samples in self._samples.items():
            longest[task] = max(longest.get(task, []), samples, key=len)
        return [problem for task, samples in longest.items() for problem in _growth(task, samples)]


def _growth(task: str, samples: Sequence[tuple[int, int]]) -> list[str]:
    if len(samples) < SAMPLES_AT_LEAST:
        return []
    third = len(samples) // 3
    (memory, files), (later, more) = (
        (median(m for m, _ in part), median(f for _, f in part)) for part in (samples[:third], samples[-third:])
    )
    problems = []
    if later > memory * (1 + MEMORY_SHARE) + MEMORY_BYTES:
        problems.append(f"{task} grew from {size(memory)} to {size(later)} within {len(samples)} s")
    if more > files + FILES:
        problems.append(f"{task} had {files:.0f} open files, later {more:.0f}")
    return problems


def _count_files(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # it has just ended, or the system has no /proc
        return 0
