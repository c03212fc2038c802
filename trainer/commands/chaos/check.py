"""Checks whether the faults that a config asks for can be injected."""

import difflib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trainer.commands.chaos import random_faults, schedule
from trainer.commands.chaos.schedule import FaultTargets
from trainer.commands.chaos.soak import STEPS
from trainer.config.schema import RunConfig
from trainer.config.typed import ChaosConfig
from trainer.faults.problems import ConfigError, Problem


def check(config: RunConfig, chaos: ChaosConfig) -> Iterator[Problem]:
    """Yields the reasons why the faults of the config cannot be injected."""
    if config.job is not None:
        message = "trainer chaos starts every task itself; it cannot run one task alone"
        yield Problem("mode", "conflict", message, "leave out job and task")
    given = [name for name in ("schedule", "random", "minutes") if getattr(chaos, name)]
    if len(given) != 1:
        sources = " and ".join(f"chaos.{name}" for name in given) or "none"
        message = f"chaos takes its faults from one of chaos.schedule, chaos.random and chaos.minutes; given: {sources}"
        yield Problem("chaos", "conflict", message, f"type chaos.random=20, or {schedule.typed('kill worker:0 @40')}")
    if config.run is not None and any(Path(config.run).glob("*")):
        message = f"{config.run} holds an earlier run; chaos needs a new directory"
        yield Problem("run", "taken", message, "choose another, or none")
    if config.train.epochs is not None:
        yield Problem("train.epochs", "conflict", "chaos schedules its faults by step", "type train.steps=N instead")
    fewest = random_faults.FIRST_STEP + random_faults.LAST_STEPS
    if chaos.random and config.train.steps < fewest:
        message = f"{config.train.steps} steps leave no room for a random fault"
        yield Problem("train.steps", "out-of-range", message, f"type train.steps={fewest} or more")
    unknown = [kind for kind in chaos.kinds if kind not in random_faults.KINDS]
    for kind in unknown:
        near = (*difflib.get_close_matches(kind, random_faults.KINDS, n=1), "kill-worker")[0]
        message = f"unknown kind of fault {kind!r}; available: {', '.join(random_faults.KINDS)}"
        yield Problem("chaos.kinds", "unknown-choice", message, f"e.g. chaos.kinds=[{near}]")
    crew = FaultTargets.of(config.cluster, config.strategy, config.train.steps)
    can, left_out = random_faults.possible([] if unknown else chaos.kinds, crew, by_time=bool(chaos.minutes))
    if not can:
        yield Problem("chaos.kinds", "no-match", "; ".join(left_out), "choose other kinds, or another cluster")
    try:
        schedule.parse(chaos.schedule, crew)
    except ConfigError as error:
        yield from error.problems


def adapted(config: RunConfig, chaos: ChaosConfig) -> RunConfig:
    """Returns the config of the runs: with a journal; for a soak, without an end and with a budget per fault."""
    if not chaos.minutes:
        return replace(config, history=replace(config.history, journal=True))  # of a soak it would fill the disk
    restart = replace(config.restart, window_secs=min(config.restart.window_secs, chaos.every_secs))
    return replace(config, train=replace(config.train, steps=STEPS), restart=restart)
