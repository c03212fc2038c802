"""Errors about files of a run that are damaged, or were written by something else."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf.errors import OmegaConfBaseException

from trainer.config.shell import printable
from trainer.faults import exit_codes
from trainer.faults.exit_codes import TrainerError

Parsed = TypeVar("Parsed")
DAMAGED = (
    *(ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError),
    *(yaml.YAMLError, OmegaConfBaseException),
)


class RunFileError(TrainerError, ValueError):
    """A file of a run directory cannot be used; the message has its path, the problem and a remedy."""

    exit_code = exit_codes.BAD_DATA

    def __init__(self, path: Path, problem: str, remedy: str) -> None:
        super().__init__(f"{path}: {problem}; {remedy}")


def parsed(path: Path, parse: Callable[[bytes], Parsed], remedy: str) -> Parsed:
    """Reads and parses a file.

    Raises:
        RunFileError: if it is damaged, or not a regular file.
        OSError: if it is missing, or cannot be read.
    """
    if path.exists() and not path.is_file():  # reading a pipe would block
        raise RunFileError(path, "is not a file", remedy)
    try:
        return parse(path.read_bytes())
    except DAMAGED as error:
        why = printable(str(error).split("\n")[0]) or type(error).__name__
        raise RunFileError(path, f"is damaged ({why})", remedy) from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads the object in a file; empty if the file is missing or damaged."""
    with suppress(OSError, *DAMAGED):
        if path.is_file() and isinstance(value := json.loads(path.read_bytes()), dict):
            return value
    return {}
