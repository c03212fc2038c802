"""The series of a run: one JSON line per reported step in history.jsonl."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from trainer.config.words import count
from trainer.storage import json_lines
from trainer.storage.atomic import write_atomically

_log = logging.getLogger(__name__)

NOT_METRICS = ("step", "loss", "learning_rate", "examples_per_second")  # what else a line has
MAX_METRICS = 3  # of a line for people


class History:
    """Appends lines; each has reached the operating system when `write` returns."""

    def __init__(self, path: Path, *, start: int) -> None:
        """Opens the file of a run that (re)starts at global step `start`; removes lines of later steps."""
        self.last_step = 0
        if path.exists():
            read = [(line, json_lines.measured(line)) for line in path.read_bytes().splitlines()]
            kept = {line: int(values["step"]) for line, values in read if values and values["step"] <= start}
            self.last_step = max(kept.values(), default=0)
            write_atomically(path, "".join(f"{line.decode()}\n" for line in kept))
            if damaged := sum(values is None for line, values in read[:-1] if line):  # the last one may be cut off
                _log.warning("%s: removed %s that could not be read", path, count(damaged, "line"))
        self._file = path.open("a", buffering=1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self.last_step = max(self.last_step, step)

    def close(self) -> None:
        self._file.close()


def describe(values: Mapping[str, float], steps: int, batch: int, *, with_metrics: bool = False) -> str:
    """Returns a line of the history for people, with the seconds per update of `batch` examples."""
    rate = values["examples_per_second"]
    pace = f", {batch / rate:.3f} s/batch" if rate else ""  # rounded: it may be 0.0
    names = [name for name in values if name not in NOT_METRICS][:MAX_METRICS] if with_metrics else []
    metrics = [f", {name} {values[name]:.4f}" for name in names]
    return f"step {values['step']}/{steps}, loss {values['loss']:.4f}{''.join(metrics)}, {rate:,.0f} examples/s{pace}"
