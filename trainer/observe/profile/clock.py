"""Estimates the offset of this task's clock from the chief's, by the chief's status page. Pure, except `follow`."""

import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from trainer.observe.peers import try_status

POLLS = 20
POLL_EVERY_SECS = 0.5


class Offset(NamedTuple):
    """The seconds to add to a clock's times to get the chief's."""

    secs: float
    error_secs: float  # at most: the request and its answer may not have taken equally long

    @property
    def applied_secs(self) -> float:
        """Returns 0 if the two may be the same clock, as on one machine: an estimate would only add error."""
        return 0.0 if abs(self.secs) <= self.error_secs else self.secs


def estimate(asked_at: float, chief_at: float, answered_at: float) -> Offset:
    """Estimates from one request: when it was sent, the chief's time, and when the answer arrived (Unix times)."""
    return Offset(chief_at - (asked_at + answered_at) / 2, (answered_at - asked_at) / 2)


def best(offsets: Iterable[Offset]) -> Offset | None:
    """Returns the estimate with the smallest error."""
    return min(offsets, key=lambda offset: offset.error_secs, default=None)


def follow(control: str, report: Callable[[Offset], None]) -> None:
    """Polls the chief's page several times, and reports each estimate that is better than those before."""
    least_error_secs = math.inf
    for _ in range(POLLS):
        offset = _poll(control)
        if offset is not None and offset.error_secs < least_error_secs:
            least_error_secs = offset.error_secs
            report(offset)
        time.sleep(POLL_EVERY_SECS)


def _poll(control: str) -> Offset | None:
    asked_at = time.time()
    page = try_status(control, timeout_secs=1.0)
    return None if page is None else estimate(asked_at, page.now, time.time())
