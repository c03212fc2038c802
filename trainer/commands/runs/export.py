"""mode=export: writes the model of a checkpoint of a run for other programs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.commands.runs.named import directory_of
from trainer.commands.start import Start
from trainer.config.schema import RunConfig
from trainer.faults import exit_codes
from trainer.faults.exit_codes import TrainerError
from trainer.launch import progress
from trainer.launch.ending import shown
from trainer.storage import checkpoint, evaluations
from trainer.storage.checkpoint import Checkpoint
from trainer.storage.run_directory import RunDirectory


class NoSuchCheckpointError(TrainerError):
    """export.checkpoint names none that the run has."""

    exit_code = exit_codes.INPUT_MISSING


def run(config: RunConfig, start: Start) -> int:
    """Prints what was written; returns 0.

    Raises:
        NoSuchCheckpointError: if the run has no such checkpoint.
        CheckpointError: if it is damaged.
        ExportError: if the model cannot be written in a format.
    """
    directory = directory_of(config)
    source = _source(directory, config.export.checkpoint)
    folder = Path(config.export.to).resolve() if config.export.to else directory.path / f"export-{source.step}"
    with progress.note(f"{shown(directory.path)}: exporting step {source.step}"), _without_greetings():
        from trainer.task.export import export_checkpoint

        export_checkpoint(directory, source, folder, config.export.formats)
    for path in sorted(folder.iterdir()):
        print(shown(path))
    return exit_codes.OK


@contextmanager
def _without_greetings() -> Iterator[None]:
    """Keeps TensorFlow and its converters, which run here without a GPU, from writing to the terminal."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    terminal = os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def _source(directory: RunDirectory, name: str) -> Checkpoint:
    if name == "best":
        best = evaluations.best(directory.best)
        if best is None:
            how = "an evaluator task keeps it, or evaluate.export_best=true"
            raise NoSuchCheckpointError(f"{shown(directory.path)} has no best checkpoint: {how}")
        return checkpoint.read_manifest(best[1])
    paths = {int(path.name): path for path in checkpoint.finished(directory.checkpoints)}
    step = max(paths, default=0) if name == "last" else int(name)
    if step not in paths:
        listed = ", ".join(map(str, sorted(paths))) or "none"
        which = "checkpoint" if name == "last" else f"checkpoint of step {name}"
        raise NoSuchCheckpointError(f"{shown(directory.path)} has no {which}; it has {listed}")
    return checkpoint.read_manifest(paths[step])
