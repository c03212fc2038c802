"""Reads the requests of other commands to the chief: to save a checkpoint, or to send parameters."""

import logging
import math
import time

from trainer.engine.vectors.snapshot import Snapshot
from trainer.storage import questions, requests
from trainer.storage.requests import Request
from trainer.storage.run_directory import RunDirectory

EVERY_SECS = 0.25  # between two looks at the disk

_log = logging.getLogger(__name__)


class Mailbox:
    """The requests and questions of other commands, read a few times a second."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._names: set[str] = set()  # of files, when they were read last
        self._read_at = -math.inf  # monotonic, seconds
        self._answered: set[str] = set()  # a question that cannot be removed is answered once

    def takes_save(self) -> bool:
        """Whether a checkpoint has been asked for since the last call that returned True."""
        return Request.save.value in self._read() and requests.take(self._directory, Request.save)

    def has_questions(self) -> bool:
        """Whether a command is waiting for parameters."""
        return bool(self._questions())

    def answer(self, snapshot: Snapshot) -> None:
        """Answers every question from a snapshot; a failure does not affect the run."""
        slots = {
            f"{questions.SLOTS}{slot}/{path}": value
            for slot, values in snapshot.slots.items()
            for path, value in values.items()
        }
        for name in self._questions():
            self._answered.add(name)
            try:
                questions.answer(
                    self._directory, name, snapshot.step, {**snapshot.parameters, **snapshot.state, **slots}
                )
            except (OSError, ValueError, TypeError) as error:
                _log.warning("a request for parameters was not answered: %s", error)

    def _questions(self) -> set[str]:
        return {name for name in self._read() if name.startswith(questions.QUESTION)} - self._answered

    def _read(self) -> set[str]:
        now = time.monotonic()
        if now - self._read_at >= EVERY_SECS:
            self._read_at, self._names = now, requests.pending(self._directory)
        return self._names
