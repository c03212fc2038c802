"""Runs the trials of a sweep, each as the command that a person would type."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.commands.sweep import results, sampler, table
from trainer.commands.sweep.shares import TrialShare
from trainer.commands.sweep.space import Values, overrides
from trainer.commands.sweep.trials import DONE, WAITING, Sweep, Trial, rungs, survivors
from trainer.config import shell
from trainer.config.command_line import program
from trainer.faults import exit_codes
from trainer.launch.ending import shown
from trainer.storage import lease
from trainer.storage.run_directory import RunDirectory

LASTING = (exit_codes.CONFIG, exit_codes.BAD_DATA)  # codes of trials that would fail again
POLL_SECS = 0.05
WARM_MINUTES = "2"  # for which TensorFlow waits for the next trial, unless the environment says otherwise
LONGEST = 200  # characters of a reason

Suggest = Callable[
    [int, Sequence[Trial]], Values
]  # (number of the trial, earlier trials that have ended) -> its values


def run(sweep: Sweep, shares: Sequence[TrialShare], suggest: Suggest | None = None) -> int:
    """Runs the rest of a sweep; returns 0, 130 or 143 if it was stopped, or a trial's exit code if none has a score.

    Every trial is recorded before it starts, and its score when it has one. A run that a killed sweep left continues
    where it stopped, or is waited for if it is still training.

    Args:
        shares: of the machine, for as many trials at the same time.
        suggest: draws the values of trials that the sweep does not have yet.
    """
    settings = sweep.settings
    for trial in sweep.trials:
        if trial.code not in (exit_codes.OK, *LASTING):
            trial.state = WAITING  # once more
    rounds = rungs(settings.steps, settings.trials, settings.halving)
    runner = _TrialRunner(sweep, shares)
    with runner.until_stopped():
        runner.wait_for_leftovers()
        for number, (steps, count) in enumerate(rounds):
            is_first = number == 0
            chosen = runner.first(count, suggest) if is_first else survivors(sweep, rounds[number - 1][0], count)
            for trial in chosen:
                if steps not in trial.scores and trial.state in (WAITING, DONE):
                    runner.start(trial, steps)
            runner.wait_for(sweep.trials)
    if runner.stopped_by:
        again = shell.typed("run", shown(sweep.path))
        print(f"{shown(sweep.path)} was stopped; to continue it, type the same command with {again}")
        return 128 + runner.stopped_by
    _conclude(sweep, shares[0])
    return exit_codes.OK if sweep.best() else next((one.code for one in sweep.trials if one.code), exit_codes.BAD_DATA)


def command_of(sweep: Sweep, trial: Trial, steps: int) -> list[str]:
    """Returns the overrides of a trial."""
    own = [*sweep.settings.command, *overrides(trial.values), shell.override("run", str(sweep.run_of(trial)))]
    return own if steps == sweep.settings.steps else [*own, f"train.steps={steps}"]


@dataclass
class _Running:
    """A running trial; without a process, it waits for another process that uses its directory."""

    trial: Trial
    steps: int
    share: TrialShare
    process: subprocess.Popen[bytes] | None = None


class _TrialRunner:
    """Runs trials, one per share at a time, until this process is asked to stop."""

    def __init__(self, sweep: Sweep, shares: Sequence[TrialShare]) -> None:
        self.stopped_by = 0  # the number of a signal
        self._sweep = sweep
        self._free = list(shares)
        self._running: list[_Running] = []
        (sweep.path / "logs").mkdir(exist_ok=True)

    @contextmanager
    def until_stopped(self) -> Iterator[None]:
        """Shows the trials, and passes SIGTERM on to the running ones. Ctrl-C reaches them directly."""

        def stop(number: int, _: Any) -> None:
            self.stopped_by = self.stopped_by or number
            if number == signal.SIGTERM:
                for one in self._running:
                    if one.process is not None:
                        one.process.terminate()

        handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with table.shown(self._sweep, lambda: [(one.trial, one.steps) for one in self._running]):
                yield
        finally:
            for one in self._running:  # none, unless the sweep itself has failed
                if one.process is not None:
                    one.process.terminate()
                    one.process.wait()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def wait_for_leftovers(self) -> None:
        """Waits for trials that a killed sweep left running: they use shares of this sweep."""
        for trial in self._sweep.trials:
            said = False
            while not self.stopped_by and lease.owner(RunDirectory(self._sweep.run_of(trial))) is not None:
                if not said:
                    print(f"{trial.name}  is still training for a sweep that was killed; waiting for it", flush=True)
                said = True
                time.sleep(POLL_SECS)

    def first(self, count: int, suggest: Suggest | None) -> Iterator[Trial]:
        """Yields all trials of the first round, in order, and adds the missing ones.

        With N parallel trials, trial n is drawn only from the results of trials 0 to n - N, which have ended by
        then: the values do not depend on which trial is faster.
        """
        trials = self._sweep.trials
        for number in range(count):
            if number == len(trials) and suggest is not None:
                known = trials[: max(0, number + 1 - self._sweep.settings.parallel)]
                self.wait_for(known)
                if self.stopped_by:
                    return
                self._sweep.add(suggest(number, known))
            yield trials[number]

    def start(self, trial: Trial, steps: int) -> None:
        """Starts a trial as soon as a share is free, unless this process was asked to stop."""
        self._wait(lambda: bool(self._free))
        if not self.stopped_by:
            self._running.append(_Running(trial, steps, self._free.pop(0)))
            self._spawn(self._running[-1])

    def wait_for(self, trials: Sequence[Trial]) -> None:
        """Waits until none of these trials is running."""
        self._wait(lambda: not any(one.trial in trials for one in self._running))

    def _wait(self, condition: Callable[[], bool]) -> None:
        while not condition():
            time.sleep(POLL_SECS)
            for one in list(self._running):
                if one.process is not None:
                    if (code := one.process.poll()) == exit_codes.RUN_IN_USE:
                        one.process = None  # a killed sweep had only just started it
                    elif code is not None:
                        self._release(one)
                        self._take(one, code)
                elif self.stopped_by:
                    self._release(one)
                elif lease.owner(self._run_of(one)) is None:
                    self._spawn(one)

    def _spawn(self, one: _Running) -> None:
        """Runs the command of a trial."""
        words = [sys.executable, "-m", "trainer", *command_of(self._sweep, one.trial, one.steps)]
        environment = {"TRAINER_WARM_MINUTES": WARM_MINUTES} | os.environ | one.share.environment()
        with self._log(one.trial).open("ab") as output, one.share.inherited():
            one.process = subprocess.Popen(words, stdout=output, stderr=output, env=environment)
        if self.stopped_by:  # meanwhile
            one.process.terminate()

    def _release(self, one: _Running) -> None:
        self._running.remove(one)
        self._free.append(one.share)

    def _take(self, one: _Running, code: int) -> None:
        """Records the result of a trial that has ended."""
        trial = one.trial
        if code != exit_codes.OK and self.stopped_by:
            return
        trial.code = code
        if code == exit_codes.OK:
            summary = json.loads(self._run_of(one).summary.read_text())
            _take_score(trial, one.steps, summary, self._sweep.settings.metric)
        else:
            lines = self._log(trial).read_text(errors="replace").splitlines()
            trial.state = f"failed (exit code {code}): {_reason(lines)}"
        self._sweep.remember()
        print(table.line(self._sweep, trial, one.steps), flush=True)
        results.write(self._sweep)

    def _run_of(self, one: _Running) -> RunDirectory:
        return RunDirectory(self._sweep.run_of(one.trial))

    def _log(self, trial: Trial) -> Path:
        return self._sweep.path / "logs" / f"{trial.name}.log"


def _take_score(trial: Trial, steps: int, summary: Mapping[str, Any], metric: str) -> None:
    trial.params_sha256, trial.trained, trial.state = summary["params_sha256"], summary["steps"], DONE
    if not isinstance(summary.get(metric), int | float):
        names = ", ".join(name for name in summary if name.startswith("eval_")) or "none"
        trial.state = f"has no {metric}; its scores: {names}"
    elif not math.isfinite(summary[metric]):
        trial.state = f"{metric} is {summary[metric]}"
    else:
        trial.scores[steps] = summary[metric]


def _reason(lines: Sequence[str]) -> str:
    """Returns the last line that a failed run printed about its failure."""
    said = [line.strip() for line in lines if line.strip()]
    named = [line for line in said if line.startswith(("trainer: ", "failed"))]
    return (named[-1:] or said[-1:] or ["nothing was printed"])[0][:LONGEST]


def _conclude(sweep: Sweep, share: TrialShare) -> None:
    """Draws the results, names the best trial, and links it; `share` is that of a trial."""
    results.write(sweep)
    try:
        results.plot(sweep)
    except ImportError:
        print(f"no {results.PLOT} was drawn: pip install 'trainer[sweep]'")
    with suppress(ImportError):
        results.write_hparams(sweep)
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
    print(f"best          {shown(sweep.run_of(best))}, {sweep.settings.metric} {best.score:.6g} at step {best.trained}")
    again = [*share.prefix(), *program(), *sweep.settings.command, *overrides(best.values)]
    print(f"repeat        {shell.joined(again)}")
