"""Whether a step takes too long, and whom it waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

STALL_SECS = 5.0  # from then on it is asked who is missing
MEDIANS = 20
RECENT_STEPS = 21
REPORT_EVERY_SECS = 30.0


class Stall:
    """Follows the steps of one task; the clock is passed in, seconds that only rise."""

    def __init__(self, *, limit_secs: float, now: float) -> None:
        """Begins.

        Args:
            limit_secs: a step that takes longer, and longer than 20 medians, is stuck.
        """
        self._limit_secs, self._moved_at, self._told_at = limit_secs, now, now
        self._step: int | None = None
        self._secs: deque[float] = deque(maxlen=RECENT_STEPS)

    def look(self, step: int, now: float) -> float:
        """Seconds since the step was last seen to have moved."""
        if step != self._step:
            if self._step is not None and step > self._step:
                self._secs.append((now - self._moved_at) / (step - self._step))
            self._step, self._moved_at, self._told_at = step, now, now
        return now - self._moved_at

    def is_stuck(self, now: float) -> bool:
        limit = max(self._limit_secs, MEDIANS * median(self._secs)) if self._secs else self._limit_secs
        return now - self._moved_at > limit

    def is_due(self, now: float) -> bool:
        """Whether to say so again."""
        if now - self._told_at < REPORT_EVERY_SECS:
            return False
        self._told_at = now
        return True


def describe(
    step: int,
    stalled_secs: float,
    workers: Sequence[str],
    missing: Sequence[str],
    seen: Mapping[str, tuple[int, float]],
) -> str:
    """What a step waits for.

    Args:
        workers: all that it needs.
        missing: those that have not pushed.
        seen: by worker, the step it was at and how many seconds ago that was heard.
    """
    have = [name.partition(":")[2] for name in workers if name not in missing]
    told = []
    for name in missing:
        last = f" (last seen at step {seen[name][0]}, {seen[name][1]:.0f} s ago)" if name in seen else ""
        told.append(f"{name}{last}")
    return (
        f"step {step} waits {stalled_secs:.0f} s: have replicas {' '.join(have) or 'none'}, missing {', '.join(told)}"
    )
