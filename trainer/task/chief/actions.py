"""What worker 0 does beside its replica: saves, evaluates and draws histograms between steps, and ends the run."""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainer.config.schema import NotFinitePolicy, RunConfig, SaveErrorPolicy
from trainer.engine.engine import Engine
from trainer.engine.sharded import staleness
from trainer.engine.sharded.worker import ShardedEngine
from trainer.engine.step_result import StepResult
from trainer.engine.tables.mapping import map_rows
from trainer.engine.tables.memory import BlockMemory
from trainer.engine.vectors.snapshot import Snapshot
from trainer.faults.exit_codes import NotFiniteError
from trainer.observe.task_page import TaskPage, TaskState
from trainer.plan.environment import REPORTS_PROGRESS
from trainer.plan.serialize import to_json
from trainer.storage import checkpoint, checkpoint_writer, evaluations, resume
from trainer.storage.atomic import write_atomically
from trainer.storage.checkpoint import Checkpoint, CheckpointError
from trainer.storage.evaluations import Evaluation
from trainer.storage.history import History
from trainer.storage.journal import Save
from trainer.storage.rollbacks import record_rollback
from trainer.storage.run_directory import RunDirectory
from trainer.storage.table_rows import ChangedRows
from trainer.task import model_card, table_files
from trainer.task.beside import AbandonedError
from trainer.task.chief.asked import Questions, SaveDue
from trainer.task.chief.ending import Hooks
from trainer.task.chief.initial_state import InitialState
from trainer.task.chief.judge import Judge
from trainer.task.chief.report import Report, log_summary, summarize
from trainer.task.context import Context
from trainer.task.evaluator.score import Evaluator
from trainer.task.export import export_run, params_sha256
from trainer.task.loop import AfterStep, BetweenSteps
from trainer.task.metrics import MetricResults
from trainer.task.pace import Every, Pace
from trainer.task.tensorboard import Events
from trainer.workload.build import Workload
from trainer.workload.data.examples import is_of_storage
from trainer.workload.error_text import first_line
from trainer.workload.objective import Objective
from trainer.workload.serving import Written

_log = logging.getLogger(__name__)

OnSnapshot = Callable[[Snapshot], Any]


