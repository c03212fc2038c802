"""How far the clock of this task is from the chief's, by the chief's status page. Pure, but for `follow`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from trainer.observe.peers import read_status

LOOKS = 20
LOOK_EVERY_SECS = 0.5


class Offset(NamedTuple):
    """What to add to the times of a clock to have the chief's."""

    secs: float
    error_secs: float  # at most; the request and its answer may not have taken equally long

    @property
    def applied_secs(self) -> float:
        """0 where the two may be the same clock, as on one machine: an estimate would only blur it."""
        return 0.0 if abs(self.secs) <= self.error_secs else self.secs


def estimate(asked_at: float, chief_at: float, answered_at: float) -> Offset:
    """From one request: when it was sent, what the chief's clock said, when its answer was here (Unix times)."""
    return Offset(chief_at - (asked_at + answered_at) / 2, (answered_at - asked_at) / 2)


def best(offsets: Iterable[Offset]) -> Offset | None:
    """The one with the least error."""
    return min(offsets, key=lambda offset: offset.error_secs, default=None)


def follow(control: str, tell: Callable[[Offset], None]) -> None:
    """Asks the chief's page some times, and tells each estimate that is better than those before."""
    least_error_secs = math.inf
    for _ in range(LOOKS):
        offset = _ask(control)
        if offset is not None and offset.error_secs < least_error_secs:
            least_error_secs = offset.error_secs
            tell(offset)
        time.sleep(LOOK_EVERY_SECS)


def _ask(control: str) -> Offset | None:
    asked_at = time.time()
    try:
        page = read_status(control, timeout_secs=1.0)
    except (OSError, ValueError):  # busy, or gone
        return None
    return estimate(asked_at, page["now"], time.time())
