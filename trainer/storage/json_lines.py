"""Reads files of JSON objects, one on each line, which others may be writing, and which may be damaged."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

LINE_BYTES = 512  # more than most lines have
TAIL_BYTES = 64 * 1024  # that hold a last line


def parse(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None for one that is being written, was cut off, or is something else."""
    with suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(line.decode()), dict):
            return value
    return None


def measured(line: bytes) -> dict[str, Any] | None:
    """A line of numbers, at a step; None for any other."""
    values = parse(line)
    return values if values is not None and is_measured(values) else None


def is_measured(values: Mapping[str, Any]) -> bool:
    """Whether values are numbers, and one of them a step."""
    step = values.get("step")
    return type(step) is int and step >= 0 and all(type(value) in (int, float) for value in values.values())


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a file of lines; what is none is left out, as are all where it cannot be read."""
    with suppress(OSError), _open(path) as file:
        for line in file:
            if (value := parse(line)) is not None:
                yield value


def measured_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields those that are measured."""
    return filter(is_measured, lines(path))


def sampled(path: Path, most: int) -> Iterator[dict[str, Any]]:
    """Yields lines that are measured: of a large file at most so many, from all over it, and its last one."""
    with suppress(OSError), _open(path) as file:
        if (size := path.stat().st_size) <= most * LINE_BYTES:
            yield from measured_lines(path)
            return
        for number in range(most):
            file.seek(number * size // most)
            if number:
                file.readline()  # the rest of one
            if (value := measured(file.readline())) is not None:
                yield value
    if last := last_measured(path):
        yield last


class Tail:
    """What was added to a file of lines since it was last asked; all of it, if another file has taken its place."""

    def __init__(self, path: Path) -> None:
        self.path, self._inode, self._offset = path, 0, 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yields the lines that are complete and measured."""
        with suppress(OSError), _open(self.path) as file:
            if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            while (line := file.readline()).endswith(b"\n"):
                self._offset += len(line)
                if (value := measured(line)) is not None:
                    yield value


def last_measured(path: Path) -> dict[str, Any]:
    """The last line of a file that is measured; empty if there is none."""
    with suppress(OSError), _open(path) as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            if (value := measured(line)) is not None:
                return value
    return {}


def _open(path: Path) -> BinaryIO:
    """Opens a plain file; a pipe would wait for its writer.

    Raises:
        OSError: if there is none, or it cannot be read.
    """
    if not path.is_file():
        raise FileNotFoundError(path)
    return path.open("rb")
