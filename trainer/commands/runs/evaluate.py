"""trainer evaluate: computes the loss and the metrics of a checkpoint, on the data of its run or on other data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.commands.runs import checkpoints
from trainer.commands.start import restart_as_task
from trainer.config.output import print_json
from trainer.config.schema import DataConfig, RunConfig
from trainer.config.words import count
from trainer.faults import exit_codes
from trainer.launch import progress
from trainer.launch.ending import LABEL_COLUMNS, shown
from trainer.storage import evaluations
from trainer.storage.run_directory import RunDirectory

OPTION = "data.options."
IN_PARTS = ("csv", "parquet", "images", "criteo")  # data sets that evaluate on part of their files by default

if TYPE_CHECKING:
    from trainer.task.evaluator.offline import OtherData, Selection


def run(config: RunConfig, checkpoint: str, directory: RunDirectory, *, as_json: bool) -> int:
    """Prints the scores; returns 0.

    Raises:
        NoSuchCheckpointError: if the run has no such checkpoint.
        CheckpointError: if it is damaged, or of another model.
        DataError: if the data cannot be evaluated on.
    """
    restart_as_task()
    source = checkpoints.named(directory, checkpoint)
    with progress.note(f"{shown(directory.path)}: evaluating step {source.step}"), checkpoints.as_task(gpus(directory)):
        from trainer.task.evaluator import offline

        examples = typed_examples(config, directory)
        scores, number = offline.evaluate(directory, source, examples)
    data = examples.other.data.name if examples.other else directory.read_config().data.name
    facts: dict[str, Any] = {"run": str(directory.path), "step": source.step, "checkpoint": str(source.path)}
    facts |= {"data": data, "examples": number} | {f"eval_{name}": value for name, value in scores.items()}
    if as_json:
        print_json(facts)
        return exit_codes.OK
    print(f"{shown(source.path)}: {count(number, 'example')} of {data}")
    print(f"{'evaluation':<{LABEL_COLUMNS}} {evaluations.describe(scores)}")
    return exit_codes.OK


def gpus(directory: RunDirectory) -> tuple[int, ...]:
    """Returns the GPUs of the task that evaluates in the run."""
    return directory.read_plan().evaluating_task.gpus


def typed_examples(config: RunConfig, directory: RunDirectory) -> Selection:
    """Returns the data that was typed, and the size and the number of batches; each is None unless it was."""
    from trainer.task.evaluator.offline import Selection

    keys, section = checkpoints.typed_keys(), config.evaluate
    size = section.batch_size if "evaluate.batch_size" in keys else None
    steps = section.steps if "evaluate.steps" in keys else None
    return Selection(other_data(config, directory), size, steps)


def other_data(config: RunConfig, directory: RunDirectory) -> OtherData | None:
    """Returns the data that was typed; for the data set of the run, other options keep the values of the run."""
    from trainer.task.evaluator.offline import OtherData

    typed, stored = checkpoints.typed_keys(), directory.read_config()
    if not any(key.partition(".")[0] in ("data", "user") for key in typed):
        return None
    user, names = config.user or stored.user, [key.removeprefix(OPTION) for key in typed if key.startswith(OPTION)]
    given = {name: config.data.options[name] for name in names if name in config.data.options}
    is_same = config.data.name == stored.data.name and user == stored.user
    options = _of_whole_files(config.data.name, given, stored.data.options if is_same else {})
    return OtherData(DataConfig(config.data.name, (stored if is_same else config).data.options | options), user)


def _of_whole_files(name: str, given: dict[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options that evaluate on all examples of the files, if only their path was typed.

    `path` keeps the files of the run, because they define the ids of texts, unless the new files lack the label.
    """
    path = given.get("path")
    if name not in IN_PARTS or path is None or "evaluate" in given or path == stored.get("path"):
        return given
    return given | {"evaluate": path, "path": path if "label" in given else stored.get("path", path)}