@dataclass(frozen=True)
class Saver:
    """Saves snapshots as checkpoints; a state that is not sound never."""

    context: Context
    writer: checkpoint_writer.Writer
    generation: int
    source: str | None = None  # the checkpoint that the state was loaded from
    rows_after: Callable[[int], Any] | None = None  # the changed rows of tables that are not in memory of this task

    def save_if_sound(self, snapshot: Snapshot) -> None:
        """Saves between two steps; what is wrong with the state ends the run later, in all replicas alike."""
        config, rows = self.context.config, self._changed_rows(snapshot.step)
        if problem := _problem(snapshot, rows, skips_bad_updates=config.train.on_not_finite is NotFinitePolicy.skip):
            _log.warning("step %d was not saved: %s", snapshot.step, problem)
            return
        self._save(snapshot, rows, _log_and_continue if self._may_fail else None)

    @property
    def _may_fail(self) -> bool:
        return self.context.config.checkpoint.on_error is SaveErrorPolicy("continue")

    def save_last(self, snapshot: Snapshot) -> None:
        """Saves the final state of a run; if this fails, so does the run.

        Raises:
            NotFiniteError: if a parameter is NaN or infinite.
        """
        rows = self._changed_rows(snapshot.step)
        if bad := _first_bad_parameter(snapshot, rows):
            raise NotFiniteError(f"parameter {bad} is not finite at step {snapshot.step}; it is not saved")
        self._save(snapshot, rows, None)

    def save_unless_saved(self, snapshot: Snapshot) -> None:
        """Does what `save_last` does, unless there is a checkpoint of that step."""
        self.writer.wait()
        if not (self.context.directory.checkpoints / f"{snapshot.step:09d}").is_dir():
            self.save_last(snapshot)

    def save_if_best(self, snapshot: Snapshot, evaluation: Evaluation) -> None:
        """Keeps a sound state whose evaluation is the best so far."""
        folder = self.context.directory.best
        best = evaluations.best(folder)
        is_best = evaluations.is_better(evaluation, best[0] if best else None, self.context.config.evaluate)
        if not is_best:
            return
        rows = self._changed_rows(snapshot.step)
        if _first_bad_parameter(snapshot, rows):
            return
        tensors = snapshot.to_tensors()
        try:
            evaluations.save_as_best(folder, self.generation, self._facts(snapshot), tensors, evaluation, rows)
        except OSError as error:
            if not self._may_fail:
                raise
            _log_and_continue(error)

    def _changed_rows(self, step: int) -> ChangedRows | None:
        """Copies of the rows of tables that the newest checkpoint of this state does not have."""
        plan = self.context.plan
        if not plan.tables:
            return None
        self.writer.wait()  # that one may still be on its way to the disk
        base = self._newest(step)
        if self.rows_after is None:
            return table_files.changed_rows(self.context.tables, step, base)
        return table_files.received_rows(plan.table_layout, self.rows_after(base.step if base else 0), step, base)

    def _newest(self, step: int) -> Checkpoint | None:
        """The newest checkpoint up to a step that this state went through; None: none is known."""
        folder = self.context.directory.checkpoints
        for path in [*reversed(checkpoint.finished(folder)), *([Path(self.source)] if self.source else [])]:
            with contextlib.suppress(CheckpointError):
                found = checkpoint.read_manifest(path)
                is_own = found.generation == self.generation or str(path) == self.source
                if is_own and found.step <= step:
                    return found
        return None

    def _save(self, snapshot: Snapshot, rows: ChangedRows | None, on_error: checkpoint_writer.OnError | None) -> None:
        """Begins to save, once the save before is on disk."""
        status = self.context.status
        self.context.journal.write(Save(self.generation, snapshot.step))
        before, status.state = status.state, TaskState.saving  # on a slow disk the save before takes long
        tensors = snapshot.to_tensors()
        self.writer.save(snapshot.step, self.generation, self._facts(snapshot), tensors, on_error=on_error, rows=rows)
        status.state = before

    def _facts(self, snapshot: Snapshot) -> dict[str, Any]:
        config, plan, status = self.context.config, self.context.plan, self.context.status
        facts: dict[str, Any] = {
            "model": config.model.name,
            "optimizer": config.optimizer.name.value,
            "slots": list(snapshot.slots),
            "seed": config.seed,
            "replicas": plan.replicas,
            "global_batch": plan.global_batch,
            "frozen": plan.frozen.sha256,
            "data": to_json(plan.fingerprint),
        }
        if snapshot.loss is not None:
            reductions = {"reductions": snapshot.reductions} if snapshot.reductions else {}
            facts["metrics"] = {"loss": snapshot.loss, "sums": list(snapshot.sums), **reductions}
        if status.ended_early and snapshot.stop:  # so that an attempt that starts from here ends at the same step
            facts |= {"ended": resume.what_may_end(config.evaluate, config.train.steps), "stop": snapshot.stop}
        return facts

    def roll_back(self, step: int) -> None:
        """Records that the run goes back to its newest checkpoint, which may still be on its way to the disk.

        Args:
            step: whose update was skipped.
        """
        directory = self.context.directory
        self.writer.wait()
        saved = checkpoint.finished(directory.checkpoints)
        record_rollback(directory.rollbacks, step=step, checkpoint=int(saved[-1].name) if saved else None)


def _problem(snapshot: Snapshot, rows: ChangedRows | None, *, skips_bad_updates: bool) -> str | None:
    """Why a state must not be saved; it may be the first to show that an update was skipped."""
    if snapshot.bad and not skips_bad_updates:
        return "an update was skipped"
    path = _first_bad_parameter(snapshot, rows)
    return None if path is None else f"parameter {path} is not finite"


def _first_bad_parameter(snapshot: Snapshot, rows: ChangedRows | None) -> str | None:
    bad = next((path for path, value in snapshot.parameters.items() if not np.isfinite(value).all()), None)
    return bad or (rows.first_bad() if rows else None)


