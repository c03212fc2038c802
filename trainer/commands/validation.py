"""Completes and validates a config as its mode needs it."""

import os

from trainer.config.schema import Mode, RunConfig
from trainer.faults.problems import Problem
from trainer.observe.machine import this_machine
from trainer.plan import resolve as plan_resolve
from trainer.plan import validate as plan_validate
from trainer.plan.checks.export import check_export, check_file
from trainer.plan.checks.loggers import check_loggers

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


def resolve(config: RunConfig) -> list[Problem]:
    """Completes the config of a mode that needs a cluster."""
    return [] if config.mode in WITHOUT_A_CLUSTER else plan_resolve.resolve(config, os.environ)


def validate(config: RunConfig) -> list[Problem]:
    """Returns what is wrong with a resolved config beyond its single keys."""
    if config.mode in OF_A_RUN:
        missing = Problem("run", "not-set", f"trainer {config.mode.value} needs a run directory", "e.g. run=runs/mine")
        problems = [] if config.run else [missing]
        if config.mode in (Mode.export, Mode.evaluate, Mode.predict):
            problems += check_export(config.export)
        if config.mode in (Mode.evaluate, Mode.predict):
            problems += check_file(config.export.to, writes=config.mode is Mode.predict)
        if config.mode is Mode.log:
            none = Problem("loggers", "not-set", "trainer log needs at least one logger", "e.g. loggers=[csv]")
            problems += check_loggers(config.loggers) if config.loggers else [none]
        return problems
    if config.mode is Mode.init:
        from trainer.commands.init.project import check as check_folder

        return check_folder(config.project)
    if config.mode in WITHOUT_A_CLUSTER:
        return []
    if config.mode is Mode.sweep:
        from trainer.commands.sweep.command import check as check_sweep

        return check_sweep(config)
    machine = this_machine(with_gpu_memory=bool(config.device.gpus))
    problems = plan_validate.validate(config, machine)
    if config.mode is Mode.chaos:
        from trainer.commands.chaos.check import check

        problems += check(config)
    return problems
