"""Finds the checkpoint that a command names, and prepares this process to use it."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainer.config.command_line import typed
from trainer.faults import exit_codes
from trainer.faults.exit_codes import TrainerError
from trainer.launch.ending import shown
from trainer.observe.machine import this_machine
from trainer.plan.checks.installed import require_tensorflow
from trainer.plan.environment import VISIBLE, visible_gpus
from trainer.storage import checkpoint, evaluations
from trainer.storage.checkpoint import Checkpoint
from trainer.storage.run_directory import RunDirectory


class NoSuchCheckpointError(TrainerError):
    """export.checkpoint names a checkpoint that the run does not have."""

    exit_code = exit_codes.INPUT_MISSING


def named(directory: RunDirectory, name: str) -> Checkpoint:
    """Returns the last or the best checkpoint of a run, or the checkpoint of a step.

    Raises:
        NoSuchCheckpointError: if the run has no such checkpoint.
        CheckpointError: if it is damaged.
    """
    if name == "best":
        best = evaluations.best(directory.best)
        if best is None:
            how = "an evaluator task keeps it, or evaluate.every=100"
            raise NoSuchCheckpointError(f"{shown(directory.path)} has no best checkpoint: {how}")
        return checkpoint.read_manifest(best[1])
    paths = {int(path.name): path for path in checkpoint.finished(directory.checkpoints)}
    step = max(paths, default=0) if name == "last" else int(name)
    if step not in paths:
        listed = ", ".join(map(str, sorted(paths))) or "none"
        which = "checkpoint" if name == "last" else f"checkpoint of step {name}"
        raise NoSuchCheckpointError(f"{shown(directory.path)} has no {which}; it has {listed}")
    return checkpoint.read_manifest(paths[step])


@contextmanager
def as_task(gpus: Sequence[int] = ()) -> Iterator[None]:
    """Gives this process the GPUs of a task; `restart_as_task` started it, and TensorFlow is not imported yet.

    Inside the context, output of TensorFlow and its converters does not reach the terminal.

    Args:
        gpus: those of the task; this process takes them if this machine has that many.
    """
    require_tensorflow()
    here = gpus if gpus and this_machine().gpus > max(gpus) else ()
    os.environ[VISIBLE] = visible_gpus(here, os.environ)
    sys.stderr.flush()
    terminal = os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def typed_keys() -> list[str]:
    """Returns the keys that were typed on the command line."""
    return [word.partition("=")[0].lstrip("+") for word in typed()]
