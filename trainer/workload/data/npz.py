"""Reads a data set from an .npz file, or from a folder of .npy files, which stay on disk."""

import zipfile
import zlib
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from trainer.workload.data.arrays import from_arrays
from trainer.workload.data.errors import DataError
from trainer.workload.data.examples import DataSet, Nest
from trainer.workload.data.files import check_file, check_folder

KEYS = ("x_train", "y_train", "x_test", "y_test")
WEIGHTS = ("w_train", "w_test")
SAVE = f"write it with np.savez(path, {', '.join(f'{key}=...' for key in KEYS)})"

Read = Callable[[str], np.ndarray]


def npz(*, path: str, scale: float | None = None, classes: int | None = None) -> DataSet:
    """Reads an .npz file with x_train [N, ...], y_train [N], and x_test, y_test to evaluate on.

    Args:
        path: the file. It may hold w_train and w_test, weights of the examples, and x_train/NAME for several inputs.
        scale: factor of the features, which become float32; None: they keep their type.
        classes: number of classes; None: the largest integer label + 1, or the last size of float labels.
    """
    x_train, y_train, x_test, y_test, w_train, w_test = read_npz(path)
    train, test = (x_train, y_train, w_train), (x_test, y_test, w_test)
    return from_arrays(train, test, source=str(path), scale=scale, classes=classes)


def npy(*, path: str, scale: float | None = None, classes: int | None = None) -> DataSet:
    """Reads a folder of x_train.npy, y_train.npy, x_test.npy, y_test.npy, mapped into memory: one copy for all tasks.

    Args:
        path: the folder. It may hold w_train.npy, w_test.npy, and x_train/NAME.npy for several inputs.
        scale: as in `npz`.
        classes: as in `npz`.
    """
    folder = check_folder(path, option="data.options.path")
    files = {str(file.relative_to(folder).with_suffix("")): file for file in sorted(folder.rglob("*.npy"))}
    how = f"write its files with np.save({str(folder / 'x_train.npy')!r}, x)"
    x_train, y_train, x_test, y_test, w_train, w_test = _nests(files, lambda key: _map(files[key]), folder, how)
    train, test = (x_train, y_train, w_train), (x_test, y_test, w_test)
    return from_arrays(train, test, source=str(path), scale=scale, classes=classes)


def _map(file: Path) -> np.ndarray:
    try:
        return np.load(check_file(file, option="data.options.path"), mmap_mode="r", allow_pickle=False)
    except DataError:
        raise
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{file}: cannot be read ({error}); copy it again, or write it with np.save") from error


def read_npz(path: str | Path) -> list[Nest]:
    """Returns the arrays of KEYS and WEIGHTS; None for missing weights."""
    file = check_file(path, option="data.options.path")
    if not zipfile.is_zipfile(file):
        raise DataError(f"{file}: is not a complete .npz file; copy it again, or {SAVE}")
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return _nests(arrays.files, arrays.__getitem__, file, SAVE)
    except DataError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{file}: cannot be read ({error}); copy it again, or {SAVE}") from error


def _nests(names: Collection[str], read: Read, file: Path, how: str) -> list[Nest]:
    """Returns the array x_train, or the dict of arrays x_train/age, x_train/city."""
    nests: list[Nest] = []
    for key in (*KEYS, *WEIGHTS):
        parts = sorted(name for name in names if name.startswith(f"{key}/"))
        if key in names:
            nests.append(read(key))
        elif parts:
            nests.append({name.removeprefix(f"{key}/"): read(name) for name in parts})
        elif key in KEYS:
            raise DataError(f"{file}: has no array {key}, only {sorted(names)[:20]}; {how}")
        else:
            nests.append(None)
    return nests
