"""Scores parameters, and the checkpoints of a run, on the evaluation examples."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from trainer.config.schema import EvaluateConfig
from trainer.engine.frozen import Copy
from trainer.engine.tables.mapping import private
from trainer.engine.tables.touches import Touches
from trainer.engine.tables.worker import NO_TABLES, Tables, TableWorker
from trainer.engine.vectors.snapshot import Snapshot
from trainer.observe.task_page import TaskPage, TaskState
from trainer.plan.plan import Plan
from trainer.plan.table_layout import TableLayout
from trainer.plan.tables import Block, blocks_of
from trainer.storage import checkpoint, evaluations, table_rows
from trainer.storage.checkpoint import Checkpoint, CheckpointError
from trainer.storage.evaluations import Evaluation
from trainer.storage.history import History
from trainer.storage.run_directory import RunDirectory
from trainer.task import table_files
from trainer.task.beside import run_beside
from trainer.task.metrics import MetricResults
from trainer.task.tensorboard import Events
from trainer.workload import step
from trainer.workload.build import parameters_of
from trainer.workload.data.errors import users_code
from trainer.workload.data.pipeline import evaluation_batches
from trainer.workload.objective import Objective
from trainer.workload.tracing import lookups_of
from trainer.workload.workload import Workload

v1 = tf.compat.v1

Identity = tuple[int, int]  # of a checkpoint's folder: it changes when the same step is saved again

_log = logging.getLogger(__name__)


class ModelCopy:
    """A separate graph with one copy of the parameters, which computes a result for each evaluation batch."""

    def __init__(
        self,
        workload: Workload,
        make: Callable[[Objective], Callable[..., Any]],
        *,
        batch_size: int,
        device: str,
        steps: int | None = None,
        tables: Tables = NO_TABLES,
    ) -> None:
        """Builds the graph.

        Args:
            make: builds a function of (parameters, state, batch, rows), as `step.make_evaluation` does.
            steps: number of batches; None: all.
            tables: read the current rows when a batch is computed.
        """
        objective = workload.objective
        self._frozen = Copy(workload.frozen)
        with tf.Graph().as_default() as self._graph, tf.device(device):
            self._variables = {  # by number, because a path may hold what the name of a variable may not
                p.path: v1.get_variable(
                    f"parameter_{number}", p.shape, initializer=v1.zeros_initializer(), use_resource=True
                )
                for number, p in enumerate(step.parameters_of(workload.model, objective.frozen))
            }
            self._feeds = {path: v1.placeholder(tf.float32, v.shape) for path, v in self._variables.items()}
            self._assign = [v.assign(self._feeds[path], read_value=False) for path, v in self._variables.items()]
            self._batches = evaluation_batches(
                workload.data.evaluate, batch_size=batch_size, steps=steps, derive=tables.touches.of
            )
            values = {path: v.read_value() for path, v in self._variables.items()}
            state = values | self._frozen.tensors("frozen")
            compute = tf.function(make(objective), autograph=False)
            batch = self._batches.batch
            rows = tables.read(self._batches.derived)
            with users_code("evaluation", alone=False):
                self._results = compute(values, state, batch, rows), tf.shape(batch.tensors[0])[0]

    def connect(self, target: str, session_config: Any) -> None:
        """Opens the session on the task's own devices."""
        self._session = v1.Session(target, graph=self._graph, config=session_config)
        self._frozen.load(self._session)

    def results(self, snapshot: Snapshot) -> Iterator[tuple[Any, int]]:
        """Yields each batch's result and size; with the averaged parameters if the optimizer keeps them."""
        values = evaluated(snapshot) | snapshot.state
        self._session.run(self._assign, {feed: values[path] for path, feed in self._feeds.items()})
        self._session.run(self._batches.initializer, self._batches.feed_dict)
        with contextlib.suppress(tf.errors.OutOfRangeError):
            while True:
                yield self._session.run(self._results)


class Evaluator(ModelCopy):
    """Computes the loss and the metrics."""

    def __init__(self, workload: Workload, **options: Any) -> None:
        self._metrics = MetricResults(workload.objective)
        self.examples = 0  # of the last evaluation, so far
        super().__init__(workload, step.make_evaluation, **options)

    def score(self, snapshot: Snapshot, goes_on: Callable[[int], bool] = lambda _: True) -> dict[str, float]:
        """Returns the loss and the metrics over all examples.

        Args:
            goes_on: called now and then with the number of examples so far; returns whether to continue.

        Raises:
            AbandonedError: if `goes_on` returns False.
        """
        losses = 0.0
        sums: Any = 0.0
        self.examples = 0

        def add_all() -> None:
            nonlocal losses, sums
            for (loss, more), size in self.results(snapshot):
                losses, sums, self.examples = losses + float(loss) * size, sums + more, self.examples + int(size)

        run_beside(add_all, lambda: goes_on(self.examples))
        return {"loss": float(losses / self.examples)} | self._metrics(sums)


def make_evaluator(section: EvaluateConfig, workload: Workload, device: str, tables: Tables = NO_TABLES) -> Evaluator:
    """Returns the evaluator of a run's model on its data."""
    return Evaluator(workload, batch_size=section.batch_size, device=device, steps=section.steps, tables=tables)


def evaluated(snapshot: Snapshot) -> dict[str, Any]:
    """Returns the parameters to score and to export: the moving average, if there is one."""
    return snapshot.slots.get("ema") or snapshot.parameters


