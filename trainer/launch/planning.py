"""Makes the plan of a run: asks a process with TensorFlow to describe the model and the data, and decides."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.groups import freezing
from trainer.config.schema import RunConfig
from trainer.config.typed import Mode
from trainer.faults.problems import ConfigError
from trainer.launch import progress
from trainer.launch.describe import describe
from trainer.observe.machine import this_machine
from trainer.plan.checks.strategy import batch_parts
from trainer.plan.description import FROZEN_FILE, ModelProbe, Waits
from trainer.plan.devices import Machine
from trainer.plan.make import make_plan
from trainer.plan.plan import Plan
from trainer.plan.resolve import resolve_optimizer, resolve_steps
from trainer.plan.strategy import updates_of_batch
from trainer.plan.tables import sparse_patterns
from trainer.storage import initial, threads

if TYPE_CHECKING:
    from trainer.launch.processes.tasks import ProcessTasks

WHAT_IS_TRAINED = ("model", "optimizer")  # a run repeats the warnings about these; trainer plan has them all
PLANNING = "planning: TensorFlow builds the model once"


def make(
    config: RunConfig,
    store: Path | None = None,
    tasks: ProcessTasks | None = None,
    machine: Machine | None = None,
    waits: Waits = lambda *_: None,
    *,
    mode: Mode = Mode.train,
) -> tuple[RunConfig, Plan]:
    """Describes the model, in a process of `tasks` if one is given, and makes the plan.

    Args:
        store: a folder for the files that describing the model leaves for the tasks.
        machine: that the tasks run on; None: this one.
        waits: as in `describe`.

    Returns:
        The config, with threads of an earlier launch, the compiled optimizer and the steps of epochs; and the plan.
    """
    config = threads.taken_from_earlier(config)
    child = partial(tasks.describe, waits=waits) if tasks else None
    description = describe(_question(config, store), child, waits)
    optimizer, problems = resolve_optimizer(config.optimizer, config.given, description.compiled_optimizer)
    updates = updates_of_batch(config.strategy, config.cluster)
    train, of_steps = resolve_steps(config.train, description.train_examples, updates_of_batch=updates)
    if problems := problems + of_steps:
        raise ConfigError(problems)
    config = replace(config, optimizer=optimizer, train=train)
    return config, make_plan(config, description, machine or this_machine(), mode)


def announce(
    config: RunConfig,
    store: Path,
    tasks: ProcessTasks | None = None,
    machine: Machine | None = None,
    *,
    write_to: str | None = None,
) -> tuple[RunConfig, Plan]:
    """Makes the plan of a run like `make`, prints it in one line, and writes it as JSON to `write_to`."""
    with progress.note(PLANNING) as note:
        config, made = make(config, store, tasks, machine, note.runs)
    if write_to is not None:
        from trainer.plan import page

        page.write_json(made, write_to)
    print(made.describe(), flush=True)
    if made.initial:
        print(made.initial, flush=True)
    for warning in made.warnings:
        if warning.key in WHAT_IS_TRAINED:
            print(f"warning: {warning}", flush=True)
    return config, made


def _question(config: RunConfig, store: Path | None = None) -> ModelProbe:
    """Returns the probe of the model; a run that resumes takes the values of its checkpoint, and no others."""
    question = replace(
        ModelProbe.about(config.model, config.data, user=config.user, seed=config.seed),
        precision=config.train.precision.value,
        freezes=freezing(config.optimizer),
        store=None if store is None else str(store),
        sparse=sparse_patterns(config.placement),
        formats=tuple(config.export.formats),
        evaluate_steps=config.evaluate.steps,
    )
    if config.user is not None:
        parts = batch_parts(config.cluster, config.device, config.train)
        question = replace(question, batch=config.train.batch_size // parts)
    if (checkpoint := initial.resumed(config.run, config.resume)) is None:
        files = initial.files_of(config.model.init) if config.model.init is not None else ()
        return replace(question, init=files)
    frozen = checkpoint / FROZEN_FILE
    return replace(question, frozen=str(frozen) if frozen.exists() else None)
