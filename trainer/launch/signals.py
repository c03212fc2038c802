"""Receives Ctrl-C, SIGTERM and the end of the terminal during a run."""

from __future__ import annotations

import math
import os
import signal
import time

SAME_SIGNAL_SECS = 1.0


class Signals:
    """Collects Ctrl-C, SIGTERM and SIGHUP: the first stops a run cleanly, the second at once."""

    def __init__(self) -> None:
        self.numbers: list[int] = []  # in the order received
        self._received_at = -math.inf

    def __enter__(self) -> Signals:
        handled = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            handled.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, lambda number, _: self.receive(number)) for number in handled}
        return self

    def receive(self, number: int) -> None:
        """Records a signal; a signal that a wrapper forwards again counts once."""
        now = time.monotonic()
        if number == signal.SIGHUP:
            discard_output()
        if now - self._received_at > SAME_SIGNAL_SECS:
            self.numbers.append(number)
        self._received_at = now

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def discard_output() -> None:
    """Discards all further output: the terminal has closed, and writing to it would fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(null, number)
