"""Starts importing TensorFlow before the config is known: the import takes longer than reading a config."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.launch.processes.tasks import ProcessTasks

# Arguments that begin so may need no tasks on this machine.
PREFIXES_WITHOUT_LOCAL_TASKS = ("-", "mode=", "launch=", "job=", "hydra.")


@dataclass
class Start:
    """When a command was typed, and the nursery that was started for it."""

    at: float  # Unix time, seconds
    early: ProcessTasks | None = None

    def tasks(self) -> ProcessTasks:
        """Returns the early nursery, else a new one."""
        from trainer.launch.processes.tasks import ProcessTasks

        return self.early or ProcessTasks()

    def discard(self) -> None:
        """Ends the early nursery if no run has used it."""
        if self.early:
            self.early.discard()


def start_early(arguments: Sequence[str]) -> ProcessTasks | None:
    """Starts a nursery if the command looks like one that trains on this machine.

    A wrong guess costs nothing: an unused nursery is ended, and a missing one is started once the config is known.
    """
    if "TF_CONFIG" in os.environ or any(
        argument.lstrip("+").startswith(PREFIXES_WITHOUT_LOCAL_TASKS) for argument in arguments
    ):
        return None
    from trainer.launch.processes.tasks import ProcessTasks

    try:
        return ProcessTasks()
    except OSError:  # reported when a run needs it
        return None
