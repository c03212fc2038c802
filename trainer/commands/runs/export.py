"""trainer export: writes the model of a checkpoint of a run for other programs."""

from pathlib import Path

from trainer.commands.runs import checkpoints
from trainer.commands.start import restart_as_task
from trainer.config.typed import ExportCommandConfig
from trainer.faults import exit_codes
from trainer.launch import progress
from trainer.launch.ending import shown
from trainer.storage.run_directory import RunDirectory


def run(directory: RunDirectory, options: ExportCommandConfig) -> int:
    """Prints what was written; returns 0.

    Raises:
        NoSuchCheckpointError: if the run has no such checkpoint.
        CheckpointError: if it is damaged.
        ExportError: if the model cannot be written in a format.
    """
    restart_as_task()
    source = checkpoints.named(directory, options.checkpoint)
    folder = Path(options.to).resolve() if options.to else directory.path / f"export-{source.step}"
    with progress.note(f"{shown(directory.path)}: exporting step {source.step}"), checkpoints.as_task():
        from trainer.task.export import export_checkpoint

        export_checkpoint(directory, source, folder, options.formats)
    for path in sorted(folder.iterdir()):
        print(shown(path))
    return exit_codes.OK
