"""The command line: composes, resolves and validates the config, then runs the command of its mode."""

import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from trainer.commands.by_mode import COMMANDS, TRAINING
from trainer.commands.start import Start
from trainer.commands.validation import complete
from trainer.config import compose, shell
from trainer.config.compose import Invocation
from trainer.config.schema import Launch
from trainer.config.typed import Mode
from trainer.faults import exit_codes


def run(start: Start) -> NoReturn:
    """Runs the command line, with the early nursery for its first run, and ends the process."""
    starts = iter([start])
    compose.run(
        lambda given: main(given, next(starts, None) or Start(time.time())),
        complete,
        several=lambda runs: _run_several(runs, start),
    )


def _run_several(runs: Sequence[Invocation], start: Start) -> int:
    from trainer.commands.sweep.command import run_combinations

    start.discard()
    return guarded(lambda: run_combinations(runs), Mode.sweep)


def main(given: Invocation, start: Start) -> int:
    """Runs the command of the mode that was typed; returns the exit code."""
    mode, config = given.typed.mode, given.config
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("trainer").setLevel(logging.INFO)
    is_local = config.job is None and config.launch.name is Launch.local
    if not is_local or mode not in (Mode.train, Mode.selftest):
        start.discard()
    if (train := TRAINING.get(mode)) is not None:
        return guarded(lambda: train(given, start), mode)
    return guarded(lambda: COMMANDS[mode](given), mode)


def guarded(command: Callable[[], int], mode: Mode) -> int:
    """Returns the exit code of a command, or of the error that ended it, which is printed."""
    try:
        return int(command())
    except KeyboardInterrupt:
        print("\nStopped before the first step." if mode is Mode.train else "\nStopped.", file=sys.stderr)
        return exit_codes.INTERRUPTED
    except BrokenPipeError:
        raise  # its output is no longer read, as in `trainer plan | head`
    except Exception as error:
        code = exit_codes.exit_code_of(error)
        if code == exit_codes.INTERNAL and not isinstance(error, exit_codes.TrainerError):
            traceback.print_exc()
        print(shell.printable(f"trainer: {error}"), file=sys.stderr)
        return code
