"""`python -m trainer`: starts importing TensorFlow, then runs the command."""

import io
import os
import signal
import sys
import time
from typing import NoReturn

from trainer.commands.start import Start, start_early


def console() -> None:
    """Runs the command line, for `python -m trainer` and the console script."""
    started_at = time.time()
    _open_standard_streams()
    start = Start(started_at, start_early(sys.argv[1:]))
    try:
        try:
            from trainer.commands import command  # imports Hydra, while the nursery imports TensorFlow

            command.run(start)
        finally:
            start.discard()
            sys.stdout.flush()
    except BrokenPipeError:
        _end_without_reader()
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)  # the config was not read yet
        sys.exit(128 + signal.SIGINT)


def _end_without_reader() -> NoReturn:
    """Exits as other programs do when their output is no longer read: `trainer --help | head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer goes there
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.raise_signal(signal.SIGPIPE)
    sys.exit(1)


def _open_standard_streams() -> None:
    """Replaces closed streams, as services may have: the next file to be opened would take their place."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, errors="backslashreplace")  # noqa: SIM115 (open as long as the process)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="backslashreplace")  # a locale may lack a character, of a bar or of a path


if __name__ == "__main__":
    console()
