"""`python -m trainer`: starts what takes longest, then does what the command says."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from trainer.launch.tasks import Tasks

ELSEWHERE = ("-", "mode=", "launch=", "job=", "hydra.")  # how arguments begin that may want no tasks here


def console() -> None:
    """The command line, for `python -m trainer` and the console script."""
    started_at = time.time()
    early = start_early(sys.argv[1:])
    try:
        from trainer import command  # imports Hydra, while the nursery imports TensorFlow

        command.run(started_at, early)
    finally:
        if early:
            early.discard()


def start_early(arguments: Sequence[str]) -> Tasks | None:
    """A nursery, where a command looks like one that trains here: what it imports takes longer than to read a config.

    Nothing rests on the guess. A nursery that is not wanted ends with the command; one that is, and was not started
    here, is started when the config is known.
    """
    if "TF_CONFIG" in os.environ or any(argument.startswith(ELSEWHERE) for argument in arguments):
        return None
    try:
        return Tasks()
    except OSError:  # told when it is wanted
        return None


if __name__ == "__main__":
    console()
