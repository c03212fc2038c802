"""Reads features and labels from examples that are dicts."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from trainer.workload.data.errors import DataError

Names = str | Sequence[str] | None


class Columns:
    """Random access to (features, labels), or to features alone, of another object's dicts."""

    def __init__(self, rows: Any, label: Names, columns: Names) -> None:
        """Takes `columns` as features: None for all but the labels, one name for an array instead of a dict."""
        self._rows, self._label, self._columns = rows, label, columns

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self._split(row) for row in self._rows.__getitems__(indices)]

    def _split(self, row: dict[str, Any]) -> Any:
        labels = [self._label] if isinstance(self._label, str) else list(self._label or ())
        names = self._columns if self._columns is not None else [name for name in row if name not in labels]
        features = row[names] if isinstance(names, str) else {name: row[name] for name in names}
        if self._label is None:
            return (features,)
        return features, row[self._label] if isinstance(self._label, str) else {name: row[name] for name in labels}


def check_columns(names: Iterable[str], label: Names, columns: Names, source: str) -> None:
    """Raises DataError if a label or a column is not among the names."""
    names = list(names)
    for option, given in (("label", label), ("columns", columns)):
        for name in [given] if isinstance(given, str) else given or ():
            if name not in names:
                near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[:10]
                raise DataError(
                    f"{source}: has no column {name!r}; type data.options.{option}={near[0]}, or another of "
                    f"{', '.join(names[:10])}"
                )
