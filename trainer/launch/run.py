"""Runs a plan from its first task to its last: resumes it, shows progress, writes the summary."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from trainer.config.schema import RunConfig
from trainer.faults import exit_codes
from trainer.launch import ending, status_file
from trainer.launch.attempts import PlannedRun, RunOutcome, Starter
from trainer.launch.fault_hooks import FaultHooks
from trainer.launch.loggers import Loggers
from trainer.launch.progress import HistoryLines, make_progress
from trainer.launch.signals import Signals
from trainer.launch.supervisor import Supervisor
from trainer.launch.view import Course
from trainer.observe import runs
from trainer.observe.profile import merge as profile
from trainer.observe.report import page
from trainer.plan.plan import Plan
from trainer.storage import changes, evaluations, resume
from trainer.storage.atomic import write_atomically
from trainer.storage.event_log import EventKind, EventLog, RunEvent
from trainer.storage.run_directory import RunDirectory


def supervise(
    planned: PlannedRun, starter: Starter, *, plan_of_tasks: Plan | None = None, faults: FaultHooks | None = None
) -> int:
    """Starts the plan's tasks, shows their progress, and makes sure that all of them end.

    Args:
        planned: whose directory the caller has leased.
        plan_of_tasks: the plan as the tasks see it, if that differs.
        faults: hooks that inject faults.

    Returns:
        0, or the exit code of the task that failed first, or 130/143 when the user stopped the run.
    """
    config, plan, directory, started_at = planned
    with Signals() as signals, ExitStack() as stack:
        events = EventLog(directory.event_log)
        start = _prepare(config, plan_of_tasks or plan, directory, events)
        loggers = stack.enter_context(Loggers(config.loggers, directory))
        course = Course(plan.steps, start, plan.epoch_steps, plan.epochs)
        history = None
        if config.history.lines:
            history = HistoryLines(directory.history, start=start, steps=plan.steps, batch=plan.update_batch)
        elapsed_secs = time.time() - started_at
        with make_progress(course, history, elapsed_secs=elapsed_secs) as progress, _breaking(faults, plan):
            supervisor = Supervisor(planned, starter, progress, signals, faults)
            outcome, attempts = supervisor.run(), supervisor.attempts
            is_done = outcome.failed is None and not signals.numbers and not any(one.code for one in attempts)
            if is_done and (steps := runs.read_summary(directory).get("steps")) is not None:
                progress.finish(steps)
        measured = _merge_profile(directory) if config.profile else None
        summary = _complete_summary(planned, supervisor, outcome, measured)
        for line in loggers.finish():
            events.write(RunEvent(EventKind.message, line))
            print(line)
    if measured:
        print(profile.describe(measured))
    if outcome.failed is not None:
        last = ending.failed(directory, outcome.failed)
        code = outcome.failed.code if outcome.failed.code > 0 else 128 - outcome.failed.code
    elif not is_done:
        last = ending.stopped(directory, summary)
        code = 128 + signals.numbers[0] if signals.numbers else exit_codes.TERMINATED
    else:
        longer = resume.twice(config.train, summary["steps"])
        last = ending.done(directory, summary, start=start, longer=longer, has_report=config.report.at_end)
        code = exit_codes.OK
    events.write(RunEvent(EventKind.end, last, code=code))
    if config.report.at_end:
        _write_report(directory)
    print(last)
    return code


def _prepare(config: RunConfig, plan: Plan, directory: RunDirectory, events: EventLog) -> int:
    """Decides where the run resumes and writes the inputs of its tasks; returns the step that it starts from."""
    checkpoint = resume.find(config.resume, directory, steps=plan.steps)
    if checkpoint is None:
        d = directory
        resume.set_aside(d, d.config, d.plan, d.summary, d.loggers, d.profile, d.path / page.REPORT)
    else:
        resume.check_model(checkpoint, config, plan)
        resume.check_data(checkpoint, config, plan)
        if changed := changes.check(checkpoint, config, directory, steps=plan.steps):
            print(changed, flush=True)
        if other_sums := resume.change_of_sums(checkpoint, plan):
            print(f"warning: {other_sums}; from here on, the result is not that of an unbroken run", flush=True)
    how = f"resumes at step {checkpoint.step}" if checkpoint else ""
    print(", ".join(filter(None, [ending.shown(directory.path), how])), flush=True)
    directory.write_inputs(config, plan)
    command = tuple(status_file.command())
    events.write(RunEvent(EventKind.launch, how or None, cluster=plan.cluster, strategy=plan.strategy, command=command))
    if config.profile:
        shutil.rmtree(directory.profile, ignore_errors=True)  # an earlier launch's
    return checkpoint.step if checkpoint else 0


@contextmanager
def _breaking(faults: FaultHooks | None, plan: Plan) -> Iterator[None]:
    if faults is None:
        yield
        return
    faults.begin(plan)
    try:
        yield
    finally:
        faults.end()


def _merge_profile(directory: RunDirectory) -> profile.MergedProfile | None:
    """Returns the profile of all tasks; a disk without space for its trace does not fail the run."""
    try:
        return profile.merge(directory)
    except OSError as error:
        print(f"no trace was written: {error.filename or directory.profile}: {error.strerror}")
        return None


def _write_report(directory: RunDirectory) -> None:
    """Writes report.html; an error does not fail the run."""
    try:
        page.write(directory.path, is_over=True)
    except Exception as error:
        print(f"no report was written: {type(error).__name__}: {error}")


def _complete_summary(
    planned: PlannedRun, supervisor: Supervisor, outcome: RunOutcome, measured: profile.MergedProfile | None
) -> dict[str, Any]:
    """Adds what only the launcher knows to the chief's summary, if there is one."""
    directory, started_at, attempts = planned.directory, planned.started_at, supervisor.attempts
    summary = runs.read_summary(directory)
    summary["run_dir"] = str(directory.path)  # tasks may have seen it elsewhere
    if any(attempt.task.job == "evaluator" for attempt in attempts):
        summary |= evaluations.results(directory, summary.get("steps"))
    first_step_at = outcome.first_step_at or summary.get("first_step_at")
    summary.pop("first_step_at", None)
    summary |= {
        "failed": outcome.failed.task.name if outcome.failed else None,
        "seconds": round(time.time() - started_at, 3),
        "time_to_first_step_secs": round(first_step_at - started_at, 3) if first_step_at else None,
        "restarts": sum(outcome.restarts.values()),
        "restarts_of": outcome.restarts,
        "waits": supervisor.waits.to_json(),
        "tasks": {attempt.task.name: {"code": attempt.code, "log": attempt.task.log} for attempt in attempts},
    }
    if measured is not None:
        summary["profile"] = measured
    write_atomically(directory.summary, json.dumps(summary, indent=1))
    return summary
