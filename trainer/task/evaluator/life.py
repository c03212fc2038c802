"""The life of an evaluator task: it scores every checkpoint of a run, keeps the best, and leaves after the last one.

It is no part of the cluster that trains, and nobody waits for it. It reads the checkpoints where the chief writes them,
so both need the same run directory: under a scheduler `run=PATH` names one that all pods share. There it writes
`evaluations.jsonl`, `best/` and `events/evaluator`. The chief's status page tells it whether more is to come.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import tensorflow as tf

from trainer.config.schema import RunConfig
from trainer.engine.vectors.snapshot import Snapshot
from trainer.observe.peers import PeerError, read_status, roll_call
from trainer.observe.status import Status
from trainer.plan.plan import Plan, Task
from trainer.storage import checkpoint, checkpoint_writer, evaluations
from trainer.storage.checkpoint import Checkpoint, CheckpointError, Shapes
from trainer.storage.evaluations import Evaluation
from trainer.storage.history import History
from trainer.storage.run_directory import RunDirectory
from trainer.task.evaluator.score import Evaluator
from trainer.task.server import can_fuse, session_config
from trainer.task.tensorboard import Events
from trainer.workload.build import open_workload, parameters_of
from trainer.workload.data import DataSet

_log = logging.getLogger(__name__)

POLL_SECS = 0.2
LOOK_EVERY_SECS = 1.0  # at the chief's page
GONE_SECS = 60.0  # without an answer: more than a busy chief, or one that a scheduler starts again
BEGUN = ("training", "evaluating", "done")  # states of a chief that has moved away what it does not continue

Identity = tuple[int, int]  # of a folder: it changes when a checkpoint of the same step is saved again


class Stop(Protocol):
    """Whether this task was asked to stop."""

    requested: bool

    def let_step_finish(self) -> None: ...


def play(config: RunConfig, plan: Plan, directory: RunDirectory, task: Task, status: Status, stop: Stop) -> None:
    """Plays an evaluator task until the last checkpoint has its score, or somebody asks it to stop.

    Raises:
        PeerError: if the chief does not come up, or is gone before its last checkpoint.
        CheckpointError: if a checkpoint is of another model.
        OSError: if the run directory is not here, or cannot be written.
    """
    starts_elsewhere = config.resume != "auto" and not directory.has_loaded()
    finder = Finder(directory.checkpoints, may_be_moved=starts_elsewhere)  # before the chief saves any
    # What comes first decides the size of this process's thread pools, for all.
    devices = tf.compat.v1.Session(
        graph=tf.Graph(), config=session_config(task, peers=[], fuses=can_fuse(config.train))
    )
    status.is_listening = True
    model, data = open_workload(config)
    scorer = Scorer(config, directory, model, make_evaluator(config, task, model, data), status)
    chief = ChiefWatch(plan.task("worker", 0))
    if starts_elsewhere or not _has(directory.checkpoints, plan.steps):
        _meet(chief.task, config, directory, status, task.name)
    stop.let_step_finish()
    while not stop.requested:
        for path in scorer.unscored(finder.find(chief_has_begun=chief.has_begun)):
            if not stop.requested:
                scorer.score(path)
        if scorer.last_step >= plan.steps or stop.requested:
            break
        status.state = "waiting"
        gone_secs = chief.look()
        if gone_secs > GONE_SECS:
            raise PeerError(_gone(chief, directory, plan.steps))
        time.sleep(POLL_SECS)
    scorer.close()
    if not stop.requested:  # the chief saves no more, and left what had no score
        checkpoint_writer.prune(directory.checkpoints, scorer.last_step, config.checkpoint.keep)
    devices.close()
    status.state = "done"
    _log.info("done at step %d", status.step)


def make_evaluator(config: RunConfig, task: Task, model: Any, data: DataSet) -> Evaluator:
    """What scores a snapshot on the task's first GPU, or else its CPU."""
    evaluator = Evaluator(
        model,
        config.model.loss.value,
        data.evaluate,
        batch_size=config.evaluate.batch_size,
        device="/gpu:0" if task.gpus else "/cpu:0",
    )
    evaluator.connect("", session_config(task, peers=[], fuses=can_fuse(config.train)))
    return evaluator


def _meet(chief: Task, config: RunConfig, directory: RunDirectory, status: Status, name: str) -> None:
    """Returns when the chief of this run is up, and its directory is here."""
    status.state = "roll call"
    deadline_secs, began = config.timeouts.roll_call_secs, time.monotonic()
    roll_call(
        status,
        [chief],
        until="is_listening",
        deadline_secs=deadline_secs,
        report=_log.info,
    )
    while not directory.path.is_dir():
        if time.monotonic() - began > deadline_secs:
            raise FileNotFoundError(
                f"{directory.path} is not here after {deadline_secs:g} s, and {chief.name} is up; {name} reads the "
                "checkpoints where the chief writes them: mount the directory of run=PATH in both"
            )
        time.sleep(POLL_SECS)


def _has(folder: Path, step: int) -> bool:
    return any(int(path.name) >= step for path in checkpoint.finished(folder))


def _gone(chief: ChiefWatch, directory: RunDirectory, steps: int) -> str:
    last = directory.checkpoints / f"{steps:09d}"
    return (
        f"{chief.task.name} at {chief.task.control} has not answered for {GONE_SECS:.0f} s; training stopped at step "
        f"{chief.step} of {steps}, as far as it told, and {last} is not there. The same command continues; if "
        f"training did end, mount the directory that {chief.task.name} wrote"
    )


