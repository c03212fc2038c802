"""Requests to a running run: files in its directory, which reach every host that shares it.

`trainer stop`, `trainer save` and the console make them; the launcher, and the chief, look for them and remove them.
"""

import contextlib
import os
from enum import Enum
from pathlib import Path

from trainer.storage.run_directory import RunDirectory


class Request(Enum):
    """A request to a run, or to one of its tasks."""

    stop = "stop"  # of the launcher: save a checkpoint and end all tasks
    save = "save"  # of the chief: save a checkpoint before the next step
    stacks = "stacks"  # of the launcher: have a task write the stacks of its threads to its log
    kill = "kill"  # of the launcher: kill a task


def make(directory: RunDirectory, request: Request, task: str = "") -> None:
    """Writes the file that makes a request.

    Args:
        task: its name, for a request to one task.

    Raises:
        OSError: if the run directory cannot be written.
    """
    directory.requests.mkdir(exist_ok=True)
    _file(directory, request, task).touch()


def is_pending(directory: RunDirectory, request: Request, task: str = "") -> bool:
    """Whether a request was made and not taken yet."""
    return _file(directory, request, task).exists()


def take(directory: RunDirectory, request: Request, task: str = "") -> bool:
    """Takes a request; returns whether it was made since the last call."""
    with contextlib.suppress(OSError):  # nothing was asked
        _file(directory, request, task).unlink()
        return True
    return False


def pending(directory: RunDirectory) -> set[str]:
    """Returns the names of all request files in one listing: usually there are none."""
    with contextlib.suppress(OSError), os.scandir(directory.requests) as entries:
        return {entry.name for entry in entries}
    return set()


def _file(directory: RunDirectory, request: Request, task: str) -> Path:
    return directory.requests / (f"{request.value}-{task.replace(':', '-')}" if task else request.value)