def _log_and_continue(error: OSError) -> None:
    _log.warning("%s: %s; training continues until the next save is due", error.filename, error.strerror)


def _make_writer(
    config: RunConfig, directory: RunDirectory, *, has_frozen: bool, is_read: bool
) -> checkpoint_writer.Writer:
    """The writer of the run's checkpoints.

    Args:
        has_frozen: whether there is something that training never changes.
        is_read: whether an evaluator task scores each of them, and they stay until it has.
    """
    keep = config.checkpoint.keep
    shared = [directory.frozen] if has_frozen and directory.frozen.exists() else []
    if not is_read:
        return checkpoint_writer.Writer(directory.checkpoints, keep=keep, shared=shared)
    # A launcher ends the run when the evaluator fails; without a launcher the disk could fill up.
    at_most = None if config.job is None else evaluations.WAITING_AT_MOST
    release = evaluations.release_when_scored(directory.evaluations, waiting_at_most=at_most)
    return checkpoint_writer.Writer(directory.checkpoints, keep=keep, release=release, shared=shared)


@dataclass
class ChiefEvaluation:
    """Scores snapshots where no evaluator task does."""

    evaluator: Evaluator
    events: Events
    lines: History
    status: TaskPage
    saver: Saver
    keeps_best: bool
    abandoned: Snapshot | None = None  # not evaluated, because the run is to stop

    def run(self, snapshot: Snapshot) -> dict[str, float]:
        """Returns eval_loss and a score for each metric, which TensorBoard shows too.

        Raises:
            AbandonedError: if the run has to stop before that; it will continue from this state.
        """
        before, self.status.state, self.status.evaluated = self.status.state, TaskState.evaluating, 0
        began = time.monotonic()
        try:
            scores = self.evaluator.score(snapshot, self._goes_on)
        except AbandonedError:
            self.abandoned = snapshot
            _log.info("step %d: not evaluated; the run evaluates it when it continues", snapshot.step)
            raise
        self.events.scalars(snapshot.step, {f"evaluation/{name}": value for name, value in scores.items()})
        self.events.flush()
        if snapshot.step > self.lines.last_step:  # else it was evaluated before
            evaluation = Evaluation(snapshot.step, scores, round(time.monotonic() - began, 3))
            if self.keeps_best:
                self.saver.save_if_best(snapshot, evaluation)
            self.lines.write(snapshot.step, {**scores, "seconds": evaluation.seconds})  # last: it is not made again
        self.status.state = before
        return {f"eval_{name}": value for name, value in scores.items()}

    def is_missing(self, step: int, every: int) -> bool:
        """Whether a state that a chief starts from was to be evaluated, and a predecessor died before it did."""
        return every > 0 and self.lines.last_step // every < step // every

    def _goes_on(self, examples: int) -> bool:
        self.status.evaluated = examples
        return not self.status.is_stopping

    def run_and_log(self, snapshot: Snapshot) -> None:
        """Evaluates between two steps; if abandoned, remembers the state, from which the run continues."""
        try:
            scores = self.run(snapshot)
        except AbandonedError:
            self.saver.save_unless_saved(snapshot)
            return
        _log.info("step %d: %s", snapshot.step, ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))


class Due(Protocol):
    """Says when an action is to be taken."""

    def is_due(self, step: int) -> bool: ...


def _on_snapshot(
    engine: Engine, actions: Sequence[tuple[Due, OnSnapshot]], evaluation: ChiefEvaluation | None
) -> BetweenSteps:
    """Runs all actions that are due at a step on one snapshot, up to the state from which the run continues."""

    def run_due(step: int) -> None:
        if evaluation and evaluation.abandoned:
            return
        due = [action for every, action in actions if every.is_due(step)]
        if due:
            snapshot = engine.snapshot()
            for action in due:
                action(snapshot)
            engine.release()

    return run_due


