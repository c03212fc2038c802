"""Assembles the chief's actions between steps: saves, evaluations, reports and hooks."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.engine.engine import Engine
from trainer.engine.sharded.worker import ShardedEngine
from trainer.engine.step_result import StepResult
from trainer.engine.tables.mapping import map_rows
from trainer.engine.tables.memory import BlockMemory
from trainer.engine.vectors.snapshot import Snapshot
from trainer.observe.task_page import TaskPage
from trainer.storage import checkpoint
from trainer.storage.history import History
from trainer.task import table_files
from trainer.task.chief.ending import Hooks
from trainer.task.chief.evaluation import ChiefEvaluation, make_evaluation
from trainer.task.chief.initial_state import InitialState
from trainer.task.chief.judge import Judge
from trainer.task.chief.mailbox import Mailbox
from trainer.task.chief.report import Report
from trainer.task.chief.saver import Saver, make_writer
from trainer.task.evaluator.score import Evaluator
from trainer.task.loop import AfterStep, BetweenSteps
from trainer.task.metrics import MetricResults
from trainer.task.pace import Every
from trainer.task.runtime import TaskRuntime
from trainer.task.spec import TaskSpec
from trainer.task.tensorboard import Events
from trainer.workload.objective import Objective

IsDue = Callable[[int], bool]  # called with each global step
OnSnapshot = Callable[[Snapshot], Any]


def _on_snapshot(
    engine: Engine, actions: Sequence[tuple[IsDue, OnSnapshot]], evaluation: ChiefEvaluation | None
) -> BetweenSteps:
    """Runs all actions that are due at a step on one snapshot, up to the state from which the run continues."""

    def run_due(step: int) -> None:
        if evaluation and evaluation.abandoned:
            return
        due = [action for is_due, action in actions if is_due(step)]
        if due:
            snapshot = engine.snapshot()
            for action in due:
                action(snapshot)
            engine.release()

    return run_due


@dataclass(frozen=True)
class Chief:
    """The chief's actions, and the files that they write to."""

    spec: TaskSpec
    status: TaskPage
    engine: Engine
    tables: Sequence[BlockMemory]  # the memory of rows, where this task maps it
    saver: Saver
    evaluation: ChiefEvaluation | None  # none where an evaluator task scores every checkpoint
    report: Report
    between: Sequence[BetweenSteps]  # for the loop
    after: Sequence[AfterStep]  # for the loop
    hooks: Hooks
    judge: Judge


def assemble(
    spec: TaskSpec,
    runtime: TaskRuntime,
    engine: Engine,
    objective: Objective,
    tables: Sequence[BlockMemory],
    evaluator: Evaluator | None,
    start: InitialState,
) -> Chief:
    """Opens the run's files, makes the chief's actions and reports what an earlier chief did not."""
    config, plan, directory, status = spec.config, spec.plan, spec.directory, runtime.status
    writer = make_writer(spec, is_read=evaluator is None)
    ask = engine.changed_rows if isinstance(engine, ShardedEngine) else None
    changes = table_files.source_of_changes(plan.table_layout, tables, ask)
    saver = Saver(spec, status, runtime.journal, writer, engine.generation, start.checkpoint, changes)
    if plan.has_shard_hosts:  # or the first save, for which all others wait, would do it
        threading.Thread(target=map_rows, args=[tables], daemon=True).start()
    history, events = History(directory.history, start=start.step), Events(directory.events, start=start.step)
    report = Report(
        spec,
        status,
        engine,
        MetricResults(objective),
        history,
        events,
        begun=history.last_step if start.missed else start.step,
    )
    saved = [int(path.name) for path in checkpoint.finished(directory.checkpoints)] if start.is_adopted else []
    saved_until = max(saved, default=0) if start.is_adopted else start.step
    evaluation = make_evaluation(spec, status, saver, evaluator, events, start) if evaluator else None
    hooks = Hooks(config.user, status)
    histogram_every = config.history.histogram_every
    mailbox, saves = Mailbox(directory), Every(config.checkpoint.every, start=saved_until)
    actions: list[tuple[IsDue, OnSnapshot]] = [
        (lambda step: mailbox.takes_save() | saves.is_due(step), saver.save_if_sound),  # one save serves both
        (lambda _: mailbox.has_questions(), mailbox.answer),
    ]
    if evaluation:
        actions.append((Every(config.evaluate.every, start=start.step).is_due, evaluation.run_and_log))
    actions.append((Every(histogram_every, start=start.step).is_due, report.write_parameters))
    for result in start.missed:
        report.update(result)
    judge = Judge(spec, status, hooks, start, objective.metric_names())
    hooks.follow(start.result, is_asked=runtime.stop.requested)
    if evaluation and start.step < plan.steps and evaluation.is_missing(start.step, config.evaluate.every):
        evaluation.run_and_log(engine.snapshot())
        engine.release()
        judge.poll(start.step)
    if start.is_adopted and start.step and Every(histogram_every, start=start.step - 1).is_due(start.step):
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
    return Chief(spec, status, engine, tables, saver, evaluation, report, between, after, hooks, judge)
