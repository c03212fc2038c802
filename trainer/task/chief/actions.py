"""What worker 0 does besides its replica: the first state, checkpoints, history, events and the results."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.config.schema import NotFinitePolicy, RunConfig, SaveErrorPolicy
from trainer.engine import optimizers
from trainer.engine.engine import Engine
from trainer.engine.sharded import staleness
from trainer.engine.step_result import StepResult
from trainer.engine.vectors.snapshot import Snapshot
from trainer.faults.exit_codes import NotFiniteError
from trainer.observe.status import Status
from trainer.plan.plan import Plan
from trainer.storage import checkpoint, checkpoint_writer, evaluations, history
from trainer.storage.atomic import write_atomically
from trainer.storage.history import History
from trainer.storage.journal import Journal
from trainer.storage.rollbacks import record_rollback
from trainer.storage.run_directory import RunDirectory
from trainer.task.chief.export import export, params_sha256
from trainer.task.evaluator.score import Evaluator
from trainer.task.pace import Every, Pace
from trainer.task.tensorboard import Events

_log = logging.getLogger(__name__)

TELL_EVERY_SECS = 5.0


def _not_finite(snapshot: Snapshot) -> str | None:
    """The first parameter that holds NaN or infinity."""
    return next((path for path, value in snapshot.parameters.items() if not np.isfinite(value).all()), None)


def _make_writer(config: RunConfig, directory: RunDirectory, *, is_read: bool) -> checkpoint_writer.Writer:
    """The writer of the run's checkpoints.

    Args:
        is_read: whether an evaluator task waits for each of them.
    """
    keep = config.checkpoint.keep
    if not is_read:
        return checkpoint_writer.Writer(directory.checkpoints, keep=keep)
    # A launcher ends the run when the evaluator is gone; where there is none the disk could fill for nobody.
    at_most = None if config.job is None else evaluations.WAITING_AT_MOST
    release = evaluations.release_when_scored(directory.evaluations, waiting_at_most=at_most)
    return checkpoint_writer.Writer(directory.checkpoints, keep=keep, release=release)


def _say_and_go_on(error: OSError) -> None:
    _log.warning("%s: %s; training continues until the next save is due", error.filename, error.strerror)


class Chief:
    """The chief's actions: hand `between` and `after` to the loop, and call `finish` when it returns."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        directory: RunDirectory,
        *,
        engine: Engine,
        evaluator: Evaluator | None,
        status: Status,
        start: int,
        generation: int,
        journal: Journal,
        adopts: bool = False,
        missed: Sequence[StepResult] = (),
        tells: bool = False,
    ) -> None:
        """Takes what it works with.

        Args:
            evaluator: none where a task of its own scores every checkpoint; each then stays until it has its score.
            start: global step of the state.
            adopts: a chief before this one was ended, and the state is what it had: what it left undone is due.
            missed: the last updates before `start`; they are written down if they are not.
            tells: nobody else shows the progress, so the log does.
        """
        self._config, self._plan, self._directory = config, plan, directory
        self._engine, self._evaluator, self._status = engine, evaluator, status
        self._start, self._generation, self._journal = start, generation, journal
        self._writer = _make_writer(config, directory, is_read=evaluator is None)
        self._skips_bad_updates = config.train.on_not_finite is NotFinitePolicy.skip
        self._may_fail_to_save = config.checkpoint.on_error is SaveErrorPolicy("continue")  # but for the last time
        self._history = History(directory.history, start=start)
        self._events = Events(directory.events, start=start)
        self._tells, self._told_at = tells, time.monotonic()
        saved = [int(path.name) for path in checkpoint.finished(directory.checkpoints)] if adopts else []
        reported = self._history.last_step if missed else start
        self._reported_at, self._reported_step = time.monotonic(), reported
        self._saves, self._evaluates, self._draws, self._reports = (
            Every(interval, start=begun)
            for interval, begun in (
                (config.checkpoint.every, max(saved, default=0) if adopts else start),
                (config.evaluate.every if evaluator else 0, start),
                (config.summary.histogram_every, start),
                (config.summary.every, reported),
            )
        )
        for pulled in missed:
            self.after(pulled)

    def show_graph(self, devices: Mapping[str, str] | None = None) -> None:
        """Writes the engine's graph for TensorBoard.

        Args:
            devices: by operation, where each one really ran.
        """
        self._events.graph(self._engine.graph, devices)

    def between(self, step: int) -> None:
        """Whatever is due at a step; all of it looks at one snapshot."""
        self._writer.poll()
        save, evaluate, histograms = (every.is_due(step) for every in (self._saves, self._evaluates, self._draws))
        if not (save or evaluate or histograms):
            return
        snapshot = self._engine.snapshot()
        if save and (flaw := self._flaw(snapshot)):
            # No reason to end here: what all replicas see next tells it to all.
            _log.warning("step %d is not saved: %s", snapshot.step, flaw)
        elif save:
            self._save(snapshot, on_error=_say_and_go_on if self._may_fail_to_save else None)
        if evaluate:
            loss, accuracy = self._evaluate(snapshot)
            self._events.scalars(snapshot.step, {"evaluation/loss": loss, "evaluation/accuracy": accuracy})
            _log.info("step %d: eval_loss %.4f, eval_accuracy %.4f", snapshot.step, loss, accuracy)
        if histograms:
            self._events.histograms(snapshot.step, {f"parameters/{k}": v for k, v in snapshot.parameters.items()})

    def after(self, pulled: StepResult) -> None:
        """Writes down the metrics of the update that led to a step."""
        step = pulled.step
        if pulled.gradients is not None:
            self._events.histograms(step, {f"gradients/{k}": v for k, v in pulled.gradients.items()})
        if self._reports.is_due(step) or (step == self._plan.steps and step > self._reported_step):
            self._report(pulled)

    def finish(self, pace: Pace, *, stopped: bool, resumed_from: str | None) -> dict[str, Any]:
        """Saves, and evaluates unless the run was stopped early. Lets go of the engine last: others wait for this task.

        Returns:
            What the summary says of the training.
        """
        snapshot, table = self._engine.snapshot(), self._engine.contributions()
        try:
            self._save(snapshot)
            results = self._results(snapshot, pace, resumed_from)
            if self._evaluator and not stopped:
                self._status.state = "evaluating"
                loss, accuracy = self._evaluate(snapshot)
                results |= {"eval_loss": loss, "eval_accuracy": accuracy}
                self._events.scalars(snapshot.step, {"evaluation/loss": loss, "evaluation/accuracy": accuracy})
        finally:
            self._engine.leave()
        self._writer.close()
        self._history.close()
        self._events.close()
        if table is not None:
            results["contributions"] = staleness.to_json(table)
        return results | {"params_sha256": params_sha256(snapshot)}

    def export(self, model: Any) -> None:
        export(self._last, model, self._directory.export)

    def write_summary(self, results: dict[str, Any]) -> None:
        write_atomically(self._directory.summary, json.dumps(results, indent=1))
        if self._tells:
            scores = {name: results[name] for name in ("eval_loss", "eval_accuracy") if results.get(name) is not None}
            told = "".join(f", {name} {value:.4f}" for name, value in scores.items())
            _log.info("%d steps%s, params_sha256 %s", results["steps"], told, results["params_sha256"])

    def roll_back(self, step: int) -> None:
        """Writes down that the run goes back to its newest checkpoint, which may still be on its way to the disk.

        Args:
            step: whose update was left out.
        """
        self._writer.wait()
        saved = checkpoint.finished(self._directory.checkpoints)
        record_rollback(self._directory.rollbacks, step=step, checkpoint=int(saved[-1].name) if saved else None)

    def _flaw(self, snapshot: Snapshot) -> str | None:
        """Why a state must not be saved; it may be the first to tell that an update was left out."""
        if snapshot.bad and not self._skips_bad_updates:
            return "an update was left out"
        path = _not_finite(snapshot)
        return None if path is None else f"parameter {path} is not finite"

    def _save(self, snapshot: Snapshot, *, on_error: checkpoint_writer.OnError | None = None) -> None:
        if bad := _not_finite(snapshot):
            raise NotFiniteError(f"parameter {bad} is not finite at step {snapshot.step}; it is not saved")
        config = self._config
        facts: dict[str, Any] = {
            "model": config.model.name,
            "optimizer": config.optimizer.name.value,
            "slots": list(snapshot.slots),
            "seed": config.seed,
            "replicas": self._plan.replicas,
            "global_batch": self._plan.global_batch,
        }
        if snapshot.metrics is not None:
            facts["metrics"] = dict(zip(("loss", "accuracy"), snapshot.metrics, strict=True))
        self._journal.write("save", generation=self._generation, step=snapshot.step)
        before, self._status.state = (
            self._status.state,
            "saving",
        )  # it waits for the save before, on a slow disk for long
        self._writer.save(snapshot.step, self._generation, facts, snapshot.to_tensors(), on_error=on_error)
        self._status.state = before
        self._last = snapshot

    def _evaluate(self, snapshot: Snapshot) -> tuple[float, float]:
        assert self._evaluator is not None
        before, self._status.state = self._status.state, "evaluating"
        loss, accuracy = self._evaluator.score(snapshot)
        self._status.state = before
        return float(loss), float(accuracy)

    def _report(self, pulled: StepResult) -> None:
        now = time.monotonic()
        examples = self._plan.update_batch * (pulled.step - self._reported_step)
        rate = examples / max(now - self._reported_at, 1e-9)
        self._reported_at, self._reported_step = now, pulled.step
        learning_rate = float(optimizers.learning_rate(self._config.optimizer, tf.constant(pulled.step - 1, tf.int64)))
        values = {"loss": pulled.loss, "accuracy": pulled.accuracy, "learning_rate": learning_rate}
        self._tell({**values, "step": pulled.step, "examples_per_second": rate})
        try:
            self._history.write(pulled.step, values | {"examples_per_second": round(rate, 1)})
            self._events.scalars(pulled.step, values | {"examples_per_second": rate})
            self._report_contributions(pulled.step)
            self._events.flush()
        except (OSError, tf.errors.ResourceExhaustedError) as error:
            if not self._may_fail_to_save:
                raise
            _log.warning("step %d is not in the history: %s", pulled.step, error)

    def _tell(self, values: Mapping[str, float]) -> None:
        """Says how far the run is, every few seconds; every time it is reported, if that is wanted."""
        now = time.monotonic()
        if self._tells and (self._config.summary.lines or now - self._told_at >= TELL_EVERY_SECS):
            self._told_at = now
            _log.info(history.describe(values, self._plan.steps, self._plan.update_batch))

    def _report_contributions(self, step: int) -> None:
        """How stale each worker's gradients were, and how many were dropped; nothing where updates wait for all."""
        table = self._engine.contributions()
        if table is None:
            return
        for worker, told in staleness.to_json(table).items():
            scalars = {name: told[name] for name in ("staleness_mean", "staleness_max", "dropped")}
            self._events.scalars(step, {f"{name}/{worker}": v for name, v in scalars.items() if v is not None})
        self._events.counts(step, {f"staleness/worker:{i}": row for i, row in enumerate(staleness.histogram(table))})

    def _results(self, snapshot: Snapshot, pace: Pace, resumed_from: str | None) -> dict[str, Any]:
        first = self._status.first_step_at
        return {
            "run_dir": str(self._directory.path),
            "cluster": self._plan.cluster,
            "strategy": self._plan.strategy,
            "seed": self._config.seed,
            "steps": snapshot.step,
            "resumed_from": resumed_from,
            "examples_per_second": round(self._plan.update_batch * pace.updates_per_second(), 1),
            "step_ms_p50": round(pace.percentile_ms(0.50), 3),
            "step_ms_p99": round(pace.percentile_ms(0.99), 3),
            "wait_fraction": round(pace.wait_fraction(), 4),
            "final_loss": self._status.loss,
            "eval_loss": None,
            "eval_accuracy": None,
            "seconds": round(time.time() - self._status.started_at, 3),
            "time_to_first_step_secs": round(first - self._status.started_at, 3) if first else None,
            "first_step_at": first,
            "restarts": 0,
            "tasks": [task.name for task in self._plan.tasks],
        }
