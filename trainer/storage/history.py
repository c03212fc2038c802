"""The series of a run: one JSON line per reported step in history.jsonl."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from trainer.storage.run_directory import write_atomically


class History:
    """Appends lines; each is on disk, as far as the operating system goes, when `write` returns."""

    def __init__(self, path: Path, *, start: int) -> None:
        """Opens the file of a run that (re)starts at global step `start`; lines of later steps are taken back."""
        self.last_step = 0  # of the lines that stay
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _step_of(line) <= start]
            self.last_step = max((int(_step_of(line)) for line in kept), default=0)
            write_atomically(path, "".join(f"{line}\n" for line in kept))
        self._file = path.open("a", buffering=1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")

    def close(self) -> None:
        self._file.close()


def describe(values: Mapping[str, float], steps: int, batch: int) -> str:
    """A line of the history, with the seconds that one update took, of `batch` examples."""
    rate = values["examples_per_second"]
    pace = f", {batch / rate:.3f} s/batch" if rate else ""  # it is rounded, and may be 0.0
    return f"step {values['step']}/{steps}, loss {values['loss']:.4f}, {rate:,.0f} examples/s{pace}"


def _step_of(line: str) -> float:
    """The step of a line; infinity for one that a crash cut off."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
