"""Notices that a step takes too long, and describes which workers it waits for."""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

STALL_SECS = 5.0  # a step that takes longer asks which workers are missing
MEDIANS = 20
RECENT_STEPS = 21
REPORT_EVERY_SECS = 30.0


class Stall:
    """Tracks the steps of one task, with monotonic times that are passed in."""

    def __init__(self, *, limit_secs: float, now: float) -> None:
        """Starts at step None.

        Args:
            limit_secs: a step that takes longer, and longer than 20 medians, is stuck.
        """
        self._limit_secs, self._moved_at, self._reported_at = limit_secs, now, now
        self._step: int | None = None
        self._secs: deque[float] = deque(maxlen=RECENT_STEPS)

    def poll(self, step: int, now: float) -> float:
        """Records the current step; returns the seconds since it last changed."""
        if step != self._step:
            if self._step is not None and step > self._step:
                self._secs.append((now - self._moved_at) / (step - self._step))
            self._step, self._moved_at, self._reported_at = step, now, now
        return now - self._moved_at

    def is_stuck(self, now: float) -> bool:
        limit = max(self._limit_secs, MEDIANS * median(self._secs)) if self._secs else self._limit_secs
        return now - self._moved_at > limit

    def is_due(self, now: float) -> bool:
        """Whether to report the stall, at most every 30 s."""
        if now - self._reported_at < REPORT_EVERY_SECS:
            return False
        self._reported_at = now
        return True


def describe(
    step: int,
    stalled_secs: float,
    workers: Sequence[str],
    missing: Sequence[str],
    last_steps: Mapping[str, tuple[int, float]],
) -> str:
    """Describes which workers a step waits for, and which have pushed.

    Args:
        workers: all that the step needs.
        missing: those that have not pushed.
        last_steps: by worker, its last known step and how many seconds ago it reported it.
    """
    waits_for = [
        f"{name} (at step {last_steps[name][0]} {last_steps[name][1]:.0f} s ago)" if name in last_steps else name
        for name in missing
    ]
    pushed = [name.partition(":")[2] for name in workers if name not in missing]
    if not pushed:
        who = "no worker has pushed"
    elif len(pushed) == 1:
        who = f"worker {pushed[0]} has pushed"
    else:
        who = f"workers {', '.join(pushed)} have pushed"
    return f"step {step} has waited {stalled_secs:.0f} s for {', '.join(waits_for)}; {who}"
