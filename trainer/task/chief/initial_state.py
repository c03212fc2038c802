"""Finds the state that a run starts from: what the shard hosts still hold, a checkpoint, or initial values."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.engine.engine import Engine
from trainer.engine.step_result import StepResult
from trainer.engine.vectors.snapshot import Snapshot
from trainer.faults import failpoints
from trainer.plan.layout import Parameter
from trainer.storage import checkpoint, checkpoint_writer, resume, table_rows
from trainer.storage.checkpoint import Checkpoint
from trainer.storage.journal import Adopt, Journal, Reload
from trainer.storage.run_directory import RunDirectory
from trainer.task.other_tasks import roll_call
from trainer.task.runtime import TaskRuntime
from trainer.task.spec import TaskSpec
from trainer.workload import build
from trainer.workload.weights import read_npz

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InitialState:
    """The state at which a chief starts."""

    step: int  # global step of the state
    is_adopted: bool = False  # the shard hosts held it: an earlier chief died, and what it left undone is due
    missed: Sequence[StepResult] = ()  # the last updates before `step`; to be reported if they were not
    checkpoint: str | None = None  # that the state was loaded from
    result: StepResult | None = None  # of the update that led to the state, if the state has it


def start(spec: TaskSpec, runtime: TaskRuntime, engine: Engine, model: Any) -> InitialState:
    """Starts the chief's engine on the state that the shard hosts still hold, or else loads one into them."""
    if engine.held() > 0:
        step = engine.start()
        _log.info("continuing from step %d: shard hosts still hold the state", step)
        runtime.journal.write(Adopt(engine.generation, step))
        return InitialState(step, is_adopted=True, missed=engine.missed, result=state_of(engine))
    if spec.plan.has_shard_hosts:  # else they have seen each other already
        roll_call(spec, runtime.status, [task.name for task in spec.plan.trainers], until="is_listening")
    loaded = _load(spec, runtime.journal, engine, model)
    if loaded is None:
        return InitialState(engine.start())
    step = engine.start()
    missed = missed_at(loaded, spec.directory)
    return InitialState(step, missed=missed, checkpoint=str(loaded.path), result=state_of(engine))


def state_of(engine: Engine) -> StepResult:
    """Returns the state that an engine has just started from; under sync no replica has changed it yet."""
    return engine.missed[-1] if engine.missed else engine.peek()


def _load(spec: TaskSpec, journal: Journal, engine: Engine, model: Any) -> Checkpoint | None:
    """Loads the state that the run (re)starts from; returns the checkpoint, if it comes from one."""
    state, source = _first_snapshot(spec, model)
    generation = spec.directory.next_generation()
    failpoints.reach("generation", state.step)
    path = str(source.path) if source else None
    journal.write(Reload(generation, state.step, path))
    engine.load(state, generation=generation)
    if path:
        _log.info("resuming at step %d from %s", state.step, path)
    elif spec.plan.initial:
        _log.info("%s", spec.plan.initial)
    return source


def _first_snapshot(spec: TaskSpec, model: Any) -> tuple[Snapshot, Checkpoint | None]:
    """Returns the state to start from, and the checkpoint that it comes from, if any.

    Raises:
        CheckpointError: if the checkpoint is damaged, beyond the run's last step, or of another model or optimizer.
    """
    config, plan, directory = spec.config, spec.plan, spec.directory
    precision = config.train.precision.value
    parameters = build.parameters_of(model, precision, plan.frozen.paths)
    has_loaded = directory.has_loaded()
    source = resume.find(config.resume, directory, steps=plan.steps, again=has_loaded)
    expected = checkpoint.shapes_of(parameters, list(config.optimizer.slots()))
    if not has_loaded:
        nbytes = sum(4 * math.prod(shape) for shape in expected.values())
        checkpoint_writer.check_space(
            directory.checkpoints, nbytes, config.checkpoint.keep if config.checkpoint.every else 0
        )
    if source is None:
        given = read_npz(directory.initial) if directory.initial.exists() else {}
        state = _split(parameters, build.initial_values(model, precision, plan.frozen.paths) | given)
    else:
        checkpoint.check_fits(source, expected, frozen=plan.frozen.sha256)
        table_rows.check_fits(source, plan.table_layout.blocks, plan.slots)
        resume.check_data(source, config, plan)
        state = Snapshot.from_tensors(source.step, checkpoint.load(source))
        metrics = _metrics_in(source)
        is_own = source.path.parent == directory.checkpoints
        stop = source.facts.get("stop", 0.0) if is_own and resume.has_ended(source, config) else 0.0
        sums, reductions = tuple(metrics.get("sums", ())), metrics.get("reductions", 0)
        path = str(source.path.resolve())
        state = replace(state, sums=sums, reductions=reductions, stop=stop, tables=path)
    if has_loaded:
        return state, source
    if source is None:
        resume.set_aside(directory)
    elif config.resume != "auto":
        resume.set_aside_newer(directory, step=state.step)
    return state, source


def missed_at(source: Checkpoint, directory: RunDirectory) -> list[StepResult]:
    """Returns the update that led to a checkpoint of this run: the chief may have died before reporting it."""
    metrics = _metrics_in(source)
    if not metrics or source.path.parent != directory.checkpoints:
        return []
    sums, reductions = metrics.get("sums", ()), metrics.get("reductions", 0)
    return [StepResult(source.generation, source.step, metrics["loss"], stop=False, sums=sums, reductions=reductions)]


def _metrics_in(source: Checkpoint) -> Mapping[str, Any]:
    """Returns the metrics of the update that led to a checkpoint; empty if they were not known."""
    return source.facts.get("metrics", {})


def _split(parameters: Sequence[Parameter], values: dict[str, Any]) -> Snapshot:
    """Returns the model's initial values, as the state of step 0."""
    trainable = {p.path for p in parameters if p.trainable}
    return Snapshot(
        0,
        {path: value for path, value in values.items() if path in trainable},
        {path: value for path, value in values.items() if path not in trainable},
        {},
    )
