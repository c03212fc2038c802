"""What an evaluator task leaves in the run directory: a line for each checkpoint it scored, and the best of them.

    <run>/evaluations.jsonl              {"step": 100, "loss": 0.31, "accuracy": 0.91, "seconds": 0.4}, in step order
    <run>/best/000000100/                the checkpoint, and evaluation.json, its line

The best is replaced by one that is already there in full, so there is always a whole one, whatever is killed. Pure
files: the launcher and the chief read them without TensorFlow.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.config.schema import LossName, MetricName, RunConfig
from trainer.storage import checkpoint, checkpoint_writer
from trainer.storage.checkpoint import CheckpointError
from trainer.storage.checkpoint_writer import Release
from trainer.storage.run_directory import RunDirectory

_log = logging.getLogger(__name__)

NOTE = "evaluation.json"
WAITING_AT_MOST = 20  # checkpoints kept for an evaluator that nobody watches: it may be gone


@dataclass(frozen=True)
class Evaluation:
    """The score of one checkpoint."""

    step: int
    loss: float
    accuracy: float
    seconds: float  # that it took, with reading the checkpoint

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read(path: Path) -> list[Evaluation]:
    """All lines of evaluations.jsonl but one that a crash cut off; nothing if there is no file."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    found = (_parse(line) for line in lines)
    return [evaluation for evaluation in found if evaluation is not None]


def _parse(text: str) -> Evaluation | None:
    try:
        return Evaluation(**json.loads(text))
    except (ValueError, TypeError):
        return None


def metric_of(config: RunConfig) -> MetricName:
    """What says which checkpoint is the best: a loss that does not classify has no accuracy to compare."""
    classifies = config.model.loss is not LossName.mean_squared_error
    return config.evaluate.best_metric if classifies else MetricName.loss


def is_better(one: Evaluation, other: Evaluation | None, metric: MetricName) -> bool:
    """Whether one is to replace the other as the best; on a tie the other stays. A score that is NaN is never good."""
    if math.isnan(getattr(one, metric.value)):
        return False
    if other is None:
        return True
    return one.accuracy > other.accuracy if metric is MetricName.accuracy else one.loss < other.loss


def best(folder: Path) -> tuple[Evaluation, Path] | None:
    """The best checkpoint so far, with its score. Where a crash left two, the later one was to replace the other."""
    for path in reversed(checkpoint.finished(folder)):
        try:
            checkpoint.read_manifest(path)
            evaluation = _parse((path / NOTE).read_text())
        except (CheckpointError, OSError):
            continue
        if evaluation is not None:
            return evaluation, path
    return None


def keep_as_best(folder: Path, source: Path, evaluation: Evaluation) -> Path:
    """Makes a checkpoint the best: first it is there, then those before it go.

    Raises:
        OSError: if the checkpoint is gone, or the disk fails or is full.
    """
    kept = checkpoint_writer.copy(source, folder, {NOTE: json.dumps(evaluation.to_json(), indent=1)})
    for path in checkpoint.finished(folder):
        if path != kept:
            checkpoint_writer.remove(path)
    return kept


def release_when_scored(evaluations: Path, *, waiting_at_most: int | None) -> Release:
    """For the chief's checkpoints: one that the evaluator has yet to score stays.

    Args:
        waiting_at_most: how many stay for it; none: all, where a launcher ends the run if the evaluator fails.
    """

    def release(due: Sequence[int]) -> list[int]:
        scored = max((evaluation.step for evaluation in read(evaluations)), default=-1)
        waiting = [step for step in due if step > scored]
        given_up = [] if waiting_at_most is None else waiting[: max(0, len(waiting) - waiting_at_most)]
        for step in given_up:
            _log.warning("checkpoint %d is not scored: %d later ones wait for the evaluator", step, waiting_at_most)
        return [*(step for step in due if step <= scored), *given_up]

    return release


def results(directory: RunDirectory, step: int | None) -> dict[str, Any]:
    """What the summary says of the scores.

    Args:
        step: the last of the run, if it came to that.
    """
    last = next((e for e in read(directory.evaluations) if e.step == step), None)
    scores = {} if last is None else {"eval_loss": last.loss, "eval_accuracy": last.accuracy}
    found = best(directory.best)
    if found is None:
        return scores | {"best": None}
    top, path = found
    return scores | {"best": {"step": top.step, "loss": top.loss, "accuracy": top.accuracy, "path": str(path)}}
