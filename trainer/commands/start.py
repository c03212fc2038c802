"""Starts importing TensorFlow before the config is known: the import takes longer than reading a config."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.launch.processes.tasks import ProcessTasks

# Arguments that begin so may need no tasks on this machine.
WARM_MINUTES = "TRAINER_WARM_MINUTES"  # the default of launch.warm_minutes
PREFIXES_WITHOUT_LOCAL_TASKS = ("-", "mode=", "launch=", "job=", "hydra.")


@dataclass
class Start:
    """The time at which a command was typed, and the nursery started for it."""

    at: float  # Unix time, seconds
    early: ProcessTasks | None = None

    def tasks(self, warm_minutes: float | None = 0.0) -> ProcessTasks:
        """Returns the early nursery, or a new one; a nursery that shall stay warm replaces one that shall not.

        Args:
            warm_minutes: None: what the environment says.
        """
        from trainer.launch.processes.tasks import ProcessTasks

        minutes = _warm_minutes([]) if warm_minutes is None else warm_minutes
        if self.early and (self.early.is_warm or not minutes):
            return self.early
        self.discard()
        return ProcessTasks(warm_minutes=minutes)

    def discard(self) -> None:
        """Ends the early nursery if no run has used it."""
        if self.early:
            self.early.discard()


def start_early(arguments: Sequence[str]) -> ProcessTasks | None:
    """Starts a nursery if the command looks like one that trains on this machine.

    A wrong guess costs nothing: an unused nursery is ended, and a missing one is started once the config is known.
    """
    first = arguments[0] if arguments else "train"
    names_another_mode = first.isalpha() and first != "train"
    is_elsewhere = any(argument.lstrip("+").startswith(PREFIXES_WITHOUT_LOCAL_TASKS) for argument in arguments)
    is_one_task = "TF_CONFIG" in os.environ or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"
    if is_one_task or is_elsewhere or names_another_mode:
        return None
    from trainer.faults.problems import ConfigError
    from trainer.launch.processes.tasks import ProcessTasks

    try:
        return ProcessTasks(warm_minutes=_warm_minutes(arguments))
    except (OSError, ConfigError):  # reported when a run needs it
        return None


def _warm_minutes(arguments: Sequence[str]) -> float:
    """Returns warm_minutes from the command line or the environment, before the config is known; 0 if not a number."""
    typed = [argument.partition("=")[2] for argument in arguments if argument.startswith("launch.warm_minutes=")]
    with contextlib.suppress(ValueError):
        return float([os.environ.get(WARM_MINUTES, "0"), *typed][-1])
    return 0.0


def restart_as_task() -> None:
    """Restarts this command in this process with the environment of a task, which Python partly reads at startup.

    It does so only once. The user's code then iterates over sets in the same order here as in the tasks of a run.
    """
    from trainer.plan.environment import HASH_SEED, for_tasks

    of_tasks = for_tasks(os.environ)
    environment = of_tasks | os.environ | {HASH_SEED: of_tasks[HASH_SEED]}
    if environment != os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
