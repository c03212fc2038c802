"""Runs work in another thread, so that it can be abandoned while it blocks."""

import threading
from collections.abc import Callable

POLL_SECS = 0.2


class AbandonedError(Exception):
    """The task was asked to stop before its work was done."""


def run_beside(work: Callable[[], None], may_go_on: Callable[[], bool]) -> None:
    """Runs work in a separate thread, and raises what it raises.

    Raises:
        AbandonedError: as soon as the work may not continue; its thread is left running, and ends with the process.
    """
    errors: list[BaseException] = []
    is_done = threading.Event()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
        finally:
            is_done.set()

    threading.Thread(target=run, name="beside", daemon=True).start()
    while not is_done.wait(POLL_SECS):
        if not may_go_on():
            raise AbandonedError
    if errors:
        raise errors[0]
