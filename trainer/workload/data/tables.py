"""Makes data sets of tables: columns by name, some of them labels or weights."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from trainer.workload.data.arrays import from_arrays
from trainer.workload.data.convert import is_text, native
from trainer.workload.data.errors import DataError
from trainer.workload.data.examples import DataSet, Nest
from trainer.workload.data.files import find_files
from trainer.workload.data.ids import Numbering, Rule, check_rule, preprocessing, to_ids
from trainer.workload.data.parts import SHARE, divide, is_fraction

DTYPES = ("string", "float32", "int64")

Table = dict[str, np.ndarray]  # columns [N, ...] by name


@dataclass(frozen=True)
class Roles:
    """The roles of a table's columns."""

    label: str | Sequence[str] | None  # several: a dict of labels
    weight: str | None
    columns: Sequence[str] | None  # features; None: all others
    matrix: bool  # features as one array of float32 instead of a dict
    missing: float | None  # takes the place of missing numbers; None: they are refused
    dtypes: Mapping[str, str]  # of columns, one of DTYPES each; others are inferred
    ids: Mapping[str, Rule]  # of features whose values become ids

    @property
    def labels(self) -> list[str]:
        return [self.label] if isinstance(self.label, str) else list(self.label or ())


# Reads each file as a table, with the values of the named columns as text.
Read = Callable[[list[Path], set[str]], list[Table]]


def open_tables(path: str, evaluate: str | float | None, read: Read, roles: Roles, classes: int | None) -> DataSet:
    """Makes a data set of the files that match `path`.

    Args:
        evaluate: pattern of other files, or the share of the examples that are evaluated on; None: 0.2.
        classes: as in `from_arrays`.
    """
    evaluate = SHARE if evaluate is None else evaluate
    if roles.matrix and roles.ids:
        raise DataError("data.options.matrix=true needs numbers, and ids are not; remove one of the two")
    for column, dtype in roles.dtypes.items():
        if dtype not in DTYPES:
            raise DataError(f"data.options.dtypes.{column}={dtype} is not one of {', '.join(DTYPES)}")
    for column, rule in roles.ids.items():
        check_rule(rule, f"data.options.ids.{column}")
    files = find_files(path, option="data.options.path")
    has_fraction = is_fraction(evaluate)
    others = [] if has_fraction else find_files(str(evaluate), option="data.options.evaluate")
    texts = {name for name, dtype in roles.dtypes.items() if dtype == "string"}
    table, lengths = _joined(read([*files, *others], texts), [*files, *others], roles.dtypes)
    count, to_train = sum(lengths), sum(lengths[: len(files)])
    rows = divide(count, float(evaluate), path) if has_fraction else (slice(0, to_train), slice(to_train, count))
    batch, numberings = _batch(table, roles, path, rows[0])
    train, test = (tuple(_rows(nest, chosen) for nest in batch) for chosen in rows)
    counts = {name: one.count for name, one in numberings.items()}
    data = from_arrays(train, test, source=path, classes=classes, ids=counts)
    made = partial(preprocessing, data.spec.features, numberings) if numberings else None
    return replace(data, preprocessing=made, class_names=_class_names(table, roles))


def _joined(parts: list[Table], files: list[Path], dtypes: Mapping[str, str]) -> tuple[Table, list[int]]:
    """Returns the rows of all files as one table, and the number of rows of each file."""
    lengths = [len(next(iter(table.values()), ())) for table in parts]
    for file, table, length in zip(files, parts, lengths, strict=True):
        if length == 0:
            raise DataError(f"{file}: has no rows; at least one is needed")
        if list(table) != list(parts[0]):
            difference = f"has the columns {list(table)}, but {files[0]} has {list(parts[0])}"
            raise DataError(f"{file}: {difference}; all files need the same columns")
    columns = {name: np.concatenate([table[name] for table in parts]) for name in parts[0]}
    return {name: _typed(one, dtypes.get(name), name, files[0]) for name, one in columns.items()}, lengths


def _typed(column: np.ndarray, dtype: str | None, name: str, file: Path) -> np.ndarray:
    """Returns a column as the requested type; otherwise floats become float32, as for a model."""
    if dtype is None:
        return native(column) if column.dtype.kind == "f" else column
    if dtype == "string":
        return column if is_text(column) else column.astype(str)
    fault = "text"
    with suppress(ValueError, TypeError):
        if dtype == "float32" or is_text(column) or _is_exact(column):
            return column.astype(dtype)
        fault = "numbers that are missing, or that are not exactly an int64"
    raise DataError(f"{file}, column {name}: holds {fault}; type data.options.dtypes.{name}=another")


