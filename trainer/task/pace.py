"""Measures how long steps take, and finds when an interval of steps has passed."""

import math
import time
from array import array
from collections.abc import MutableSequence
from dataclasses import dataclass, field

from trainer.engine.step_result import StepResult


@dataclass
class Pace:
    """Measures the steps of one replica, in seconds; the first one builds and compiles, and is ignored."""

    began: float = field(default_factory=time.monotonic)
    step_secs: MutableSequence[float] = field(default_factory=lambda: array("d"))
    wait_secs: MutableSequence[float] = field(default_factory=lambda: array("d"))  # of each, until parameters arrived
    start_steps: tuple[int, ...] = ()  # global steps that the first two of them, and the last, started from

    def __post_init__(self) -> None:
        self._total_secs, self._total_waited = sum(self.step_secs), sum(self.wait_secs)  # a run has many steps to sum

    def tick(self, result: StepResult) -> None:
        """Records the step that has just ended."""
        now = time.monotonic()
        self.step_secs.append(now - self.began)
        self._total_secs += now - self.began
        self.wait_secs.append(result.wait_secs)
        self._total_waited += result.wait_secs
        self.began = now
        self.start_steps = (*self.start_steps[:2], result.step)

    def percentile_ms(self, share: float) -> float:
        """Returns the shortest duration that `share` of the steps do not exceed (nearest rank), in milliseconds."""
        ordered = sorted(self.step_secs[1:] or self.step_secs) or [0.0]
        return 1000 * ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    def steps_per_second(self, last: int | None = None) -> float:
        """Returns the rate over the `last` steps, or over all."""
        recent = self.step_secs[max(1, len(self.step_secs) - last) if last else 1 :]
        return len(recent) / sum(recent) if recent else 0.0

    def updates_per_second(self) -> float:
        """Returns the updates per second of the whole run; without waiting, more than this worker's steps."""
        if not self.start_steps:
            return 0.0
        first = 1 if len(self.start_steps) > 2 else 0
        updates, secs = self.start_steps[-1] - self.start_steps[first], sum(self.step_secs[first:])
        return updates / secs if secs else 0.0

    def wait_fraction(self, last: int | None = None) -> float:
        """Returns the waiting share of the `last` steps, or of all, including the first."""
        if last is None:
            return self._total_waited / max(self._total_secs, 1e-9)
        return sum(self.wait_secs[-last:]) / max(sum(self.step_secs[-last:]), 1e-9)


class Every:
    """Finds when an interval of steps has passed.

    A multiple of the interval may never be seen itself: where workers do not wait for each other, the global step moves
    by more than one between two steps of one worker.
    """

    def __init__(self, interval: int, *, start: int) -> None:
        """Begins at a step; an interval of 0 never passes."""
        self._interval, self._passed = interval, start // interval if interval else 0

    def is_due(self, step: int) -> bool:
        """Whether a multiple of the interval was reached since the last call that returned True."""
        if not self._interval or step // self._interval <= self._passed:
            return False
        self._passed = step // self._interval
        return True
