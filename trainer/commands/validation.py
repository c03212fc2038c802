"""Completes and validates a config for its mode."""

import os

from trainer.config.schema import RunConfig
from trainer.config.typed import Mode, TypedConfig
from trainer.faults.problems import Problem
from trainer.observe.machine import this_machine
from trainer.plan.checks.export import check_checkpoint, check_file, check_formats
from trainer.plan.checks.loggers import check_loggers
from trainer.plan.resolve import resolve
from trainer.plan.validate import validate

OF_A_RUN = (
    Mode.attach,
    Mode.status,
    Mode.stop,
    Mode["continue"],
    Mode.save,
    Mode.report,
    Mode.export,
    Mode.evaluate,
    Mode.predict,
    Mode.log,
    Mode.check,
)  # its config is in its directory
WITHOUT_A_CLUSTER = (  # the doctor reports a config's problems as findings
    *OF_A_RUN,
    *(Mode.runs, Mode.console, Mode.doctor, Mode.clean, Mode.init, Mode.schema),
)


def complete(typed: TypedConfig, config: RunConfig) -> tuple[RunConfig, list[Problem]]:
    """Returns the config completed for its command, and the problems beyond those of single keys."""
    mode = typed.mode
    if mode in OF_A_RUN:
        return config, _of_a_run(typed, config)
    if mode is Mode.init:
        from trainer.commands.init.project import check as check_folder

        return config, check_folder(typed.project)
    if mode in WITHOUT_A_CLUSTER:
        return config, []
    if mode is Mode.selftest:
        from trainer.commands import selftest

        config = selftest.adapted(config)
    config, problems = resolve(config, os.environ, mode, typed.target)
    if mode is Mode.sweep:
        from trainer.commands.sweep.command import check as check_sweep

        return config, problems + check_sweep(config, typed.sweep)
    machine = this_machine(with_gpu_memory=bool(config.device.gpus))
    problems += validate(config, machine, mode, typed.target)
    if mode is Mode.chaos:
        from trainer.commands.chaos.check import check

        problems += check(config, typed.chaos)
    return config, problems


def _of_a_run(typed: TypedConfig, config: RunConfig) -> list[Problem]:
    mode = typed.mode
    missing = Problem("run", "not-set", f"trainer {mode.value} needs a run directory", "e.g. run=runs/mine")
    problems = [] if config.run else [missing]
    if mode in (Mode.export, Mode.evaluate, Mode.predict):
        problems += [*check_formats(typed.export.formats), *check_checkpoint(typed.export.checkpoint)]
    if mode in (Mode.evaluate, Mode.predict):
        problems += check_file(typed.export.to, writes=mode is Mode.predict)
    if mode is Mode.log:
        none = Problem("loggers", "not-set", "trainer log needs at least one logger", "e.g. loggers=[csv]")
        problems += check_loggers(config.loggers) if config.loggers else [none]
    return problems
