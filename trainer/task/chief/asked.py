"""What the chief does because another command asks for it: saves a checkpoint, or tells parameters."""

import logging
import math
import time

from trainer.engine.vectors.snapshot import Snapshot
from trainer.storage import questions, requests
from trainer.storage.requests import Request
from trainer.storage.run_directory import RunDirectory
from trainer.task.pace import Every

EVERY_SECS = 0.25  # between two looks

_log = logging.getLogger(__name__)


class _Looks:
    """Limits how often the disk is looked at."""

    def __init__(self) -> None:
        self._looked_at = -math.inf  # monotonic, seconds

    def is_time(self) -> bool:
        now = time.monotonic()
        if now - self._looked_at < EVERY_SECS:
            return False
        self._looked_at = now
        return True


class SaveDue:
    """Finds when to save: after every interval of steps, and when another command asks for it."""

    def __init__(self, every: Every, directory: RunDirectory) -> None:
        self._every, self._directory, self._looks = every, directory, _Looks()

    def is_due(self, step: int) -> bool:
        """Whether either is so since the last call that returned True."""
        is_asked = self._looks.is_time() and requests.take(self._directory, Request.save)
        return self._every.is_due(step) or is_asked


class Questions:
    """Tells parameters, state and slots to other commands that wait for them."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory, self._looks = directory, _Looks()
        self._seen: set[str] = set()  # a question that cannot be removed is answered once

    def is_due(self, step: int) -> bool:
        """Whether somebody waits."""
        return self._looks.is_time() and bool(set(questions.pending(self._directory)) - self._seen)

    def answer(self, snapshot: Snapshot) -> None:
        """Answers every question from a snapshot; one that cannot be answered does not disturb the run."""
        slots = {
            f"{questions.SLOTS}{slot}/{path}": value
            for slot, one in snapshot.slots.items()
            for path, value in one.items()
        }
        for name in set(questions.pending(self._directory)) - self._seen:
            self._seen.add(name)
            try:
                questions.answer(
                    self._directory, name, snapshot.step, {**snapshot.parameters, **snapshot.state, **slots}
                )
            except (OSError, ValueError, TypeError) as error:
                _log.warning("a question for parameters was not answered: %s", error)
