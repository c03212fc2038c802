"""What other commands ask of a run that is under way: files in its directory, which reach any host that shares it.

`mode=stop` and `mode=save` make them; the launcher, and the chief, look for them and remove them.
"""

import contextlib
from enum import Enum

from trainer.storage.run_directory import RunDirectory


class Request(Enum):
    """What can be asked of a run."""

    stop = "stop"  # of its launcher: save a checkpoint and end all tasks
    save = "save"  # of its chief: save a checkpoint before the next step


def make(directory: RunDirectory, request: Request) -> None:
    """Asks.

    Raises:
        OSError: if the run directory cannot be written.
    """
    directory.requests.mkdir(exist_ok=True)
    (directory.requests / request.value).touch()


def is_pending(directory: RunDirectory, request: Request) -> bool:
    """Whether it was asked and not taken yet."""
    return (directory.requests / request.value).exists()


def take(directory: RunDirectory, request: Request) -> bool:
    """Whether it was asked since the last call."""
    with contextlib.suppress(OSError):  # nothing was asked
        (directory.requests / request.value).unlink()
        return True
    return False
