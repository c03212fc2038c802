"""trainer sweep: tries values of some keys; and --multirun, which tries every combination."""

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from trainer.commands.sweep import runner, sampler, shares, space
from trainer.commands.sweep.space import Range, Space, Values
from trainer.commands.sweep.trials import Sweep, SweepSettings, Trial
from trainer.config import arguments, compose
from trainer.config.command_line import typed
from trainer.config.compose import Invocation
from trainer.config.schema import BestIs, RunConfig
from trainer.config.typed import Mode, SweepConfig, TypedConfig
from trainer.faults.problems import ConfigError, Problem
from trainer.observe.machine import this_machine
from trainer.plan import resolve, validate
from trainer.plan.devices import Machine
from trainer.storage import evaluations

OWN = ("mode=", "sweep=", "sweep.", "run=")  # overrides that are not those of the trials
TRIALS = 20  # unless the config says otherwise
MOST_CHECKED = 100  # configs


def check(config: RunConfig, asked: SweepConfig) -> list[Problem]:
    """Returns the problems of a sweep: tries each value in a config, with the first values of the other keys."""
    if not asked.space:
        remedy = "e.g. 'sweep.space={optimizer.learning_rate: [0.1, 0.01]}'"
        return [Problem("sweep.space", "not-set", "trainer sweep needs keys with values", remedy)]
    found, problems = space.parse(asked.space)
    if asked.halving is not None:
        changed = [name for name in ("train.steps", "train.epochs") if name in found]
        problems += [
            Problem(f"sweep.space.{name}", "conflict", "is what sweep.halving changes", "remove one")
            for name in changed
        ]
        if config.train.epochs is not None:
            message = "sweep.halving divides steps"
            problems.append(Problem("train.epochs", "conflict", message, "type train.steps=N instead"))
    machine = this_machine()
    if problems := problems + shares.check(asked, config.launch, config.device, machine):
        return problems
    own = shares.machine_of(asked, machine)
    return list(dict.fromkeys(one for values in _corners(found) for one in _problems_of(values, own)))


def run(config: RunConfig, asked: SweepConfig) -> int:
    """Runs the trials that `sweep` describes; returns 0, or 130 or 143 if it was stopped.

    Raises:
        OtherSweepError: if the folder has another sweep.
        NoOptunaError: if values are to be drawn and Optuna is not installed.
    """
    found, _ = space.parse(asked.space)
    settings = _settings(config, asked, _common(), dict(asked.space), asked.trials or TRIALS)
    settings = replace(settings, halving=asked.halving, seed=asked.seed, parallel=asked.parallel)
    if asked.trials is None and space.is_grid(found):
        return _run_grid(config, asked, settings, found)

    def suggest(number: int, before: Sequence[Trial]) -> Values:
        return sampler.suggest(found, number, before, is_lowest=settings.is_lowest, seed=asked.seed)

    suggest(0, [])  # fails now if it must
    return runner.run(Sweep(_folder(config), settings, found), shares.shares(asked, this_machine()), suggest)


def run_combinations(jobs: Sequence[Invocation]) -> int:
    """Runs the combinations of --multirun, in order.

    Raises:
        ConfigError: if the config asks for features of trainer sweep, or for shares that this machine does not have.
    """
    config, asked = jobs[0].config, jobs[0].typed.sweep
    problems = [
        Problem(
            f"sweep.{name}", "no-effect", "-m tries every combination", f"type trainer sweep, or leave sweep.{name} out"
        )
        for name in ("space", "trials", "halving")
        if getattr(asked, name)
    ]
    if problems := problems + shares.check(asked, config.launch, config.device, this_machine()):
        raise ConfigError(problems)
    common = [word for word in jobs[0].overrides if all(word in job.overrides for job in jobs)]
    given = [dict(word.lstrip("+").split("=", 1) for word in job.overrides if word not in common) for job in jobs]
    texts = {key: dict.fromkeys(values[key] for values in given) for key in given[0]}
    parse = OverridesParser.create().parse_override
    found = {key: [parse(f"{key}={text}").value() for text in texts[key]] for key in texts}
    command = [*(word for word in common if not word.startswith(OWN)), *_flags()]
    return _run_grid(config, asked, _settings(config, asked, command, found, len(jobs)), found)


def _settings(
    config: RunConfig, asked: SweepConfig, command: list[str], found: dict[str, Any], trials: int
) -> SweepSettings:
    metric = asked.metric
    is_own = metric == f"eval_{config.evaluate.best_metric}"
    is_lowest = evaluations.prefers_less(metric, config.evaluate.best_is if is_own else BestIs.auto)
    own = shares.machine_of(asked, this_machine()).cores if shares.are_asked_for(asked) else None
    return SweepSettings(command, found, metric, is_lowest, config.train.steps, trials, cores=own)


def _run_grid(config: RunConfig, asked: SweepConfig, settings: SweepSettings, found: Space) -> int:
    combinations = list(space.grid(found))
    sweep = Sweep(_folder(config), replace(settings, trials=len(combinations), parallel=1), found)
    sweep.add(*combinations[len(sweep.trials) :])
    return runner.run(sweep, shares.shares(asked, this_machine()))


def _common() -> list[str]:
    """Returns the overrides and flags of this command that all trials share."""
    given = arguments.sort(typed()).overrides
    mode = [] if f"mode={Mode.sweep.value}" in given else [f"mode={Mode.train.value}"]  # else a file says it
    return [*(word for word in given if not word.startswith(OWN)), *mode, *_flags()]


def _flags() -> list[str]:
    """Returns the flags that choose files."""
    given = arguments.sort(typed()).parse()
    named = {"--config-dir": given.config_dir, "--config-name": given.config_name}
    return [f"{flag}={value}" for flag, value in named.items() if value]


def _folder(config: RunConfig) -> Path:
    """Returns the sweep's folder: the one that run=PATH names, or a new one."""
    if config.run is not None:
        return Path(config.run).resolve()
    return Path("sweeps", f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}").resolve()


def _corners(found: Space) -> Iterator[Values]:
    """Yields the first values, and each other value beside the first of the other keys."""
    choices = {key: one.ends() if isinstance(one, Range) else one for key, one in found.items()}
    first = {key: values[0] for key, values in choices.items()}
    yield from islice((first | {key: value} for key, values in choices.items() for value in values), MOST_CHECKED)


def _problems_of(values: Values, machine: Machine) -> list[Problem]:
    """Returns the problems of a trial's config with these values; `machine` is what a trial can use."""

    def complete(typed: TypedConfig, config: RunConfig) -> tuple[RunConfig, list[Problem]]:
        config, problems = resolve.resolve(config, os.environ, typed.mode)
        return config, [*problems, *validate.validate(config, machine, typed.mode)]

    try:
        given = arguments.sort(typed())
        own = [word for word in given.overrides if not word.startswith(OWN)]
        compose.load([*own, *space.overrides(values)], complete, config_dir=given.parse().config_dir)
    except ConfigError as error:
        return list(error.problems)
    return []
