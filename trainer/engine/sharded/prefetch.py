"""A thread that brings what the next step needs while this one is still at work."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Prefetch:
    """Calls `bring` again and again; a call ends when what it brought has a place, so it is one ahead of its use."""

    def __init__(self, bring: Callable[[], None], *, fail: Callable[[], None]) -> None:
        """Describes it; `start` begins.

        Args:
            fail: called when `bring` has raised, so that nobody waits for what does not come.
        """
        self._bring, self._fail = bring, fail
        self._changed = threading.Condition()
        self._brought = self._used = 0
        self._error: Exception | None = None
        self.is_started = False

    def start(self) -> None:
        self.is_started = True
        threading.Thread(target=self._run, name="pull ahead", daemon=True).start()

    def use(self) -> None:
        """Tells that what a call brought was taken."""
        with self._changed:
            self._used += 1

    def wait(self) -> None:
        """Blocks until something is there that was not used.

        Raises:
            Exception: what `bring` raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._brought > self._used or self._error is not None)
        self.check()

    def check(self) -> None:
        """Raises what `bring` raised, if it has."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while self._error is None:
            error = None
            try:
                self._bring()
            except Exception as raised:
                error = raised
            with self._changed:
                self._brought, self._error = self._brought + (error is None), error
                self._changed.notify_all()
        self._fail()
