"""Finds input files, and checks them before they are read."""

import glob
import gzip
import os
from pathlib import Path
from typing import IO, cast

from trainer.workload.data.errors import DataError, MissingInputError


def find_files(pattern: str, *, option: str) -> list[Path]:
    """Returns the files that match a pattern, sorted by name; arguments as in `check_file`.

    Raises:
        MissingInputError: if no file matches.
    """
    names = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    if not names:
        raise MissingInputError(f"{pattern}: no file matches (looked in {Path.cwd()}); type '{option}=/PATH/TO/FILE'")
    return [check_file(name, option=option) for name in names]


def check_file(path: str | Path, *, option: str) -> Path:
    """Returns the path of a file, which must exist and not be empty.

    Args:
        path: as given; `~` is the home directory.
        option: the option that named it, as typed, e.g. "data.options.path".
    """
    file = Path(path).expanduser()
    if file.is_dir():
        raise DataError(f"{file}: is a directory, but {option} takes a file; e.g. {option}={file / 'NAME'}")
    if not file.exists():
        raise MissingInputError(f"{file}: no such file (looked in {Path.cwd()}); type {option}=/PATH/TO/FILE")
    if file.stat().st_size == 0:
        raise DataError(f"{file}: is empty (0 bytes); copy it again, or type {option}=/PATH/TO/FILE")
    return file


def check_folder(path: str | Path, *, option: str) -> Path:
    """Returns the path of a folder, which must exist; arguments as in `check_file`."""
    folder = Path(path).expanduser()
    if not folder.exists():
        raise MissingInputError(f"{folder}: no such folder (looked in {Path.cwd()}); type {option}=/PATH/TO/FOLDER")
    if not folder.is_dir():
        raise DataError(f"{folder}: is a file, but {option} takes a folder; e.g. {option}={folder.parent}")
    return folder


def open_bytes(file: Path) -> IO[bytes]:
    """Opens a file, plain or gzip, for reading."""
    with open(file, "rb") as content:
        is_gzip = content.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(file) if is_gzip else open(file, "rb"))
