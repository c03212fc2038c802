"""Records what a task did, one JSON line per event, in <run>/journal/<task>.jsonl; `mode=check` reads it."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any


class Journal:
    """Appends events; every attempt of a task writes to the same file."""

    def __init__(self, path: Path | None) -> None:
        """Opens the file; without a path, nothing is written."""
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", buffering=1)

    def write(self, event: str, **values: Any) -> None:
        """Adds an event with its time: CLOCK_MONOTONIC, seconds, the same clock for all tasks of a machine."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # whoever must write reports a full disk
                self._file.write(json.dumps({"event": event, "at": round(time.monotonic(), 6), **values}) + "\n")