def _is_exact(column: np.ndarray) -> bool:
    """Whether int64 holds the numbers of the file exactly; floats from 2**53 on may have been rounded."""
    if column.dtype.kind == "f":
        return bool(((column % 1 == 0) & (np.abs(column) < 2**53)).all())
    return bool((column <= np.iinfo(np.int64).max).all())


def _rows(nest: Nest, chosen: np.ndarray | slice) -> Nest:
    if isinstance(nest, dict):
        return {name: column[chosen] for name, column in nest.items()}
    return None if nest is None else nest[chosen]


def _batch(
    table: Table, roles: Roles, source: str, to_train: np.ndarray | slice
) -> tuple[tuple[Nest, Nest, Nest], dict[str, Numbering]]:
    """Returns features, labels and weights, and the numbering of features that are ids."""
    given = [*roles.labels, *([roles.weight] if roles.weight else [])]
    names = list(roles.columns) if roles.columns is not None else [name for name in table if name not in given]
    for name in (*given, *names, *roles.dtypes, *roles.ids):
        if name not in table:
            near = difflib.get_close_matches(str(name), table, n=3, cutoff=0.4) or list(table)[:10]
            raise DataError(f"{source}: has no column {name!r}; did you mean {', '.join(map(repr, near))}?")
    if not names:
        raise DataError(f"{source}: no column is left for the features; set data.options.columns=[NAME,...]")
    if others := [name for name in roles.ids if name not in names]:
        raise DataError(f"data.options.ids.{others[0]}: is not a feature; remove it, or add it to data.options.columns")
    columns, numberings = _features(table, names, roles, source, to_train)
    labels = {name: _label(table[name], f"{source}, column {name}") for name in roles.labels}
    weights = _complete(table[roles.weight], f"{source}, column {roles.weight}", None) if roles.weight else None
    if weights is not None and is_text(weights):
        raise DataError(f"{source}, column {roles.weight}: is text; weights are numbers")
    batch = (
        _matrix(columns, source) if roles.matrix else {name: _in_columns(one) for name, one in columns.items()},
        labels[roles.label] if isinstance(roles.label, str) else labels or None,
        weights,
    )
    return batch, numberings


def _features(
    table: Table, names: Sequence[str], roles: Roles, source: str, to_train: np.ndarray | slice
) -> tuple[Table, dict[str, Numbering]]:
    """Returns these columns, some of them as ids, and their numbering."""
    columns, numberings = {}, {}
    for name in names:
        if (rule := roles.ids.get(name)) is None:
            columns[name] = _complete(table[name], f"{source}, column {name}", roles.missing)
        else:
            columns[name], numberings[name] = to_ids(table[name], rule, name, source, known=to_train)
    return columns, numberings


def _in_columns(column: np.ndarray) -> np.ndarray:
    """Returns [N] as [N, 1]."""
    return column[:, None] if column.ndim == 1 else column


def _matrix(columns: Table, source: str) -> np.ndarray:
    """Returns [N, columns] of float32."""
    texts = [name for name, column in columns.items() if is_text(column)]
    if texts:
        raise DataError(
            f"{source}: columns {', '.join(texts)} are text and do not go into a matrix; choose others with "
            "data.options.columns=[NAME,...], or type data.options.matrix=false"
        )
    return np.concatenate([_in_columns(one).astype(np.float32) for one in columns.values()], axis=1)


def _class_names(table: Table, roles: Roles) -> tuple[str, ...]:
    """Returns the class names of a single text label."""
    if not isinstance(roles.label, str) or not is_text(table[roles.label]):
        return ()
    return tuple(np.unique(table[roles.label].astype(str)).tolist())


def _label(column: np.ndarray, name: str) -> np.ndarray:
    """Returns classes (texts in alphabetical order), or targets."""
    if is_text(column):
        _, numbers = np.unique(column.astype(str), return_inverse=True)
        return numbers.astype(np.int64)
    return _complete(column, name, None)


def _complete(column: np.ndarray, name: str, missing: float | None) -> np.ndarray:
    """Returns the column with missing numbers replaced.

    Raises:
        DataError: if numbers are missing and `missing` is None.
    """
    absent = np.isnan(column) if column.dtype.kind == "f" else np.zeros(0, bool)
    if not absent.any():
        return column
    if missing is None:
        row = int(absent.reshape(len(column), -1).any(axis=1).argmax())
        raise DataError(
            f"{name}: row {row} of the table has no number ({int(absent.sum())} are missing in total); type "
            "data.options.missing=NUMBER to put one there (labels and weights must be complete), or remove the rows"
        )
    return np.where(absent, np.asarray(missing, column.dtype), column)
