"""mode=export: writes the model of a checkpoint of a run for other programs."""

from pathlib import Path

from trainer.commands.runs import checkpoints
from trainer.commands.runs.named import directory_of
from trainer.commands.start import Start, restart_as_task
from trainer.config.schema import RunConfig
from trainer.faults import exit_codes
from trainer.launch import progress
from trainer.launch.ending import shown


def run(config: RunConfig, start: Start) -> int:
    """Prints what was written; returns 0.

    Raises:
        NoSuchCheckpointError: if the run has no such checkpoint.
        CheckpointError: if it is damaged.
        ExportError: if the model cannot be written in a format.
    """
    restart_as_task()
    directory = directory_of(config)
    source = checkpoints.named(directory, config.export.checkpoint)
    folder = Path(config.export.to).resolve() if config.export.to else directory.path / f"export-{source.step}"
    with progress.note(f"{shown(directory.path)}: exporting step {source.step}"), checkpoints.as_task():
        from trainer.task.export import export_checkpoint

        export_checkpoint(directory, source, folder, config.export.formats)
    for path in sorted(folder.iterdir()):
        print(shown(path))
    return exit_codes.OK