@dataclass(frozen=True)
class Chief:
    """The chief's actions, and the files that they write to."""

    engine: Engine
    saver: Saver
    evaluation: ChiefEvaluation | None  # none where an evaluator task scores every checkpoint
    report: Report
    between: Sequence[BetweenSteps]  # for the loop
    after: Sequence[AfterStep]  # for the loop
    hooks: Hooks
    judge: Judge


def _make_evaluation(
    context: Context, saver: Saver, evaluator: Evaluator, events: Events, start: InitialState
) -> ChiefEvaluation:
    directory = context.directory
    lines = History(directory.evaluations, start=start.step)
    keeps_best = context.config.evaluate.keeps_best
    if keeps_best:
        evaluations.remove_best_after(directory.best, start.step)
    return ChiefEvaluation(evaluator, events, lines, context.status, saver, keeps_best)


def assemble(
    context: Context, engine: Engine, objective: Objective, evaluator: Evaluator | None, start: InitialState
) -> Chief:
    """Opens the run's files, makes the chief's actions and reports what an earlier chief did not."""
    config, directory = context.config, context.directory
    has_frozen = bool(context.plan.frozen.sha256)
    writer = _make_writer(config, directory, has_frozen=has_frozen, is_read=evaluator is None)
    rows_after = engine.changed_rows if isinstance(engine, ShardedEngine) and not context.tables else None
    saver = Saver(context, writer, engine.generation, start.checkpoint, rows_after)
    if context.plan.has_shard_hosts and context.tables:  # or the first save, for which all others wait, would do it
        threading.Thread(target=map_rows, args=[context.tables], daemon=True).start()
    history, events = History(directory.history, start=start.step), Events(directory.events, start=start.step)
    report = Report(
        context,
        engine,
        MetricResults(objective),
        history,
        events,
        begun=history.last_step if start.missed else start.step,
        logs_progress=config.job is not None or REPORTS_PROGRESS in os.environ,
    )
    saved = [int(path.name) for path in checkpoint.finished(directory.checkpoints)] if start.is_adopted else []
    saved_until = max(saved, default=0) if start.is_adopted else start.step
    evaluation = _make_evaluation(context, saver, evaluator, events, start) if evaluator else None
    hooks = Hooks(config.user, context.status)
    save_due = SaveDue(Every(config.checkpoint.every, start=saved_until), directory)
    asked = Questions(directory)
    actions: list[tuple[Due, OnSnapshot]] = [(save_due, saver.save_if_sound), (asked, asked.answer)]
    if evaluation:
        actions.append((Every(config.evaluate.every, start=start.step), evaluation.run_and_log))
    actions.append((Every(config.summary.histogram_every, start=start.step), report.write_parameters))
    for result in start.missed:
        report.update(result)
    judge = Judge(context, hooks, start, objective.metric_names())
    hooks.follow(start.result, is_asked=context.stop.requested)
    if evaluation and start.step < context.plan.steps and evaluation.is_missing(start.step, config.evaluate.every):
        evaluation.run_and_log(engine.snapshot())
        engine.release()
        judge.poll(start.step)
    if (
        start.is_adopted
        and start.step
        and Every(config.summary.histogram_every, start=start.step - 1).is_due(start.step)
    ):
        report.write_parameters(engine.snapshot())  # an earlier chief may not have written them
        engine.release()
    between = [lambda _: writer.poll(), _on_snapshot(engine, actions, evaluation)]
    if judge.is_needed:
        between.append(judge.poll)
    after: list[AfterStep] = [report.write_gradients, report.update]
    if hooks.has("on_step"):

        def call_on_step(result: StepResult) -> None:
            if result.step > start.step:  # else no update was made
                hooks.call("on_step", result.step, {"loss": result.loss, **report.values_at(result.step)})

        after.append(call_on_step)
    return Chief(engine, saver, evaluation, report, between, after, hooks, judge)


