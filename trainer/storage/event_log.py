"""What the launcher of a run did and said, in order: events.jsonl, one JSON line for each."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

LAUNCH, START, EXIT, RESTART, MESSAGE, END = "launch", "start", "exit", "restart", "message", "end"


class EventLog:
    """Appends events with their time; every launch of the run writes to the same file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, event: str, text: str = "", **values: Any) -> None:
        """Adds an event: LAUNCH, START, EXIT, RESTART, MESSAGE or END.

        Args:
            text: what was printed about it, if anything was.
            values: what else is known, e.g. `task`, `attempt`, `code`.
        """
        line = {"time": round(time.time(), 3), "event": event, **values, **({"text": text} if text else {})}
        # Opened each time: an event is rare. Whoever must write reports a full disk.
        with contextlib.suppress(OSError), self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
