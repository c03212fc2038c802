"""Reads files of JSON objects, one on each line, which others may be writing."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

LINE_BYTES = 512  # more than most lines have
TAIL_BYTES = 64 * 1024  # that hold a last line


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a file of lines; a line that is being written, or was cut off, is left out."""
    with suppress(FileNotFoundError), path.open(errors="replace") as file:
        for line in file:
            with suppress(ValueError):
                if isinstance(value := json.loads(line), dict):
                    yield value


def sampled(path: Path, most: int) -> Iterator[dict[str, Any]]:
    """Yields JSON objects of a file of lines: of a large file at most so many, from all over it, and its last one."""
    with suppress(FileNotFoundError):
        if (size := path.stat().st_size) <= most * LINE_BYTES:
            yield from lines(path)
            return
        with path.open("rb") as file:
            for number in range(most):
                file.seek(number * size // most)
                if number:
                    file.readline()  # the rest of one
                with suppress(ValueError):
                    if isinstance(value := json.loads(file.readline()), dict):
                        yield value
        yield last_line(path)


class Tail:
    """What was added to a file of lines since it was last asked; all of it, if another file has taken its place."""

    def __init__(self, path: Path) -> None:
        self.path, self._inode, self._offset = path, 0, 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yields the JSON objects of lines that are complete."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            while (line := file.readline()).endswith(b"\n"):
                self._offset += len(line)
                with suppress(ValueError):
                    if isinstance(value := json.loads(line), dict):
                        yield value


def last_line(path: Path) -> dict[str, Any]:
    """The last JSON object of a file of lines; empty if there is none."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            with suppress(ValueError):
                if isinstance(value := json.loads(line), dict):
                    return value
    return {}
