"""Prints the output of commands: pages as wide as the terminal, if there is one, and JSON for programs."""

import json
import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console

PIPE_COLUMNS = 140  # width where there is no terminal


class Output(Console):
    """A rich console that leaves a broken pipe to the command line, which then ends as other programs do."""

    def __init__(self, pipe_columns: int = PIPE_COLUMNS) -> None:
        super().__init__(highlight=False)
        if not self.is_terminal:
            self.width = pipe_columns

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def print_json(value: Any) -> None:
    """Prints a value as JSON; NaN and infinities, which JSON does not have, as null."""
    print(json.dumps(_finite(value), indent=1))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
