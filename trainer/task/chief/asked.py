"""What the chief does because another command asks for it: saves a checkpoint, or tells parameters."""

import math
import time
from collections.abc import Callable

from trainer.engine.vectors.snapshot import Snapshot
from trainer.storage import questions, requests
from trainer.storage.requests import Request
from trainer.storage.run_directory import RunDirectory
from trainer.task.pace import Every

EVERY_SECS = 0.25  # between two looks


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


class QuestionsDue:
    """Finds whether another command waits for parameters."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory, self._looks = directory, _Looks()

    def is_due(self, step: int) -> bool:
        return self._looks.is_time() and questions.are_pending(self._directory)


def answer_questions(directory: RunDirectory) -> Callable[[Snapshot], None]:
    """An action that gives the parameters, the state and the slots of a snapshot to those who wait for some."""

    def answer(snapshot: Snapshot) -> None:
        slots = {
            f"{questions.SLOTS}{slot}/{path}": value
            for slot, one in snapshot.slots.items()
            for path, value in one.items()
        }
        questions.answer_all(directory, snapshot.step, {**snapshot.parameters, **snapshot.state, **slots})

    return answer