class FittingRows:
    """The rows of a run's tables in this process, with the values of a checkpoint that fits the run's model."""

    def __init__(self, plan: Plan, workload: Workload, *, precision: str, seed: int) -> None:
        """Makes the memory; `tables` reads it for an evaluator."""
        self._rows = private(TableLayout(blocks_of(plan.tables, 1), (), 1, 0))
        self.tables = TableWorker(self._rows, Touches(self._blocks, partial(lookups_of, workload.objective)))
        parameters = parameters_of(workload.model, precision, workload.objective.frozen)
        self._expected, self._frozen, self._seed = checkpoint.shapes_of(parameters, []), plan.frozen.sha256, seed

    @property
    def _blocks(self) -> list[Block]:
        return [memory.block for memory in self._rows]

    def load(self, source: Checkpoint) -> None:
        """Gives the rows the values of a checkpoint.

        Raises:
            CheckpointError: if it is of another model; slots of the optimizer do not count.
        """
        tensors = {name: shape for name, shape in source.tensors.items() if not name.startswith("slots/")}
        checkpoint.check_fits(replace(source, tensors=tensors), self._expected, frozen=self._frozen)
        table_rows.check_fits(source, self._blocks, None)
        table_files.load_into(self._rows, source.path, seed=self._seed)


class CheckpointScorer:
    """Scores checkpoints, records the scores, and keeps the best checkpoint."""

    def __init__(
        self,
        section: EvaluateConfig,
        directory: RunDirectory,
        evaluator: Evaluator,
        status: TaskPage,
        rows: FittingRows,
    ) -> None:
        """Opens nothing yet: the files of an earlier run may have to be moved away first."""
        self._directory, self._evaluator, self._status = directory, evaluator, status
        self._evaluate, self._rows = section, rows
        self._scored: set[int] | None = None  # steps
        self._damaged: set[Identity | None] = set()
        self._best: Evaluation | None = None

    @property
    def last_step(self) -> int:
        """Returns the highest step that has a score; -1 if none has."""
        return max(self._scored or (), default=-1)

    def unscored(self, paths: list[Path]) -> list[Path]:
        """Returns the checkpoints that have no score yet, and are not known to be damaged."""
        if not paths:
            return []
        if self._scored is None:
            self._scored = self._open(newest=int(paths[-1].name))
        scored = self._scored
        return [p for p in paths if int(p.name) not in scored and identity_of(p) not in self._damaged]

    def score(self, path: Path) -> None:
        """Scores a checkpoint; skips a damaged one.

        Raises:
            AbandonedError: if the task is asked to stop.
            CheckpointError: if it is of another model.
        """
        self._status.state, self._status.evaluated = TaskState.evaluating, 0
        began, identity = time.monotonic(), identity_of(path)
        try:
            source = checkpoint.read_manifest(path)
            checkpoint.verify(source)
            tensors = checkpoint.load(source)
        except CheckpointError as error:
            _log.warning("skipping a damaged checkpoint: %s: %s", error.path, error.problem)
            self._damaged.add(identity)
            return
        self._rows.load(source)
        scores = self._evaluator.score(Snapshot.from_tensors(source.step, tensors), self._goes_on)
        evaluation = Evaluation(source.step, scores, round(time.monotonic() - began, 3))
        is_best = evaluations.is_better(evaluation, self._best, self._evaluate)
        if is_best:
            self._keep(path, evaluation)
        self._write(evaluation)  # last: a step without a line is scored again
        note = ", the best so far" if is_best else ""
        _log.info("step %d: %s%s", source.step, evaluations.describe(scores), note)

    def _goes_on(self, examples: int) -> bool:
        self._status.evaluated = examples
        return not self._status.is_stopping

    def close(self) -> None:
        if self._scored is not None:
            self._lines.close()
            self._events.close()

    def _open(self, *, newest: int) -> set[int]:
        """Continues the files of an earlier attempt; returns the steps that have a score.

        Args:
            newest: step of the newest checkpoint; later scores belong to a discarded state.
        """
        self._lines = History(self._directory.evaluations, start=newest)
        scored = {evaluation.step for evaluation in evaluations.read(self._directory.evaluations)}
        self._events = Events(self._directory.events / "evaluator", start=max(scored, default=0))
        best = evaluations.best(self._directory.best)
        self._best = best[0] if best else None
        self._status.step = max(scored, default=0)
        return scored

    def _keep(self, path: Path, evaluation: Evaluation) -> None:
        try:
            evaluations.keep_as_best(self._directory.best, path, evaluation)
        except FileNotFoundError:  # the chief keeps only a few for an evaluator that is late
            _log.warning("step %d has the best score, but its checkpoint has since been removed", evaluation.step)
        else:
            self._best = evaluation

    def _write(self, evaluation: Evaluation) -> None:
        assert self._scored is not None
        step = evaluation.step
        self._events.scalars(step, {f"evaluation/{name}": value for name, value in evaluation.scores.items()})
        self._events.flush()
        self._lines.write(step, {**evaluation.scores, "seconds": evaluation.seconds})
        self._scored.add(step)
        self._status.step, self._status.loss = step, evaluation.scores["loss"]


def identity_of(path: Path) -> Identity | None:
    """Identifies a checkpoint among others of the same step; None for one that was removed."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns
