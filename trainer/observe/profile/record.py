"""Records the times of a task's steps, one JSON line per step, in <run>/profile/<task>.jsonl.

{"task": "worker:1", "pid": 4711}                                  an attempt of the task begins
{"offset_secs": 0.0003, "error_secs": 0.0005}                      to the chief's clock; the least error counts
{"row": "replica", "step": 12, "began": 1767225600.25, ...}        a step of its own, or an update of its shard
"""

import json
import logging
import os
import threading
from typing import Any, TextIO

from trainer.observe.profile import clock
from trainer.observe.profile.stamps import Stamps
from trainer.plan.plan import Task
from trainer.storage.run_directory import RunDirectory

_log = logging.getLogger(__name__)

STEPS = 1000  # of each attempt of a task, and of its shard; then nothing more is written
REPLICA, SHARD = "replica", "shard"


class Recorder:
    """Appends the steps of one attempt of a task, from two threads if it has a shard."""

    def __init__(self, directory: RunDirectory, task: Task, chief: Task) -> None:
        """Opens no file yet: under a scheduler the run directory exists only once the chief has started."""
        self._directory, self._task, self._chief = directory, task, chief
        self._file: TextIO | None = None
        self._is_closed = False
        self._left = {REPLICA: STEPS, SHARD: STEPS}
        self._writing = threading.Lock()

    def write(self, row: str, step: int, stamps: Stamps) -> None:
        """Adds a step to a row, REPLICA or SHARD; its number is the update it makes or its gradient belongs to."""
        with self._writing:
            if self._left[row] == 0:
                return
            self._left[row] -= 1
            if self._file is None and not self._is_closed:
                self._open()
            self._append({"row": row, "step": step, **stamps._asdict()})

    def _open(self) -> None:
        path = self._directory.profile / f"{self._task.job}-{self._task.index}.jsonl"
        try:
            if not self._directory.plan.exists():
                raise FileNotFoundError(0, "it has no plan", str(self._directory.path))
            path.parent.mkdir(exist_ok=True)
            self._file = path.open("a", buffering=1)
            self._file.write("\n" * (path.stat().st_size > 0))  # the previous attempt may have ended within a line
        except OSError as error:
            self._fail(error)
        self._append({"task": self._task.name, "pid": os.getpid()})
        if self._file and self._task != self._chief:
            arguments = (self._chief.control, self._write_offset)
            threading.Thread(target=clock.follow, args=arguments, name="clock", daemon=True).start()

    def _write_offset(self, offset: clock.Offset) -> None:
        with self._writing:
            self._append({"offset_secs": offset.secs, "error_secs": offset.error_secs})

    def _append(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, default=dict) + "\n")  # dict: of a read-only mapping
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Stops recording; the run continues."""
        where = error.filename or self._directory.profile
        _log.warning("%s is not profiled: %s: %s", self._task.name, where, error.strerror)
        self._file, self._is_closed = None, True
