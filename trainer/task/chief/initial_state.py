"""The state that a run starts from: a checkpoint's, or the model's initial values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainer.config.schema import RunConfig
from trainer.engine.step_result import StepResult
from trainer.engine.vectors.snapshot import Snapshot
from trainer.plan.layout import Parameter
from trainer.plan.plan import Plan
from trainer.storage import checkpoint, checkpoint_writer, resume
from trainer.storage.run_directory import RunDirectory
from trainer.workload import build


def first_snapshot(
    config: RunConfig, plan: Plan, directory: RunDirectory, model: Any
) -> tuple[Snapshot, checkpoint.Checkpoint | None]:
    """The state to start from, and the checkpoint that it comes from, if any.

    Raises:
        CheckpointError: if the checkpoint is damaged, beyond the run's last step, or of another model or optimizer.
    """
    precision = config.train.precision.value
    parameters = build.parameters_of(model, precision)
    again = directory.has_loaded()
    found = resume.find(config.resume, directory, steps=plan.steps, again=again)
    expected = _expected(parameters, list(config.optimizer.slots()))
    if not again:
        nbytes = sum(4 * math.prod(shape) for shape in expected.values())
        checkpoint_writer.check_space(
            directory.checkpoints, nbytes, config.checkpoint.keep if config.checkpoint.every else 0
        )
    if found is None:
        state = _split(parameters, build.initial_values(model, precision))
    else:
        checkpoint.check_fits(found, expected)
        state = Snapshot.from_tensors(found.step, checkpoint.load(found))
    if again:
        return state, found
    if found is None:
        resume.set_aside(directory)
    elif config.resume != "auto":
        resume.set_aside_newer(directory, step=state.step)
    return state, found


def missed_at(found: checkpoint.Checkpoint, directory: RunDirectory) -> list[StepResult]:
    """The update that led to a checkpoint of this run: who saved it may not have come to writing that down."""
    metrics = found.facts.get("metrics")
    if metrics is None or found.path.parent != directory.checkpoints:
        return []
    return [StepResult(found.generation, found.step, metrics["loss"], metrics["accuracy"], stop=False)]


def _expected(parameters: Sequence[Parameter], slots: Sequence[str]) -> dict[str, tuple[int, ...]]:
    expected = {f"{'parameters' if p.trainable else 'state'}/{p.path}": p.shape for p in parameters}
    return expected | {f"slots/{slot}/{p.path}": p.shape for slot in slots for p in parameters if p.trainable}


def _split(parameters: Sequence[Parameter], values: dict[str, Any]) -> Snapshot:
    """The model's first values, as the state of step 0."""
    trainable = {p.path for p in parameters if p.trainable}
    return Snapshot(
        0,
        {path: value for path, value in values.items() if path in trainable},
        {path: value for path, value in values.items() if path not in trainable},
        {},
    )
