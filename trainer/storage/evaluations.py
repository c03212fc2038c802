"""Stores the evaluations of a run: a line for each scored state, and a copy of the best one.

    <run>/evaluations.jsonl              {"step": 100, "loss": 0.31, "accuracy": 0.91, "seconds": 0.4}, in step order
    <run>/best/000000100/                the checkpoint, and evaluation.json, its line

The previous best is removed only when the new one is complete, so there is always one, whichever process is killed. The
launcher and the chief read these files too.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.schema import BestIs, EvaluateConfig
from trainer.storage import checkpoint, checkpoint_writer
from trainer.storage.atomic import remove_folder, write_atomically
from trainer.storage.checkpoint import CheckpointError, Facts, Tensors
from trainer.storage.checkpoint_writer import Release
from trainer.storage.json_lines import is_measured, lines, parse
from trainer.storage.run_directory import RunDirectory

if TYPE_CHECKING:
    from trainer.storage.table_rows import ChangedRows

_log = logging.getLogger(__name__)

NOTE = "evaluation.json"
ERRORS: tuple[str, ...] = ("loss", "error", "crossentropy", "divergence", "hinge", "poisson", "log_cosh")
ERRORS += ("mse", "mae", "mape", "msle", "rmse", "false_positives", "false_negatives")
WAITING_AT_MOST = 20  # checkpoints kept for an unsupervised evaluator, which may have died


@dataclass(frozen=True)
class Evaluation:
    """The score of one checkpoint."""

    step: int
    scores: Mapping[str, float]  # the loss and the metrics
    seconds: float  # spent, with reading the checkpoint

    def to_json(self) -> dict[str, float]:
        return {"step": self.step, **self.scores, "seconds": self.seconds}


def describe(scores: Mapping[str, float]) -> str:
    """Formats scores for people: eval_loss 0.1234, eval_accuracy 0.9876."""
    return ", ".join(f"eval_{name} {value:.4f}" for name, value in scores.items())


def read(path: Path) -> list[Evaluation]:
    """Reads evaluations.jsonl, except lines that are cut off or damaged; empty if there is no file."""
    return [evaluation for line in lines(path) if (evaluation := _evaluation(line)) is not None]


def _evaluation(values: Mapping[str, Any] | None) -> Evaluation | None:
    if values is None or not is_measured(values) or not {"loss", "seconds"} <= values.keys():
        return None
    scores = {name: value for name, value in values.items() if name not in ("step", "seconds")}
    return Evaluation(values["step"], scores, values["seconds"])


def is_better(one: Evaluation, other: Evaluation | None, config: EvaluateConfig) -> bool:
    """Whether `one` replaces `other` as the best; on a tie the other stays. NaN is never better."""
    metric = metric_of(one.scores, config.best_metric)
    if math.isnan(one.scores[metric]):
        return False
    if other is None or metric not in other.scores:
        return True
    new, old = one.scores[metric], other.scores[metric]
    return new < old if prefers_less(metric, config.best_is) else new > old


def metric_of(names: Container[str], metric: str | None) -> str:
    """Returns the metric that compares evaluations; for None the accuracy, or the loss if there is no accuracy."""
    return metric or ("accuracy" if "accuracy" in names else "loss")


def prefers_less(metric: str, best_is: BestIs) -> bool:
    """Whether the lowest value of a metric is the best."""
    return is_error(metric) if best_is is BestIs.auto else best_is is BestIs.lowest


def is_error(metric: str) -> bool:
    """Whether lower is better for a metric, judged by its Keras name: loss, mean_squared_error, rmse."""
    return any(word in metric for word in ERRORS)


def best(folder: Path) -> tuple[Evaluation, Path] | None:
    """Returns the best checkpoint so far, with its score; if a crash left two, the later one."""
    for path in reversed(checkpoint.finished(folder)):
        try:
            checkpoint.read_manifest(path)
            evaluation = _evaluation(parse((path / NOTE).read_bytes()))
        except (CheckpointError, OSError):
            continue
        if evaluation is not None:
            return evaluation, path
    return None


def keep_as_best(folder: Path, source: Path, evaluation: Evaluation) -> Path:
    """Makes a checkpoint the best: copies it, then removes its predecessors.

    Raises:
        OSError: if the checkpoint does not exist, or the disk fails or is full.
    """
    copy = checkpoint_writer.copy(source, folder, {NOTE: json.dumps(evaluation.to_json(), indent=1)})
    for path in checkpoint.finished(folder):
        if path != copy:
            remove_folder(path)
    return copy


def save_as_best(
    folder: Path,
    generation: int,
    facts: Facts,
    tensors: Tensors,
    evaluation: Evaluation,
    rows: ChangedRows | None = None,
) -> None:
    """Saves a state as the best, then removes its predecessors.

    Raises:
        OSError: if the disk fails or is full.
    """
    remove_folder(folder / f"{evaluation.step:09d}")  # of a state that was given up
    path = checkpoint_writer.write(folder, evaluation.step, generation, facts, tensors, keep=2, rows=rows)
    write_atomically(path / NOTE, json.dumps(evaluation.to_json(), indent=1))
    for other in checkpoint.finished(folder):
        if other != path:
            remove_folder(other)


def remove_best_after(folder: Path, step: int) -> None:
    """Removes the best of a discarded history, for a run that restarts from an earlier step."""
    for path in checkpoint.finished(folder):
        if int(path.name) > step:
            remove_folder(path)


def release_when_scored(evaluations: Path, *, waiting_at_most: int | None) -> Release:
    """Decides when the chief may remove a checkpoint: once it is scored, or more than `waiting_at_most` are waiting.

    None keeps all of them, where a launcher ends the run if the evaluator fails.
    """

    def release(due: Sequence[int]) -> list[int]:
        scored = max((evaluation.step for evaluation in read(evaluations)), default=-1)
        waiting = [step for step in due if step > scored]
        given_up = [] if waiting_at_most is None else waiting[: max(0, len(waiting) - waiting_at_most)]
        for step in given_up:
            _log.warning("checkpoint %d will not be scored: %d newer ones are waiting", step, waiting_at_most)
        return [*(step for step in due if step <= scored), *given_up]

    return release


def results(directory: RunDirectory, step: int | None) -> dict[str, Any]:
    """Returns the scores for the summary: of the run's last step, if it was reached, and of the best checkpoint."""
    last = next((e for e in read(directory.evaluations) if e.step == step), None)
    scores = {} if last is None else {f"eval_{name}": value for name, value in last.scores.items()}
    return scores | {"best": best_result(directory)}


def best_result(directory: RunDirectory) -> dict[str, Any] | None:
    """Returns the summary's values of the best checkpoint, if there is one."""
    scored = best(directory.best)
    return None if scored is None else {"step": scored[0].step, **scored[0].scores, "path": str(scored[1])}
