"""trainer predict: writes the outputs of a checkpoint's model, for the data of its run or for other data."""

from pathlib import Path

from trainer.commands.runs import checkpoints
from trainer.commands.runs.evaluate import gpus, typed_examples
from trainer.commands.start import restart_as_task
from trainer.config.output import print_json
from trainer.config.schema import RunConfig
from trainer.config.typed import ExportCommandConfig
from trainer.faults import exit_codes
from trainer.launch import progress
from trainer.launch.ending import shown
from trainer.storage.run_directory import RunDirectory


def run(config: RunConfig, options: ExportCommandConfig, directory: RunDirectory, *, as_json: bool) -> int:
    """Prints what was written; returns 0.

    Raises:
        NoSuchCheckpointError: if the run has no such checkpoint.
        CheckpointError: if it is damaged, or of another model.
        DataError: if the data does not fit the model.
        ConfigError: if the file cannot hold the outputs.
        OSError: if it cannot be written.
    """
    assert options.to is not None  # checked earlier
    restart_as_task()
    file = Path(options.to).resolve()
    source = checkpoints.named(directory, options.checkpoint)
    note = f"{shown(directory.path)}: predicting with step {source.step}"
    with progress.note(note), checkpoints.as_task(gpus(directory)):
        from trainer.storage import predictions
        from trainer.task.evaluator import offline

        outputs = offline.predict(directory, source, typed_examples(config, directory))
        shapes = predictions.write(file, outputs)
    if as_json:
        print_json({"run": str(directory.path), "step": source.step, "file": str(file), "outputs": shapes})
        return exit_codes.OK
    print(f"{shown(file)}: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}")
    return exit_codes.OK
