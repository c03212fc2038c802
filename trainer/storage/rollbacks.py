"""Records in rollbacks.jsonl when a run returned to its newest checkpoint, and to which."""

import json
import os
from pathlib import Path


def count_rollbacks(path: Path) -> int:
    """Returns how often a run has rolled back; the file need not exist."""
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def record_rollback(path: Path, *, step: int, checkpoint: int | None) -> None:
    """Records a rollback; the line is on disk when this returns.

    Args:
        step: the step whose update was left out.
        checkpoint: step of the newest checkpoint; None: the run starts from the beginning.
    """
    with path.open("a") as file:
        file.write(json.dumps({"step": step, "checkpoint": checkpoint}) + "\n")
        file.flush()
        os.fsync(file.fileno())
