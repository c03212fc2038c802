"""Records the actions of a task, a JSON line each, in <run>/journal/<task>.jsonl, for `trainer check`."""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trainer.plan.serialize import from_json


@dataclass(frozen=True)
class Entry:
    """One line of a journal."""

    event: ClassVar[str] = ""  # its name in the file


@dataclass(frozen=True)
class StateEntry(Entry):
    """An entry about the state that was loaded as a generation, at a global step."""

    generation: int
    step: int


@dataclass(frozen=True)
class Join(Entry):
    """A worker joins, or rejoins, with its gradients of a global step."""

    event = "join"
    step: int
    replicas: Sequence[int]


@dataclass(frozen=True)
class Push(StateEntry):
    """A worker has pushed its gradients of a global step, which update step + 1 uses."""

    event = "push"
    replicas: Sequence[int]


class Load(StateEntry):
    """A shard has loaded a state."""

    event = "load"


class Update(StateEntry):
    """A shard has been updated to a global step."""

    event = "update"


@dataclass(frozen=True)
class Reload(StateEntry):
    """The chief makes all shards load a state."""

    event = "reload"
    checkpoint: str | None  # where the state comes from; none: it is a new one
    at: float = 0.0  # CLOCK_MONOTONIC, seconds, as all entries have


class Adopt(StateEntry):
    """A restarted chief continues with the state that the shards hold."""

    event = "adopt"


class Save(StateEntry):
    """The chief has saved the state of a global step."""

    event = "save"


@dataclass(frozen=True)
class TaskStart(Entry):
    """The launcher starts an attempt of a task."""

    event = "start"
    task: str
    attempt: int


@dataclass(frozen=True)
class TaskExit(Entry):
    """An attempt of a task has ended."""

    event = "exit"
    task: str
    code: int


@dataclass(frozen=True)
class TaskRestart(Entry):
    """The launcher is about to restart a task, or all."""

    event = "restart"
    scope: str
    cause: str  # the task that it is needed for


KINDS: Mapping[str, type[Entry]] = {
    kind.event: kind for kind in (Join, Push, Load, Update, Reload, Adopt, Save, TaskStart, TaskExit, TaskRestart)
}


class Journal:
    """Appends entries; every attempt of a task writes to the same file."""

    def __init__(self, path: Path | None) -> None:
        """Opens the file; without a path, nothing is written."""
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", buffering=1)

    def write(self, entry: Entry) -> None:
        """Adds an entry with its time: CLOCK_MONOTONIC, seconds, the same clock for all tasks of a machine."""
        if self._file is not None:
            line = {"event": entry.event, **vars(entry), "at": round(time.monotonic(), 6)}
            with contextlib.suppress(OSError):  # a writer that must succeed reports a full disk
                self._file.write(json.dumps(line) + "\n")


def read(values: Mapping[str, Any]) -> Entry:
    """Returns the entry in a line.

    Raises:
        KeyError, TypeError: if it has none.
    """
    return from_json(KINDS[values["event"]], values)
