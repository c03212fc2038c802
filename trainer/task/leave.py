"""Ends the process of a task with its exit code, and logs a failure."""

import contextlib
import logging
import os
import sys
from typing import NoReturn

from trainer.faults import exit_codes
from trainer.faults.exit_codes import TrainerError
from trainer.workload.data import find_data_error

MESSAGE_LINES = 12  # of a TensorFlow error; the graph that it quotes follows

_log = logging.getLogger(__name__)


def leave(code: int) -> NoReturn:
    """Ends the process without finalizing it: closing a session, or a server, can wait for peers that have left."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk has no room for the log
            stream.flush()
    os._exit(code)


def log_failure(raised: Exception) -> int:
    """Logs an error that ends this process, with its traceback if it is unexpected; returns the exit code."""
    error = find_data_error(raised) or raised
    code = exit_codes.exit_code_of(error)
    if code == exit_codes.INTERNAL and not isinstance(error, TrainerError):
        _log.error("unexpected error", exc_info=error)
    text = getattr(error, "message", None) or str(error)
    _log.error("failed: %s: %s", type(error).__name__, "\n".join(text.splitlines()[:MESSAGE_LINES]))
    return code
