"""Runs the trials of a sweep one after the other, each as the command that a person would type."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.commands.sweep import hparams, results, sampler, table
from trainer.commands.sweep.space import Values, overrides
from trainer.commands.sweep.trials import DONE, WAITING, Sweep, Trial, rungs, survivors
from trainer.config.arguments import program, quoted
from trainer.faults import exit_codes
from trainer.launch.ending import shown
from trainer.storage import lease
from trainer.storage.run_directory import RunDirectory

LASTING = (exit_codes.CONFIG, exit_codes.BAD_DATA)  # codes of trials that would fail again
STOPPED = (exit_codes.INTERRUPTED, exit_codes.TERMINATED)
POLL_SECS = 0.2
WARM_MINUTES = "2"  # for which TensorFlow waits for the next trial, unless the environment says otherwise
LONGEST = 200  # characters of a reason

Suggest = Callable[[Sequence[Trial]], Values]  # the values of the next trial, after those before it


def run(sweep: Sweep, suggest: Suggest) -> int:
    """Runs what is left of a sweep; returns 0, 130 or 143 if it was stopped, or a trial's code if none has a score.

    Every trial is remembered before it starts, and its score when it has one. A run that a killed sweep left goes on
    where it was, or is waited for if it still trains.
    """
    settings = sweep.settings
    for trial in sweep.trials:
        if trial.code not in (exit_codes.OK, *LASTING):
            trial.state = WAITING  # once more
    rounds = rungs(settings.steps, settings.trials, settings.halving)
    for number, (steps, count) in enumerate(rounds):
        if number == 0:
            chosen: Iterable[Trial] = _first(sweep, suggest, count)
        else:
            chosen = survivors(sweep, rounds[number - 1][0], count)
        for trial in chosen:
            if steps in trial.scores or trial.state not in (WAITING, DONE):
                continue
            code = _run(sweep, trial, steps)
            results.write(sweep)
            if code in STOPPED:
                print(f"{shown(sweep.path)} was stopped; the same command with run={shown(sweep.path)} continues it")
                return code
    _conclude(sweep)
    return exit_codes.OK if sweep.best() else next((one.code for one in sweep.trials if one.code), exit_codes.BAD_DATA)


def _first(sweep: Sweep, suggest: Suggest, count: int) -> Iterable[Trial]:
    """All trials of the first round, in order; those that are not there are made."""
    for number in range(count):
        yield sweep.trials[number] if number < len(sweep.trials) else sweep.add(suggest(sweep.trials))


def command_of(sweep: Sweep, trial: Trial, steps: int) -> list[str]:
    """The overrides of a trial."""
    own = [*sweep.settings.command, *overrides(trial.values), f"run={quoted(str(sweep.run_of(trial)))}"]
    return own if steps == sweep.settings.steps else [*own, f"train.steps={steps}"]


def _run(sweep: Sweep, trial: Trial, steps: int) -> int:
    """Trains a trial up to a step, and remembers its score; returns the exit code."""
    directory = RunDirectory(sweep.run_of(trial))
    log = sweep.path / "logs" / f"{trial.name}.log"
    log.parent.mkdir(exist_ok=True)
    with table.shown(sweep, trial, steps):
        while lease.owner(directory) is not None:  # of a sweep that was killed
            time.sleep(POLL_SECS)
        code, stopped_by = _call([sys.executable, "-m", "trainer", *command_of(sweep, trial, steps)], log)
    if stopped_by and code != exit_codes.OK:
        return 128 + stopped_by
    trial.code = code
    if code == exit_codes.OK:
        _take_score(sweep, trial, steps, json.loads(directory.summary.read_text()))
    else:
        trial.state = f"failed (exit code {code}): {_reason(log.read_text(errors='replace').splitlines())}"
    sweep.remember()
    print(table.line(sweep, trial, steps), flush=True)
    return 128 + stopped_by if stopped_by else code


def _take_score(sweep: Sweep, trial: Trial, steps: int, summary: Mapping[str, Any]) -> None:
    metric = sweep.settings.metric
    trial.params_sha256, trial.trained, trial.state = summary["params_sha256"], summary["steps"], DONE
    if not isinstance(summary.get(metric), int | float):
        names = ", ".join(name for name in summary if name.startswith("eval_")) or "none"
        trial.state = f"has no {metric}; its scores: {names}"
    elif not math.isfinite(summary[metric]):
        trial.state = f"{metric} is {summary[metric]}"
    else:
        trial.scores[steps] = summary[metric]


def _reason(lines: Sequence[str]) -> str:
    """What a run that failed printed last about it."""
    said = [line.strip() for line in lines if line.strip()]
    named = [line for line in said if line.startswith(("trainer: ", "failed"))]
    return (named[-1:] or said[-1:] or ["nothing was printed"])[0][:LONGEST]


def _call(words: Sequence[str], log: Path) -> tuple[int, int]:
    """Runs a command, which is asked to stop when this process is; returns its exit code, and that signal or 0.

    Ctrl-C reaches both; the command then saves, and this process waits for it.
    """
    received: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        received.append(number)
        if number == signal.SIGTERM:
            child.terminate()

    environment = {"TRAINER_WARM_MINUTES": WARM_MINUTES} | os.environ
    with log.open("ab") as output, subprocess.Popen(words, stdout=output, stderr=output, env=environment) as child:
        handlers = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = child.wait()
            return code, next(iter(received), 0)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _conclude(sweep: Sweep) -> None:
    """Draws the results, names the best trial, and links it."""
    results.write(sweep)
    try:
        results.plot(sweep)
    except ImportError:
        print(f"no {results.PLOT} was drawn: pip install 'trainer[sweep]'")
    with suppress(ImportError):
        hparams.write(sweep)
    with suppress(sampler.NoOptunaError):
        is_lowest = sweep.settings.is_lowest
        sampler.write_journal(sweep.path / "study.log", sweep.path.name, sweep.space, sweep.trials, is_lowest=is_lowest)
    best, link = sweep.best(), sweep.path / "best"
    link.unlink(missing_ok=True)
    if best is None:
        print(f"no trial has {sweep.settings.metric}; see {shown(sweep.path)}/{results.PAGE}")
        return
    link.symlink_to(best.name)
    print(f"results       {shown(sweep.path)}/{results.PAGE}")
    print(f"best          {shown(sweep.run_of(best))}, {sweep.settings.metric} {best.score:.6g} at step {best.steps}")
    again = [*program(), *sweep.settings.command, *overrides(best.values)]
    print(f"repeat        {shlex.join(again)}")
