"""A run from its first task to its last: what it resumes from, progress, summary and exit code."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from trainer.config.schema import RunConfig
from trainer.faults import exit_codes
from trainer.launch.attempts import Attempt, Failure, RunOutcome
from trainer.launch.fault_hooks import Injector
from trainer.launch.progress import HistoryLines, make_progress
from trainer.launch.signals import Signals
from trainer.launch.supervisor import Starter, Watch
from trainer.observe.profile import merge as profile
from trainer.plan.plan import Plan
from trainer.storage import evaluations, resume
from trainer.storage.run_directory import RunDirectory, write_atomically


def supervise(
    config: RunConfig,
    plan: Plan,
    directory: RunDirectory,
    tasks: Starter,
    *,
    started_at: float,
    written: Plan | None = None,
    injector: Injector | None = None,
) -> int:
    """Starts the plan's tasks, shows their progress, and sees to it that all of them end.

    Args:
        directory: whose lease the caller holds.
        plan: with the addresses by which this process reaches the tasks' pages.
        started_at: when the command was typed (Unix time, seconds).
        written: the plan as the tasks see it, where that differs.
        injector: breaks things on purpose.

    Returns:
        0, or the exit code of the task that failed first, or 130/143 when the user stopped the run.
    """
    with Signals() as signals:
        found = resume.find(config.resume, directory, steps=plan.steps)
        if found is None:
            resume.set_aside(directory)
        else:
            resume.check_model(found, config)
        print(f"{directory.path}{f', resumes at step {found.step}' if found else ''}", flush=True)
        directory.write_inputs(config, written or plan)
        if config.profile:
            shutil.rmtree(directory.profile, ignore_errors=True)  # an earlier launch's
        history = None
        if config.summary.lines:
            start = found.step if found else 0
            history = HistoryLines(directory.history, start=start, steps=plan.steps, batch=plan.update_batch)
        with make_progress(plan.tasks, plan.steps, history) as progress, _breaking(injector, plan):
            watch = Watch(config, plan, directory, tasks, progress, signals, injector)
            outcome, lives = watch.run(), watch.lives
        measured = _merge_profile(directory) if config.profile else None
        summary = _complete_summary(directory, lives, outcome, started_at, measured)
    if measured:
        print(profile.describe(measured))
    if outcome.failed is not None:
        return _report_failure(directory, outcome.failed)
    if signals.numbers or any(life.code for life in lives.values()):
        return _report_stop(config, directory, summary, signals.numbers)
    print(_describe(summary))
    return exit_codes.OK


@contextmanager
def _breaking(injector: Injector | None, plan: Plan) -> Iterator[None]:
    if injector is None:
        yield
        return
    injector.begin(plan)
    try:
        yield
    finally:
        injector.end()


def _merge_profile(directory: RunDirectory) -> dict[str, Any] | None:
    """The profile of all tasks; a disk that has no room for its trace does not spoil a run."""
    try:
        return profile.merge(directory)
    except OSError as error:
        print(f"there is no trace: {error.filename or directory.profile}: {error.strerror}")
        return None


def _complete_summary(
    directory: RunDirectory,
    lives: Mapping[str, Attempt],
    outcome: RunOutcome,
    started_at: float,
    measured: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Adds to what the chief wrote, if it came to that, what only the launcher knows."""
    summary: dict[str, Any] = {}
    if directory.summary.exists():
        summary = json.loads(directory.summary.read_text())
    summary["run_dir"] = str(directory.path)  # tasks may have seen it elsewhere
    if any(life.task.job == "evaluator" for life in lives.values()):
        summary |= evaluations.results(directory, summary.get("steps"))
    first_step_at = outcome.first_step_at or summary.get("first_step_at")
    summary.pop("first_step_at", None)
    summary |= {
        "failed": outcome.failed.task.name if outcome.failed else None,
        "seconds": round(time.time() - started_at, 3),
        "time_to_first_step_secs": round(first_step_at - started_at, 3) if first_step_at else None,
        "restarts": sum(outcome.restarts.values()),
        "restarts_of": outcome.restarts,
        "tasks": {name: {"code": life.code, "log": life.task.log} for name, life in lives.items()},
    }
    if measured is not None:
        summary["profile"] = measured
    write_atomically(directory.summary, json.dumps(summary, indent=1))
    return summary


def _describe(summary: Mapping[str, Any]) -> str:
    first, best = summary["time_to_first_step_secs"], summary.get("best")
    kept = "best: step {step}, loss {loss:.4f}, accuracy {accuracy:.4f}, {path}\n".format(**best) if best else ""
    return (
        f"done: {summary['steps']} steps in {summary['seconds']:.1f} s"
        f"{f' (first step after {first:.1f} s)' if first else ''}, {summary['examples_per_second']:,.0f} examples/s, "
        f"eval_loss {summary['eval_loss']:.4f}, eval_accuracy {summary['eval_accuracy']:.4f}\n"
        f"{kept}"
        f"params_sha256 {summary['params_sha256']}\n{summary['run_dir']}"
    )


def _report_stop(config: RunConfig, directory: RunDirectory, summary: Mapping[str, Any], signals: Sequence[int]) -> int:
    """Says whether the state was saved, and how to go on; returns the exit code."""
    if "steps" in summary:
        kept = f"saved at step {summary['steps']}"
    else:
        older = max((int(path.name) for path in directory.checkpoints.glob("*") if path.name.isdigit()), default=None)
        kept = "nothing was saved" if older is None else f"nothing was saved since step {older}"
    without = "" if config.resume == "auto" else f", without resume={config.resume}"
    print(f"stopped, {kept}; to continue, type the same command with run={directory.path}{without}")
    return 128 + signals[0] if signals else exit_codes.TERMINATED


def _report_failure(directory: RunDirectory, failed: Failure) -> int:
    """Shows the first failure and the end of its log, as it was then; returns the exit code."""
    print(f"{failed.task.name} failed first, exit code {failed.code}: {failed.why}")
    print(f"the end of {directory.path / failed.task.log}:")
    for text in failed.tail:
        print(f"    {text}")
    return failed.code if failed.code > 0 else 128 - failed.code
