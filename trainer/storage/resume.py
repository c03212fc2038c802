"""Decides which checkpoint a run starts from, and moves aside checkpoints that do not belong to it."""

import logging
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.config.schema import EvaluateConfig, RunConfig, TrainConfig
from trainer.config.shell import typed
from trainer.config.unrepeatable import suspects
from trainer.config.words import count
from trainer.plan import spans
from trainer.plan.fingerprint import Fingerprint, check_same, describe_source
from trainer.plan.layout import Parameter
from trainer.plan.plan import Plan
from trainer.plan.serialize import from_json
from trainer.plan.strategy import updates_of_batch
from trainer.storage import changes, checkpoint
from trainer.storage.checkpoint import Checkpoint, CheckpointError
from trainer.storage.damage import DAMAGED, read_json
from trainer.storage.history import History
from trainer.storage.run_directory import RunDirectory

_log = logging.getLogger(__name__)


def check_exists(resume: str) -> None:
    """Raises a CheckpointError if `resume` is a missing path; `find` checks more, but needs a plan."""
    if resume not in ("auto", "never") and not os.path.lexists(Path(resume)):
        raise CheckpointError(Path(resume), "does not exist")


def find(resume: str, directory: RunDirectory, *, steps: int, again: bool = False) -> Checkpoint | None:
    """Finds the checkpoint that `resume` names: the newest valid one of the run (auto), none (never), or one at a path.

    Args:
        again: whether this launch of the run has started before; then its own checkpoints come first.

    Raises:
        CheckpointError: if the one at the path is damaged; if the run has checkpoints and all are damaged; or if it is
            beyond the run's last step.
    """
    source = (_find("auto", directory) if again else None) or _find(resume, directory)
    if source is not None and source.step > steps:
        problem = f"checkpoint is at step {source.step}, but train.steps is {steps}"
        raise CheckpointError(source.path, problem, f"use train.steps={source.step} or more")
    return source


def _find(resume: str, directory: RunDirectory) -> Checkpoint | None:
    if resume == "never":
        return None
    named = directory.path if resume == "auto" else Path(resume)
    folder = named / "checkpoints"
    if resume != "auto" and not folder.is_dir():
        if not (named.is_dir() and checkpoint.finished(named)):  # a folder of checkpoints, like best/
            source = checkpoint.read_manifest(named)
            checkpoint.verify(source)
            return source
        folder = named
    newest, skipped = checkpoint.newest_valid(folder)
    for reason in skipped:
        _log.warning("skipping a damaged checkpoint: %s", reason)
    if newest is None and (skipped or resume != "auto"):
        raise CheckpointError(folder, "no checkpoint in it is valid")
    return newest


def describe_finished(config: RunConfig) -> str | None:
    """Describes the run of a config if it has finished already; None if there is something left to do."""
    if config.run is None or config.resume != "auto":
        return None
    directory = RunDirectory(Path(config.run).resolve())
    try:
        return _describe_finished(config, directory, read_json(directory.summary))
    except (OSError, *DAMAGED):
        return None


def _describe_finished(config: RunConfig, directory: RunDirectory, summary: dict[str, Any]) -> str | None:
    step, early, tasks = summary["steps"], summary["ended_early"], summary["tasks"]
    has_left = all(task["code"] == 0 for task in tasks.values()) if isinstance(tasks, dict) else True
    is_exported = directory.export.is_dir() and not summary.get("not_exported")
    is_complete = summary.get("failed") is None and has_left and is_exported
    before = directory.read_config()
    steps = _steps(config, before)
    is_same = what_may_end(before.evaluate, before.train.steps) == what_may_end(config.evaluate, steps)
    if not is_complete or not (step == steps or (early and is_same)):
        return None
    if before.data != config.data or any(changes.changes(before, config, directory, is_resolved=False)):
        return None  # changes are reported or refused when the plan is made
    if not (directory.checkpoints / f"{step:09d}").is_dir():
        return None
    named = "".join(f", {name} {value:.4f}" for name, value in summary.items() if name.startswith("eval_"))
    more = "change evaluate.patience or train.steps" if early else twice(config.train, step)
    why = f" ({early})" if early else ""
    return f"already finished: {step} of {steps} steps{named}{why}\nto continue: {more}"


def _steps(now: RunConfig, before: RunConfig) -> int | None:
    """Returns the steps of a config without a plan; for unchanged epochs, the former steps; None if unknown."""
    if now.train.epochs is None:
        return now.train.steps
    ours, theirs = (
        (config.train.epochs, config.train.batch_size, updates_of_batch(config.strategy, config.cluster))
        for config in (now, before)
    )
    return before.train.steps if ours == theirs else None


