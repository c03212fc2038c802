"""Which checkpoint a run starts from."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from trainer.config.schema import RunConfig
from trainer.storage import checkpoint
from trainer.storage.checkpoint import Checkpoint, CheckpointError
from trainer.storage.history import History
from trainer.storage.run_directory import RunDirectory

_log = logging.getLogger(__name__)


def find(resume: str, directory: RunDirectory, *, steps: int, again: bool = False) -> Checkpoint | None:
    """The checkpoint that `resume` means: the newest valid one of the run (auto), none (never), or the one at a path.

    Args:
        again: this launch of the run has started before, so what it saved since comes first.

    Raises:
        CheckpointError: if the one at the path is damaged; if the run has some and all are damaged; or if it is beyond
            the run's last step.
    """
    found = (_find("auto", directory) if again else None) or _find(resume, directory)
    if found is not None and found.step > steps:
        raise CheckpointError(
            found.path,
            f"it is at step {found.step}, the run ends at step {steps}",
            f"type train.steps={found.step} or more",
        )
    return found


def _find(resume: str, directory: RunDirectory) -> Checkpoint | None:
    if resume == "never":
        return None
    named = directory.path if resume == "auto" else Path(resume)
    folder = named / "checkpoints"
    if resume != "auto" and not folder.is_dir():
        if not (named.is_dir() and checkpoint.finished(named)):  # as best/ has
            found = checkpoint.read_manifest(named)
            checkpoint.verify(found)
            return found
        folder = named
    newest, skipped = checkpoint.newest_valid(folder)
    for reason in skipped:
        _log.warning("skipping a damaged checkpoint: %s", reason)
    if newest is None and (skipped or resume != "auto"):
        raise CheckpointError(folder, "no checkpoint in it is valid")
    return newest


def check_model(found: Checkpoint, config: RunConfig) -> None:
    """Fails early if a checkpoint is of another model or optimizer; the shapes are compared when it is loaded.

    Raises:
        CheckpointError: naming both.
    """
    for key, wanted in (("model", config.model.name), ("optimizer", config.optimizer.name.value)):
        held = found.facts.get(key)
        if held is not None and held != wanted:
            raise CheckpointError(
                found.path,
                f"it is of {key}={held}, this run has {key}={wanted}",
                "choose another directory with run=PATH, or start anew with resume=never",
            )


def set_aside(directory: RunDirectory) -> None:
    """Moves away what an earlier run left, for a run that starts anew in its directory."""
    written = (
        directory.checkpoints,
        directory.history,
        directory.events,
        directory.evaluations,
        directory.best,
        directory.rollbacks,
    )
    left = [path for path in written if path.exists()]
    if not left:
        return
    aside = directory.path / f"before-{time.strftime('%Y%m%d-%H%M%S')}"
    aside.mkdir()
    for path in left:
        path.rename(aside / path.name)
    _log.info("starting from step 0; moved the files of an earlier run to %s", aside)


def set_aside_newer(directory: RunDirectory, *, step: int) -> None:
    """Moves the run's checkpoints away if some are newer than the step it starts from: they belong to another past.

    The best one too, if it is newer; and an evaluator's scores of later steps are taken back.
    """
    for folder in (directory.checkpoints, directory.best):
        if any(path.name.isdigit() and int(path.name) > step for path in folder.glob("*")):
            aside = folder.with_name(f"{folder.name}-until-{time.strftime('%Y%m%d-%H%M%S')}")
            folder.rename(aside)
            _log.info("moved newer checkpoints to %s", aside)
    if directory.evaluations.exists():
        History(directory.evaluations, start=step).close()
