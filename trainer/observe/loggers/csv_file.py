"""loggers=[csv]: loggers/history.csv of the run directory, a row for each line of the history and each evaluation."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.observe.loggers import LoggedRun

STEP = "step"


class CsvLogger:
    """Appends rows; a new column rewrites the file."""

    def start(self, run: LoggedRun) -> None:
        self._path = run.path / "loggers" / "history.csv"
        self._columns = [STEP]
        if self._path.exists() and not run.state:
            self._path.unlink()  # of another run in this directory
        run.state["file"] = self._path.name
        if self._path.exists():
            self._columns = next(csv.reader([self._path.read_text().partition("\n")[0]]))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if new := [name for name in values if name not in self._columns]:
            self._add_columns(new)
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow({STEP: step, **values})

    def finish(self, summary: Mapping[str, Any]) -> None:
        pass

    def _add_columns(self, names: list[str]) -> None:
        rows = _rows(self._path)
        self._columns += names
        with self._path.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
