"""Reads a data set from Parquet files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.workload.data.errors import DataError
from trainer.workload.data.examples import DataSet
from trainer.workload.data.extras import import_extra
from trainer.workload.data.ids import Rule
from trainer.workload.data.tables import Roles, Table, open_tables


def parquet(
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
) -> DataSet:
    """Reads Parquet files, with the options of `csv`; columns of lists of one length are arrays [length]."""
    import_extra("pyarrow.parquet", extra="parquet")  # before the files, because nothing works without it
    wanted = None
    if columns is not None:
        wanted = [*columns, *([label] if isinstance(label, str) else label or ()), *([weight] if weight else ())]

    def read(files: list[Path], texts: set[str]) -> list[Table]:
        return [_read(file, wanted) for file in files]

    roles = Roles(label, weight, columns, matrix, missing, dtypes or {}, ids or {})
    return open_tables(path, evaluate, read, roles, classes)


def _read(file: Path, wanted: Sequence[str] | None) -> Table:
    import pyarrow as arrow
    import pyarrow.parquet as parquet_module

    try:
        schema = parquet_module.read_schema(file)
        chosen = None if wanted is None else [name for name in wanted if name in schema.names]
        table = parquet_module.read_table(file, columns=chosen)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read ({error}); copy it again") from error
    return {name: _column(table.column(name), f"{file}, column {name}") for name in table.schema.names}


def _column(column: Any, name: str) -> np.ndarray:
    """Returns an Arrow column as an array; missing numbers are NaN, missing texts are empty."""
    import pyarrow as arrow

    kinds, kind = arrow.types, column.type
    if kinds.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_binary(kind) or kinds.is_large_binary(kind):
        empty = "" if kinds.is_string(kind) or kinds.is_large_string(kind) else b""
        return np.array([empty if value is None else value for value in column.to_pylist()], object)
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        return _lists(column, name)
    if not (kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_boolean(kind)):
        raise DataError(
            f"{name}: has type {kind}; allowed: numbers, booleans, text, and lists of them. Leave it out with "
            "data.options.columns=[NAME,...], or write the file with another type"
        )
    if column.null_count:
        column = column.cast(arrow.float64())
    return column.to_numpy()


def _lists(column: Any, name: str) -> np.ndarray:
    """Returns [N, length] of a column of lists."""
    column = column.combine_chunks()
    lengths = np.unique(column.value_lengths().fill_null(0).to_numpy())
    if column.null_count or len(lengths) != 1:
        raise DataError(
            f"{name}: has lists of {lengths.min()} to {lengths.max()} values; pad or cut them to one length"
        )
    return _column(column.flatten(), name).reshape(len(column), int(lengths[0]))
