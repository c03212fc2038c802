"""The checkpoint of a run that a command names, and this process as one that computes with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainer.config.schema import RunConfig
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
    """export.checkpoint names none that the run has."""

    exit_code = exit_codes.INPUT_MISSING


def named(directory: RunDirectory, name: str) -> Checkpoint:
    """The checkpoint of a run that is its last, its best or that of a step.

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
    """Gives this process, which `restart_as_task` has started and has yet to import TensorFlow, the GPUs of a task.

    Within, nothing that TensorFlow or its converters write reaches the terminal.

    Args:
        gpus: that the task has; this process takes them if this machine has as many.
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
    """The keys of the command line."""
    return [word.partition("=")[0].lstrip("+") for word in sys.argv[1:]]


def batch_size(config: RunConfig) -> int | None:
    """The batch size that was typed; None: none."""
    return config.evaluate.batch_size if "evaluate.batch_size" in typed_keys() else None


def batches(config: RunConfig) -> int | None:
    """The number of batches that was typed; None: none."""
    return config.evaluate.steps if "evaluate.steps" in typed_keys() else None
