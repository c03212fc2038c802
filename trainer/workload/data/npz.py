"""Reads a data set from an .npz file."""

import zipfile
import zlib
from pathlib import Path

import numpy as np

from trainer.workload.data.arrays import from_arrays
from trainer.workload.data.examples import DataError, DataSet
from trainer.workload.data.files import check_file

KEYS = ("x_train", "y_train", "x_test", "y_test")


def npz(*, path: str, scale: float | None = None, classes: int | None = None) -> DataSet:
    """An .npz file with x_train [N, ...], y_train [N], x_test, y_test; the last two are evaluated on.

    Args:
        path: the file.
        scale: factor of the features; None: 1/255 for bytes, 1 for others.
        classes: number of classes; None: the largest integer label + 1, or the last size of float labels.
    """
    x_train, y_train, x_test, y_test = read_npz(path)
    if scale is None and x_train.dtype == np.uint8:
        scale = 1 / 255
    return from_arrays((x_train, y_train), (x_test, y_test), source=str(path), scale=scale, classes=classes)


def read_npz(path: str | Path) -> tuple[np.ndarray, ...]:
    """The arrays named by KEYS."""
    file = check_file(path, option="data.options.path")
    how = f"write it with np.savez(path, {', '.join(f'{key}=...' for key in KEYS)})"
    if not zipfile.is_zipfile(file):
        raise DataError(f"{file}: is not a complete .npz file; copy it again, or {how}")
    try:
        with np.load(file, allow_pickle=False) as arrays:
            missing = [key for key in KEYS if key not in arrays.files]
            if missing:
                raise DataError(f"{file}: has no array {missing[0]}, it holds {sorted(arrays.files)}; {how}")
            return tuple(arrays[key] for key in KEYS)
    except DataError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{file}: cannot be read ({error}); copy it again, or {how}") from error
