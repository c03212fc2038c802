"""Reports how training goes: history.jsonl, TensorBoard events, lines in the log, and the summary at the end."""

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from trainer.config.schema import SaveErrorPolicy
from trainer.engine import optimizers
from trainer.engine.engine import Engine
from trainer.engine.sharded import staleness
from trainer.engine.step_result import StepResult
from trainer.engine.vectors.snapshot import Snapshot
from trainer.observe.task_page import TaskPage
from trainer.plan.environment import REPORTS_PROGRESS
from trainer.storage import history
from trainer.storage.history import History
from trainer.task.metrics import MetricResults
from trainer.task.pace import Every, Pace
from trainer.task.spec import TaskSpec
from trainer.task.tensorboard import Events

LOG_EVERY_SECS = 5.0

_log = logging.getLogger(__name__)


class Report:
    """Writes the metrics of the updates that are due."""

    def __init__(
        self,
        spec: TaskSpec,
        status: TaskPage,
        engine: Engine,
        metrics: MetricResults,
        history: History,
        events: Events,
        *,
        begun: int,
    ) -> None:
        """Begins.

        Args:
            metrics: from the sums of a step's result.
            begun: the last step that was reported.
        """
        self._config, self._plan, self._status, self._engine = spec.config, spec.plan, status, engine
        self._metrics, self._replicas = metrics, spec.plan.update_batch / spec.plan.replica_batch
        self._history, self.events = history, events
        self.logs_progress = spec.is_unsupervised or REPORTS_PROGRESS in os.environ  # no other process shows it
        self._every = Every(spec.config.history.every, start=begun)
        self._reported_at, self._reported_step = time.monotonic(), begun
        self._logged_at = time.monotonic()
        self._values: Mapping[str, float] = {}

    def update(self, result: StepResult) -> None:
        """Reports the update that led to a step, if it is due or the last one."""
        step = result.step
        if self._every.is_due(step) or (step == self._plan.steps and step > self._reported_step):
            self._report(result)

    def values_at(self, step: int) -> Mapping[str, float]:
        """Returns the values reported for a step: loss, metrics and rates; empty if none were."""
        return self._values if step == self._reported_step else {}

    def write_gradients(self, result: StepResult) -> None:
        if result.gradients is not None:
            self.events.histograms(result.step, {f"gradients/{k}": v for k, v in result.gradients.items()})
            self.events.flush()

    def write_parameters(self, snapshot: Snapshot) -> None:
        self.events.histograms(snapshot.step, {f"parameters/{k}": v for k, v in snapshot.parameters.items()})
        self.events.flush()

    def close(self) -> None:
        self._history.close()
        self.events.close()

    def _report(self, result: StepResult) -> None:
        now = time.monotonic()
        examples = self._plan.update_batch * (result.step - self._reported_step)
        rate = examples / max(now - self._reported_at, 1e-9)
        self._reported_at, self._reported_step = now, result.step
        step = tf.constant(result.step - 1, tf.int64)
        learning_rate = float(optimizers.learning_rate(self._config.optimizer, step, float(result.reductions)))
        metrics = self._metrics([self._replicas * value for value in result.sums])
        self._status.metrics = metrics
        if self._config.optimizer.varies_rate:
            self._status.learning_rate = learning_rate
        self._values = values = {"loss": result.loss, **metrics, "learning_rate": learning_rate}
        self._log_progress({**values, "step": result.step, "examples_per_second": rate}, now)
        try:
            self.events.scalars(result.step, values | {"examples_per_second": rate})
            self._write_contributions(result.step)
            self.events.flush()
            # Written last: a chief that takes over reports a step again if it has no line.
            self._history.write(result.step, values | {"examples_per_second": round(rate, 1)})
        except (OSError, tf.errors.ResourceExhaustedError) as error:
            if self._config.checkpoint.on_error is not SaveErrorPolicy("continue"):
                raise
            _log.warning("step %d was not written to the history: %s", result.step, error)

    def _log_progress(self, values: Mapping[str, float], now: float) -> None:
        """Logs a line every few seconds, or at each report if history.lines is set."""
        if self.logs_progress and (self._config.history.lines or now - self._logged_at >= LOG_EVERY_SECS):
            self._logged_at = now
            _log.info(history.describe(values, self._plan.steps, self._plan.update_batch, with_metrics=True))

    def _write_contributions(self, step: int) -> None:
        """Writes how stale each worker's gradients were, and how many were dropped; nothing if none can be stale."""
        table = self._engine.contributions()
        if table is None:
            return
        status, by_worker = self._status, staleness.to_json(table)
        status.contributions, status.dropped_as = by_worker, self._plan.effective_strategy.dropped_as
        for worker, counts in by_worker.items():
            scalars = {name: counts[name] for name in ("staleness_mean", "staleness_max", "dropped")}
            self.events.scalars(step, {f"{name}/{worker}": v for name, v in scalars.items() if v is not None})
        self.events.counts(step, {f"staleness/worker:{i}": row for i, row in enumerate(staleness.histogram(table))})


def summarize(spec: TaskSpec, status: TaskPage, step: int, pace: Pace) -> dict[str, Any]:
    """Returns the values of summary.json for a run that has reached a step."""
    plan = spec.plan
    first = status.first_step_at
    return {
        "run_dir": str(spec.directory.path),
        "cluster": plan.cluster,
        "strategy": plan.strategy,
        "seed": spec.config.seed,
        "steps": step,
        "resumed_from": None,
        "examples_per_second": round(plan.update_batch * pace.updates_per_second(), 1),
        "step_ms_p50": round(pace.percentile_ms(0.50), 3),
        "step_ms_p99": round(pace.percentile_ms(0.99), 3),
        "wait_fraction": round(pace.wait_fraction(), 4),
        "final_loss": status.loss,
        "learning_rate": status.learning_rate,
        "seconds": round(time.time() - status.started_at, 3),
        "time_to_first_step_secs": round(first - status.started_at, 3) if first else None,
        "first_step_at": first,
        "restarts": 0,
        "tasks": [task.name for task in plan.tasks],
    }


def log_summary(summary: Mapping[str, Any]) -> None:
    """Logs the result of the run, if no launcher prints it."""
    text = "".join(f", {name} {value:.4f}" for name, value in summary.items() if name.startswith("eval_"))
    _log.info("%d steps%s, params_sha256 %s", summary["steps"], text, summary["params_sha256"])