def what_may_end(evaluate: EvaluateConfig, steps: int | None) -> dict[str, Any]:
    """Returns the settings that decide whether a run ends early: it continues when one of these changes."""
    decides = asdict(evaluate) | {"best_is": evaluate.best_is.value}
    if (batches := decides.pop("steps")) is not None:
        decides["batches"] = batches
    return _without_export(decides | {"steps": steps})


def has_ended(source: Checkpoint, config: RunConfig) -> bool:
    """Whether a run ended early at this checkpoint, and the settings that decided so are unchanged."""
    ended = source.facts.get("ended")
    return isinstance(ended, dict) and _without_export(ended) == what_may_end(config.evaluate, config.train.steps)


def _without_export(decides: dict[str, Any]) -> dict[str, Any]:
    """Leaves out export_best, which ends no run and had another default in older versions."""
    return {key: value for key, value in decides.items() if key != "export_best"}


def twice(train: TrainConfig, steps: int) -> str:
    """Returns the setting that doubles the length of a run that has trained for these steps."""
    return f"train.steps={2 * steps}" if train.epochs is None else f"train.epochs={2 * train.epochs}"


def check_model(source: Checkpoint, config: RunConfig, plan: Plan) -> None:
    """Raises a CheckpointError if a checkpoint belongs to another model or optimizer."""
    for key, ours in (("model", config.model.name), ("optimizer", config.optimizer.name.value)):
        theirs = source.facts.get(key)
        if theirs is not None and theirs != ours:
            remedy = "choose another directory with run=PATH, or start over with resume=never"
            raise CheckpointError(source.path, f"was saved with {key}={theirs}, but this run has {key}={ours}", remedy)
    held = {
        piece.path: Parameter(piece.path, piece.shape, trainable)
        for shard in plan.shards
        for trainable, pieces in ((True, shard.trainable), (False, shard.state))
        for piece in pieces
    }
    expected = checkpoint.shapes_of(held.values(), list(config.optimizer.slots()))
    checkpoint.check_fits(source, expected, frozen=plan.frozen.sha256)
    if plan.tables or source.facts.get("tables"):
        from trainer.storage import table_rows  # imports numpy, which other launches do not need

        table_rows.check_fits(source, plan.table_layout.blocks, plan.slots)


def check_data(source: Checkpoint, config: RunConfig, plan: Plan) -> None:
    """Compares the data with that of a checkpoint of the run, if the run continues from one of its own checkpoints.

    Raises:
        OtherDataError: if they differ.
        CheckpointError: if the checkpoint's manifest is damaged.
    """
    if config.resume != "auto":
        return
    try:
        before: Fingerprint = from_json(Fingerprint, source.facts.get("data", {}))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(source.path, "its manifest is damaged: facts/data") from error
    check_same(
        before,
        plan.fingerprint,
        source=describe_source(config.data.name, config.user),
        whose=f"the run had when it saved {source.path}",
        suspects=suspects(config.user),
        remedy=f"type {typed('resume', str(source.path))} to continue with other data, or run=PATH for another run",
    )


def change_of_sums(source: Checkpoint, plan: Plan) -> str:
    """Returns why a run sums gradients in another order than before a checkpoint; empty if it does not."""
    replicas = source.facts.get("replicas", plan.replicas)
    if not plan.effective_strategy.is_exact or plan.replicas == 1 == replicas:
        return ""
    if replicas != plan.replicas:
        return f"the checkpoint is of a run with {count(replicas, 'replica')}, and this one has {plan.replicas}"
    if plan.replicas > 2 and not plan.effective_strategy.has_ring and source.facts.get("order") != spans.ORDER:
        return "an earlier version saved the checkpoint, which summed gradients in another order"
    return ""


def set_aside(directory: RunDirectory, *more: Path) -> None:
    """Moves aside the results of an earlier run, and `more`, for a run that starts from step 0 in its directory."""
    d = directory
    made = (d.checkpoints, d.history, d.events, d.evaluations, d.best, d.rollbacks, d.export)
    if not any(path.exists() for path in made):
        return
    aside = directory.path / f"before-{time.strftime('%Y%m%d-%H%M%S')}"
    aside.mkdir()
    for path in (*made, *more):
        if path.exists():
            path.rename(aside / path.name)
    _log.info("starting from step 0; moved the files of an earlier run to %s", aside)


def set_aside_newer(directory: RunDirectory, *, step: int) -> None:
    """Moves the run's checkpoints aside if some are newer than the step it starts from; the best one likewise.

    An evaluator's scores of later steps are removed.
    """
    for folder in (directory.checkpoints, directory.best):
        if any(path.name.isdigit() and int(path.name) > step for path in folder.glob("*")):
            aside = folder.with_name(f"{folder.name}-until-{time.strftime('%Y%m%d-%H%M%S')}")
            folder.rename(aside)
            _log.info("moved newer checkpoints to %s", aside)
    if directory.evaluations.exists():
        History(directory.evaluations, start=step).close()