class ChiefWatch:
    """What the chief tells of itself, and for how long it has been silent."""

    def __init__(self, task: Task, *, now: Callable[[], float] = time.monotonic) -> None:
        self.task, self._now = task, now
        self.step, self.has_begun = 0, False
        self._looked_at = now() - LOOK_EVERY_SECS
        self._gone_since: float | None = None

    def look(self) -> float:
        """Reads the chief's page, if it was not read just now; returns for how many seconds it has been gone."""
        now = self._now()
        if now - self._looked_at >= LOOK_EVERY_SECS:
            self._looked_at = now
            try:
                page = read_status(self.task.control, timeout_secs=2.0)
            except (OSError, ValueError):
                # Not since it last answered: while a checkpoint was scored nobody asked.
                self._gone_since = now if self._gone_since is None else self._gone_since
            else:
                self._gone_since = None
                self.step, self.has_begun = page["step"], self.has_begun or page["state"] in BEGUN
        return 0.0 if self._gone_since is None else now - self._gone_since


class Finder:
    """Finds the checkpoints of this run. What an earlier one left is not among them if the chief may yet move it."""

    def __init__(self, folder: Path, *, may_be_moved: bool) -> None:
        self._folder = folder
        self._left = {_identity(path) for path in checkpoint.finished(folder)} if may_be_moved else None

    def find(self, *, chief_has_begun: bool) -> list[Path]:
        """By rising step; none before the chief has begun, which a checkpoint of its own tells too."""
        found = checkpoint.finished(self._folder)
        if self._left is not None and not chief_has_begun and self._left.issuperset(map(_identity, found)):
            return []
        self._left = None
        return found


def _identity(path: Path) -> Identity | None:
    """None for one that is gone."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


class Scorer:
    """Scores checkpoints, writes down what it finds, and keeps the best."""

    def __init__(
        self, config: RunConfig, directory: RunDirectory, model: Any, evaluator: Evaluator, status: Status
    ) -> None:
        """Touches nothing yet: what an earlier run left may have to be moved away first."""
        self._directory, self._evaluator, self._status = directory, evaluator, status
        self._metric = evaluations.metric_of(config.model.loss, config.evaluate.best_metric)
        self._expected = {
            f"{'parameters' if p.trainable else 'state'}/{p.path}": p.shape
            for p in parameters_of(model, config.train.precision.value)
        }
        self._scored: set[int] | None = None  # steps
        self._damaged: set[Identity | None] = set()
        self._best: Evaluation | None = None

    @property
    def last_step(self) -> int:
        """The highest step that has a score; -1 if none has."""
        return max(self._scored or (), default=-1)

    def unscored(self, found: list[Path]) -> list[Path]:
        """Those of the checkpoints that have no score, and could be read."""
        if not found:
            return []
        if self._scored is None:
            self._scored = self._open(newest=int(found[-1].name))
        scored = self._scored
        return [p for p in found if int(p.name) not in scored and _identity(p) not in self._damaged]

    def score(self, path: Path) -> None:
        """Scores a checkpoint; one that is damaged is passed over and said.

        Raises:
            CheckpointError: if it is of another model.
        """
        self._status.state = "evaluating"
        began, identity = time.monotonic(), _identity(path)
        try:
            found = checkpoint.read_manifest(path)
            checkpoint.verify(found)
            tensors = checkpoint.load(found)
        except CheckpointError as error:
            _log.warning("skipping a damaged checkpoint: %s: %s", error.path, error.problem)
            self._damaged.add(identity)
            return
        checkpoint.check_fits(_without_slots(found), self._expected)
        loss, accuracy = self._evaluator.score(Snapshot.from_tensors(found.step, tensors))
        evaluation = Evaluation(found.step, float(loss), float(accuracy), round(time.monotonic() - began, 3))
        is_best = evaluations.is_better(evaluation, self._best, self._metric)
        if is_best:
            self._keep(path, evaluation)
        self._write(evaluation)  # last: a step without a line is scored again
        note = ", the best so far" if is_best else ""
        _log.info("step %d: eval_loss %.4f, eval_accuracy %.4f%s", found.step, loss, accuracy, note)

    def close(self) -> None:
        if self._scored is not None:
            self._lines.close()
            self._events.close()

    def _open(self, *, newest: int) -> set[int]:
        """Continues what this task wrote before; returns the steps that have a score.

        Args:
            newest: step of the newest checkpoint; scores of later ones are of another past.
        """
        self._lines = History(self._directory.evaluations, start=newest)
        scored = {evaluation.step for evaluation in evaluations.read(self._directory.evaluations)}
        self._events = Events(self._directory.events / "evaluator", start=max(scored, default=0))
        held = evaluations.best(self._directory.best)
        self._best = held[0] if held else None
        self._status.step = max(scored, default=0)
        return scored

    def _keep(self, path: Path, evaluation: Evaluation) -> None:
        try:
            evaluations.keep_as_best(self._directory.best, path, evaluation)
        except FileNotFoundError:  # the chief keeps only so many for an evaluator that is late
            _log.warning("step %d has the best score, but its checkpoint was removed meanwhile", evaluation.step)
        else:
            self._best = evaluation

    def _write(self, evaluation: Evaluation) -> None:
        assert self._scored is not None
        values = evaluation.to_json()
        step = values.pop("step")
        self._lines.write(step, values)
        self._events.scalars(step, {"evaluation/loss": evaluation.loss, "evaluation/accuracy": evaluation.accuracy})
        self._events.flush()
        self._scored.add(step)
        self._status.step, self._status.loss = step, evaluation.loss


def _without_slots(found: Checkpoint) -> Checkpoint:
    """What of a checkpoint the score depends on."""
    kept: Shapes = {name: shape for name, shape in found.tensors.items() if not name.startswith("slots/")}
    return replace(found, tensors=dict(kept))
