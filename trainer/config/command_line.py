"""The words that this process was called with: the one module that reads or replaces them."""

import sys
from collections.abc import Sequence
from pathlib import Path


def typed() -> list[str]:
    """Returns the words of the command line, without the program."""
    return sys.argv[1:]


def pass_on(words: Sequence[str]) -> None:
    """Replaces the words of the command line by those that Hydra is to read."""
    sys.argv[1:] = words


def spelled(words: Sequence[str]) -> list[str]:
    """Returns words with their command first, `plan` for the key `mode=plan`, as pages spell it."""
    commands = [word.removeprefix("mode=") for word in words if word.startswith("mode=")]
    return [*commands, *(word for word in words if not word.startswith("mode="))]


def program() -> list[str]:
    """Returns the words by which this program was called."""
    name = Path(sys.argv[0]).name
    return ["python", "-m", "trainer"] if name == "__main__.py" else [name]
