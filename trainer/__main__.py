"""`python -m trainer`: starts what takes longest, then does what the command says."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.launch.processes.tasks import ProcessTasks

PREFIXES_WITHOUT_LOCAL_TASKS = (
    "-",
    "mode=",
    "launch=",
    "job=",
    "hydra.",
)  # how arguments begin that may want no tasks here


def console() -> None:
    """The command line, for `python -m trainer` and the console script."""
    started_at = time.time()
    _open_standard_streams()
    early = start_early(sys.argv[1:])
    try:
        from trainer.commands import command  # imports Hydra, while the nursery imports TensorFlow

        command.run(started_at, early)
    finally:
        if early:
            early.discard()


def _open_standard_streams() -> None:
    """Where one is closed, as a service may find it, the next file to be opened takes its place: this one."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, errors="backslashreplace")  # noqa: SIM115 (open as long as the process)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def start_early(arguments: Sequence[str]) -> ProcessTasks | None:
    """A nursery, where a command looks like one that trains here: what it imports takes longer than to read a config.

    Nothing rests on the guess: when the config is known, a nursery that nobody wants is ended, and one that is wanted
    and not there is started.
    """
    if "TF_CONFIG" in os.environ or any(
        argument.lstrip("+").startswith(PREFIXES_WITHOUT_LOCAL_TASKS) for argument in arguments
    ):
        return None
    from trainer.launch.processes.tasks import ProcessTasks

    try:
        return ProcessTasks()
    except OSError:  # told when it is wanted
        return None


if __name__ == "__main__":
    console()
