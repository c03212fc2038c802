"""Reads a data set from CSV files."""

import csv as csv_module
import gzip
import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from trainer.workload.data.errors import DataError
from trainer.workload.data.examples import DataSet
from trainer.workload.data.files import open_bytes
from trainer.workload.data.ids import Rule
from trainer.workload.data.tables import Roles, Table, open_tables

ROWS = 16384  # parsed at a time
ABSENT = ("", "nan", "na", "null", "none")  # in a column of numbers, in any case


def csv(
    *,
    path: str,
    label: str | Sequence[str] | None = None,
    evaluate: str | float | None = None,
    weight: str | None = None,
    columns: Sequence[str] | None = None,
    matrix: bool = False,
    missing: float | None = None,
    dtypes: Mapping[str, str] | None = None,
    ids: Mapping[str, Rule] | None = None,
    classes: int | None = None,
    header: bool = True,
    separator: str = ",",
) -> DataSet:
    """Reads CSV files, plain or gzip; columns of integers are int64, other numbers float32, the rest text.

    Args:
        path: pattern of the files to train on.
        label: column of the labels, or several; texts are numbered in alphabetical order; None: no labels.
        evaluate: pattern of the files to evaluate on, or the share of the examples; None: 0.2.
        weight: column of the examples' weights.
        columns: features; None: all other columns.
        matrix: features as one array [columns] of float32 instead of a dict of arrays [1].
        missing: replaces missing numbers in features; None: they are refused. Missing texts are "".
        dtypes: type by column, if its values look like another: string, float32 or int64.
        ids: features whose values become ids: {city: vocabulary, user: 1000000}, see `ids.to_ids`.
        classes: number of classes; None: the largest integer label + 1.
        header: whether the first line has the names; otherwise they are 0, 1, 2, ...
        separator: of the values, e.g. "\\t".
    """
    if len(separator) != 1:
        raise DataError(f"data.options.separator={separator!r} must be one character, e.g. ';'")

    def read(files: list[Path], texts: set[str]) -> list[Table]:
        return _read(files, texts, header=header, separator=separator)

    roles = Roles(label, weight, columns, matrix, missing, dtypes or {}, ids or {})
    return open_tables(path, evaluate, read, roles, classes)


def _read(files: list[Path], texts: set[str], *, header: bool, separator: str) -> list[Table]:
    """Reads the files again if a column looks like numbers first and like text later."""
    numeric: set[str] = set()
    tables = []
    for file in files:
        parts: dict[str, list[np.ndarray]] = {}
        for names, rows in _blocks(file, header=header, separator=separator):
            for name, values in zip(names, zip(*rows, strict=True), strict=True):
                column = None if name in texts else _numbers(values)
                (texts if column is None else numeric).add(name)
                parts.setdefault(name, []).append(np.array(values, object) if column is None else column)
        tables.append({name: np.concatenate(columns) for name, columns in parts.items()})
    if texts & numeric:
        return _read(files, texts, header=header, separator=separator)
    return tables


def _blocks(file: Path, *, header: bool, separator: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yields the names of the columns, then blocks of rows."""
    with io.TextIOWrapper(open_bytes(file), "utf-8-sig", newline="") as text:
        reader = csv_module.reader(text, delimiter=separator, skipinitialspace=True)
        try:
            names = next(reader, []) if header else None
            if names is not None and len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise DataError(f"{file}: has two columns named {twice!r}; rename one")
            while block := [row for row in islice(reader, ROWS) if row]:
                names = names or [str(number) for number in range(len(block[0]))]
                _check_lengths(block, len(names), file, reader.line_num)
                yield names, block
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file}: is not UTF-8 (byte 0x{error.object[error.start]:02x}); save it as UTF-8"
            ) from error
        except (csv_module.Error, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{file}, line {reader.line_num}: cannot be read ({error}); copy it again") from error


def _check_lengths(block: list[list[str]], count: int, file: Path, last_line: int) -> None:
    for number, row in enumerate(block):
        if len(row) != count:
            about = last_line - len(block) + number + 1
            raise DataError(
                f"{file}, about line {about}: has {len(row)} values, but there are {count} columns; correct the line, "
                "or type data.options.separator"
            )


def _numbers(values: Sequence[str]) -> np.ndarray | None:
    """Returns [N] of int64 or float64; None if a value is not a number. Missing ones are NaN."""
    if any("_" in value for value in values):  # which Python allows in numbers
        return None
    try:
        return np.array([int(value) for value in values], np.int64)
    except (ValueError, OverflowError):
        pass
    try:
        floats = [float("nan" if value.strip().lower() in ABSENT else value) for value in values]
    except ValueError:
        return None
    return np.array(floats)
