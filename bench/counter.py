"""The counter of a peer: a small file that it maps and the bench reads, without a message or a thread between them."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

_LAYOUT = struct.Struct("<qd")  # steps, Unix time of the first one in seconds
NAME = "counter"


class Counter:
    """The peer's side."""

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory) / NAME
        with path.open("w+b") as file:
            file.truncate(_LAYOUT.size)
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._first_at = 0.0

    def set(self, steps: int) -> None:
        """Tells how many steps are done."""
        if steps > 0 and not self._first_at:
            self._first_at = time.time()
        _LAYOUT.pack_into(self._map, 0, steps, self._first_at)


def read(directory: Path) -> tuple[int, float | None]:
    """Steps, and when the first was done (Unix time, seconds); 0 and None before there is a counter."""
    try:
        steps, first_at = _LAYOUT.unpack((directory / NAME).read_bytes())
    except (OSError, struct.error):  # not there, or not grown to its size yet
        return 0, None
    return steps, first_at or None
