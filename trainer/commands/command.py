"""The command line: composes, resolves and validates the config, then runs the command of its mode."""

import importlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn

from trainer.commands.start import Start
from trainer.config import compose, shell
from trainer.config.schema import Launch, Mode, RunConfig
from trainer.faults import exit_codes
from trainer.faults.problems import Problem
from trainer.observe.machine import this_machine
from trainer.plan import resolve as plan_resolve
from trainer.plan import validate as plan_validate
from trainer.plan.checks.export import check_export, check_file
from trainer.plan.checks.loggers import check_loggers

# Each module has run(config, start), which returns the exit code. By name: a command imports only what it needs.
COMMANDS: Mapping[Mode, str] = {
    Mode.train: "trainer.commands.train",
    Mode.plan: "trainer.commands.plan",
    Mode.sweep: "trainer.commands.sweep.command",
    Mode.status: "trainer.commands.runs.status",
    Mode.stop: "trainer.commands.runs.stop",
    Mode["continue"]: "trainer.commands.runs.continue_run",
    Mode.save: "trainer.commands.runs.save",
    Mode.attach: "trainer.commands.runs.attach",
    Mode.runs: "trainer.commands.runs.table",
    Mode.report: "trainer.commands.runs.report",
    Mode.export: "trainer.commands.runs.export",
    Mode.evaluate: "trainer.commands.runs.evaluate",
    Mode.predict: "trainer.commands.runs.predict",
    Mode.log: "trainer.commands.runs.log",
    Mode.console: "trainer.commands.console.server",
    Mode.doctor: "trainer.commands.doctor.probe",
    Mode.check: "trainer.commands.check.claims",
    Mode.chaos: "trainer.commands.chaos.runner",
    Mode.render: "trainer.commands.render",
    Mode.clean: "trainer.commands.clean",
    Mode.selftest: "trainer.commands.selftest",
    Mode.init: "trainer.commands.init.project",
    Mode.schema: "trainer.commands.schema",
}
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


def run(start: Start) -> NoReturn:
    """Runs the command line, with the early nursery for its first run, and ends the process."""
    starts = iter([start])
    compose.run(
        lambda config: main(config, next(starts, None) or Start(time.time())),
        resolve,
        validate,
        several=lambda runs: _run_several(runs, start),
    )


def _run_several(runs: compose.Runs, start: Start) -> int:
    from trainer.commands.sweep.command import run_combinations

    start.discard()
    return guarded(lambda: run_combinations(runs), Mode.sweep)


def resolve(config: RunConfig) -> list[Problem]:
    """Completes the config of a mode that needs a cluster."""
    return [] if config.mode in WITHOUT_A_CLUSTER else plan_resolve.resolve(config, os.environ)


def validate(config: RunConfig) -> list[Problem]:
    """Returns what is wrong with a resolved config beyond its single keys."""
    if config.mode in OF_A_RUN:
        missing = Problem("run", f"mode={config.mode.value} needs the directory of a run", "e.g. run=runs/mine")
        problems = [] if config.run else [missing]
        if config.mode in (Mode.export, Mode.evaluate, Mode.predict):
            problems += check_export(config.export)
        if config.mode in (Mode.evaluate, Mode.predict):
            problems += check_file(config.export.to, writes=config.mode is Mode.predict)
        if config.mode is Mode.log:
            none = Problem("loggers", "mode=log needs at least one logger", "e.g. loggers=[csv]")
            problems += check_loggers(config.loggers) if config.loggers else [none]
        return problems
    if config.mode is Mode.init:
        from trainer.commands.init.project import check as check_folder

        return check_folder(config)
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


def main(config: RunConfig, start: Start) -> int:
    """Runs the command of the config's mode; returns the exit code."""
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("trainer").setLevel(logging.INFO)
    is_local = config.job is None and config.launch.name is Launch.local
    if not is_local or config.mode not in (Mode.train, Mode.selftest):
        start.discard()
    return guarded(lambda: importlib.import_module(COMMANDS[config.mode]).run(config, start), config.mode)


def guarded(command: Callable[[], int], mode: Mode) -> int:
    """Returns the exit code of a command, or of the error that ended it, which is printed."""
    try:
        return int(command())
    except KeyboardInterrupt:
        print("\nStopped before the first step." if mode is Mode.train else "\nStopped.", file=sys.stderr)
        return exit_codes.INTERRUPTED
    except BrokenPipeError:
        raise  # nobody reads what it prints, as in `mode=plan | head`
    except Exception as error:
        code = exit_codes.exit_code_of(error)
        if code == exit_codes.INTERNAL and not isinstance(error, exit_codes.TrainerError):
            traceback.print_exc()
        print(shell.printable(f"trainer: {error}"), file=sys.stderr)
        return code