def finish(
    context: Context, chief: Chief, pace: Pace, workload: Workload, *, stopped: bool, resumed_from: str | None
) -> bool:
    """Saves, leaves the engine, and writes the summary; evaluates and exports too unless the run was stopped.

    Returns:
        Whether it was stopped, or is now.
    """
    snapshot, results, stopped = _save_and_evaluate(context, chief, pace, stopped=stopped)
    last_rows = context.tables
    if context.plan.tables and (not last_rows or stopped):  # the step that stopped the run may have changed them
        path = context.directory.checkpoints / f"{snapshot.step:09d}"
        last_rows = table_files.loaded(path, context.plan.tables, seed=context.config.seed)
    if not stopped:
        context.status.state = TaskState.exporting
        keeps_best = chief.evaluation is not None and chief.evaluation.keeps_best
        best = evaluations.best_result(context.directory) if keeps_best else None
        if best:
            results["best"] = best
        state, rows = _load(context, best) if best else (snapshot, last_rows)
        results["exported_step"] = state.step
        served, failures, skipped = _export(context, workload, state, rows)
        if failures:
            results["not_exported"] = "; ".join(failures)
        if skipped:
            results["export_skipped"] = "; ".join(skipped)
        chief.hooks.call("on_end", snapshot.step, _logs(results))
    results["ended_early"] = None if stopped else context.status.ended_early
    if grown := table_files.trained_rows(last_rows):
        results["rows"] = grown
    summary = results | {"resumed_from": resumed_from, "params_sha256": params_sha256(snapshot, last_rows)}
    write_atomically(context.directory.summary, json.dumps(summary, indent=1))
    if not stopped:
        facts = summary
        if best:
            scores = {f"eval_{name}": value for name, value in best.items() if name not in ("step", "path")}
            facts = summary | scores | {"steps": state.step, "params_sha256": params_sha256(state, rows)}
        model_card.write(context.directory.export, context.config, facts, served, context.directory.event_log)
    if chief.report.logs_progress:
        log_summary(summary)
    return stopped


def _export(context: Context, workload: Workload, state: Snapshot, rows: Sequence[BlockMemory]) -> Written:
    """Exports a state; whatever the code of a model does then, training is done, and its results are kept."""
    context.directory.export.mkdir(parents=True, exist_ok=True)
    model_card.remove_files(context.directory.export)  # of a run that had fewer steps
    try:
        written = export_run(context.config, context.plan, workload, state, context.directory.export, rows)
    except (Exception, SystemExit) as error:
        if is_of_storage(error):
            raise
        _log.exception("the export has failed")
        written = Written(failures=(first_line(error),))
    for failure in written.failures:
        _log.error("not exported: %s", failure)
    for reason in written.skipped:
        _log.warning("%s", reason)
    return written


def _load(context: Context, best: Mapping[str, Any]) -> tuple[Snapshot, Sequence[BlockMemory]]:
    """The state and the rows in the best checkpoint."""
    path = Path(best["path"])
    rows = table_files.loaded(path, context.plan.tables, seed=context.config.seed)
    return Snapshot.from_tensors(best["step"], checkpoint.load(checkpoint.read_manifest(path))), rows


def _logs(results: Mapping[str, Any]) -> dict[str, float]:
    """The last loss and the scores."""
    scores = {name: value for name, value in results.items() if name.startswith("eval_")}
    return {"loss": results["final_loss"], **scores}


def _save_and_evaluate(
    context: Context, chief: Chief, pace: Pace, *, stopped: bool
) -> tuple[Snapshot, dict[str, Any], bool]:
    """Returns the last state, what the summary says of it, and whether the run was stopped.

    Leaves the engine last, because other tasks wait for this one.
    """
    abandoned, table = chief.evaluation.abandoned if chief.evaluation else None, chief.engine.contributions()
    snapshot, stopped = abandoned or chief.engine.snapshot(), stopped or abandoned is not None
    try:
        if abandoned is None:
            chief.saver.save_last(snapshot)
        results = summarize(context, snapshot.step, pace)
        if chief.evaluation and not stopped:
            results |= chief.evaluation.run(snapshot)
    except AbandonedError:
        stopped = True
    finally:
        chief.engine.leave()
    chief.saver.writer.close()
    chief.report.close()
    if chief.evaluation:
        chief.evaluation.lines.close()
    if table is not None:
        results["contributions"] = staleness.to_json(table)
    return snapshot, results, stopped
