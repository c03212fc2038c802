"""Reads files with one JSON object per line, which may be damaged, or being written by other processes."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

LINE_BYTES = 512  # more than the length of most lines
TAIL_BYTES = 64 * 1024  # that hold a last line

Measurement = dict[str, float]  # numbers by name, one of them a step


def parse(line: bytes) -> dict[str, Any] | None:
    """Returns the JSON object in a line; None for a line that is incomplete or anything else."""
    with suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(line.decode()), dict):
            return value
    return None


def measured(line: bytes) -> Measurement | None:
    """Returns the values of a measurement, numbers at a step; None for any other line."""
    values = parse(line)
    return values if values is not None and is_measured(values) else None


def is_measured(values: Mapping[str, Any]) -> bool:
    """Whether all values are numbers, and one of them is the step."""
    step = values.get("step")
    return type(step) is int and step >= 0 and all(type(value) in (int, float) for value in values.values())


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a file; skips other lines, and all lines of a file that cannot be read."""
    with suppress(OSError), _open(path) as file:
        for line in file:
            if (value := parse(line)) is not None:
                yield value


def measured_lines(path: Path) -> Iterator[Measurement]:
    """Yields the lines that are measurements."""
    return filter(is_measured, lines(path))


def sampled(path: Path, most: int) -> Iterator[Measurement]:
    """Yields measurements: at most `most` of a large file, evenly spread, and the last one."""
    with suppress(OSError), _open(path) as file:
        if (size := path.stat().st_size) <= most * LINE_BYTES:
            yield from measured_lines(path)
            return
        for number in range(most):
            file.seek(number * size // most)
            if number:
                file.readline()  # the rest of a line
            if (value := measured(file.readline())) is not None:
                yield value
    if last := last_measured(path):
        yield last


class Tail:
    """Reads the lines added to a file since the last call; all lines, if another file has replaced it."""

    def __init__(self, path: Path) -> None:
        self.path, self._inode, self._offset = path, 0, 0

    def new(self) -> Iterator[Measurement]:
        """Yields the complete lines that are measurements."""
        with suppress(OSError), _open(self.path) as file:
            if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            while (line := file.readline()).endswith(b"\n"):
                self._offset += len(line)
                if (value := measured(line)) is not None:
                    yield value


def last_measured(path: Path) -> Measurement:
    """Returns the last measurement in a file; empty if there is none."""
    with suppress(OSError), _open(path) as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            if (value := measured(line)) is not None:
                return value
    return {}


def _open(path: Path) -> BinaryIO:
    """Opens a regular file; opening a pipe would wait for its writer.

    Raises:
        OSError: if the file is missing, or cannot be read.
    """
    if not path.is_file():
        raise FileNotFoundError(path)
    return path.open("rb")
