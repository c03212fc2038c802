"""Writes predictions, batch by batch: arrays of an .npz file, rows of a .csv file, or objects of a .jsonl file.

A file gets its name only when it is complete; until then, or after a failure, an older file of that name stays.
"""

import csv
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.faults.problems import ConfigError, Problem

Outputs = Mapping[str, np.ndarray]  # of a batch, by name: [B, ...] each


def write(path: Path, batches: Iterable[Outputs]) -> dict[str, list[int]]:
    """Writes the outputs of all batches to a file, in the format of its suffix.

    Returns:
        The shapes of the outputs by name.

    Raises:
        ConfigError: if a .csv file cannot hold them.
        OSError: if the disk fails or is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    shapes: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        file = Path(scratch, "new")
        WRITERS[path.suffix](file, _counted(batches, shapes))
        os.replace(file, path)
    return shapes


def _counted(batches: Iterable[Outputs], shapes: dict[str, list[int]]) -> Iterator[Outputs]:
    for outputs in batches:
        for name, values in outputs.items():
            count = shapes.get(name, [0])[0] + len(values)
            shapes[name] = [count, *values.shape[1:]]
        yield outputs


def _of_one_shape(batches: Iterable[Outputs]) -> Iterator[Outputs]:
    """Yields the batches, whose examples must all have one shape, as arrays and tables do.

    Raises:
        ConfigError: if shapes differ, as in padded batches.
    """
    first: dict[str, tuple[int, ...]] = {}
    for outputs in batches:
        for name, values in outputs.items():
            if (shape := first.setdefault(name, values.shape[1:])) != values.shape[1:]:
                message = f"{name} has examples of shape {list(shape)} and of shape {list(values.shape[1:])}"
                remedy = "write a .jsonl file, e.g. to=predictions.jsonl"
                raise ConfigError([Problem("export.to", "not-supported", message, remedy)])
        yield outputs


class _Part:
    """The values of one output, collected in a temporary file: an archive stores each array contiguously."""

    def __init__(self, file: Path, values: np.ndarray) -> None:
        self._file, self._dtype, self._shape, self._count = file.open("w+b"), values.dtype, values.shape[1:], 0

    def add(self, values: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(values, self._dtype).tobytes())
        self._count += len(values)

    def write_to(self, member: Any) -> None:
        described, shape = np.lib.format.dtype_to_descr(self._dtype), (self._count, *self._shape)
        header = {"descr": described, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(member, header)
        self._file.seek(0)
        shutil.copyfileobj(self._file, member)
        self._file.close()


def _write_npz(file: Path, batches: Iterable[Outputs]) -> None:
    parts: dict[str, _Part] = {}
    for outputs in _of_one_shape(batches):
        for name, values in outputs.items():
            if name not in parts:
                parts[name] = _Part(file.with_name(f"part-{len(parts)}"), values)
            parts[name].add(values)
    with zipfile.ZipFile(file, "w") as archive:
        for name, part in parts.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                part.write_to(member)


def _write_csv(file: Path, batches: Iterable[Outputs]) -> None:
    """Writes a column for each number of an example: NAME, or NAME_0, NAME_1 and so on."""
    with file.open("w", newline="") as opened:
        writer, is_first = csv.writer(opened), True
        for outputs in _of_one_shape(batches):
            if is_first:
                writer.writerow([column for name, values in outputs.items() for column in _columns(name, values)])
                is_first = False
            flat = [values.reshape(len(values), -1).astype(str) for values in outputs.values()]
            writer.writerows(np.concatenate([one.astype(object) for one in flat], axis=1))


def _columns(name: str, values: np.ndarray) -> list[str]:
    if values.ndim > 2:
        shape = list(values.shape[1:])
        message = f"{name} has shape {shape} for each example, which does not fit into one row of a table"
        remedy = "use a file name that ends in .npz or .jsonl"
        raise ConfigError([Problem("export.to", "not-supported", message, remedy)])
    return [name] if values.ndim == 1 else [f"{name}_{number}" for number in range(values.shape[1])]


def _write_jsonl(file: Path, batches: Iterable[Outputs]) -> None:
    """Writes an object for each example; numbers that are not finite become null."""
    with file.open("w") as opened:
        for outputs in batches:
            columns = {name: _plain(values) for name, values in outputs.items()}
            for row in zip(*columns.values(), strict=True):
                opened.write(json.dumps(dict(zip(columns, row, strict=True)), allow_nan=False) + "\n")


def _plain(values: np.ndarray) -> list[Any]:
    """Returns values for JSON; float32 with the fewest digits that identify them."""
    if values.dtype.kind != "f":
        return list(values.tolist())
    numbers: Any = values.astype(str).astype(np.float64)
    if not np.isfinite(numbers).all():
        numbers = numbers.astype(object)
        numbers[~np.isfinite(values)] = None
    return list(numbers.tolist())


WRITERS: Mapping[str, Callable[[Path, Iterable[Outputs]], None]] = {
    ".npz": _write_npz,
    ".csv": _write_csv,
    ".jsonl": _write_jsonl,
}
