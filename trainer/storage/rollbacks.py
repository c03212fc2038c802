"""rollbacks.jsonl: how often, and from where, a run has gone back to a checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path


def count_rollbacks(path: Path) -> int:
    """How often a run has gone back; its file need not exist."""
    return len(path.read_text().splitlines()) if path.exists() else 0


def record_rollback(path: Path, *, step: int, checkpoint: int | None) -> None:
    """Writes down that a run goes back; it is on disk when this returns.

    Args:
        step: whose update was left out.
        checkpoint: step of the newest checkpoint; none: the run begins anew.
    """
    with path.open("a") as file:
        file.write(json.dumps({"step": step, "checkpoint": checkpoint}) + "\n")
        file.flush()
        os.fsync(file.fileno())
