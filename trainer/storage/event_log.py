"""The actions and messages of a run's launcher, in order: one JSON line each in events.jsonl."""

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from trainer.plan.serialize import from_json, to_json
from trainer.storage.damage import DAMAGED
from trainer.storage.json_lines import lines


class EventKind(Enum):
    """The kind of an event."""

    launch = "launch"  # of the run: cluster, strategy, command
    start = "start"  # of a task: task, attempt
    exit = "exit"  # of a task: task, code
    restart = "restart"  # that is about to come: task that it is needed for, scope
    message = "message"  # only what was printed
    end = "end"  # of the launch: code


@dataclass(frozen=True)
class RunEvent:
    """One event; fields that its kind does not have are None."""

    event: EventKind
    text: str | None = None  # that was printed about it
    task: str | None = None
    attempt: int | None = None
    code: int | None = None
    scope: str | None = None  # of a restart: the task, or all
    cluster: str | None = None
    strategy: str | None = None
    command: tuple[str, ...] | None = None
    time: float = 0.0  # Unix time, seconds


class EventLog:
    """Appends events with their time; every launch of the run writes to the same file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, event: RunEvent) -> None:
        line = {name: value for name, value in to_json(event).items() if value is not None}
        # Opened each time: an event is rare. Whoever must write reports a full disk.
        with contextlib.suppress(OSError), self._path.open("a") as file:
            file.write(json.dumps(line | {"time": round(time.time(), 3)}) + "\n")

    def read(self) -> Iterator[RunEvent]:
        """Yields the events of the file; skips damaged lines."""
        for line in lines(self._path):
            with contextlib.suppress(*DAMAGED):
                yield from_json(RunEvent, line)
