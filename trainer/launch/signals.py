"""Ctrl-C, SIGTERM and the end of the terminal, while a run goes."""

from __future__ import annotations

import math
import os
import signal
import time
from types import TracebackType

SAME_SIGNAL_SECS = 1.0


class Signals:
    """Ctrl-C, SIGTERM and the end of the terminal while a run goes: the first stops it cleanly, the second at once."""

    def __init__(self) -> None:
        self.numbers: list[int] = []  # as they came
        self._heard_at = -math.inf

    def __enter__(self) -> Signals:
        heard = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            heard.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, lambda received, _: self._hear(received)) for number in heard}
        return self

    def _hear(self, number: int) -> None:
        """Takes one Ctrl-C for one, also where a wrapper forwards it a second time."""
        now = time.monotonic()
        if number == signal.SIGHUP:
            _let_go_of_terminal()
        if now - self._heard_at > SAME_SIGNAL_SECS:
            self.numbers.append(number)
        self._heard_at = now

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _let_go_of_terminal() -> None:
    """Sends what is said from now on nowhere: where it went is gone, and writing there would fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
