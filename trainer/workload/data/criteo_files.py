"""Reads Criteo's logs of displayed advertisements: a label, 13 numbers and 26 hashed ids in each line."""

import gzip
import hashlib
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np

from trainer.workload.data.arrays import from_arrays
from trainer.workload.data.errors import DataError
from trainer.workload.data.examples import DataSet, Nest
from trainer.workload.data.files import find_files, open_bytes
from trainer.workload.data.parts import SHARE, is_fraction

NUMBERS, FIELDS = 13, 26  # in each line, after the label
LINES = 16_384  # parsed at a time
FORMAT = 1  # of the converted arrays
DTYPES = {"labels": (np.float32, 1), "numbers": (np.float32, NUMBERS), "ids": (np.int32, FIELDS)}

Arrays = dict[str, np.ndarray]  # labels [N, 1], numbers [N, 13], ids [N, 26]


def criteo(
    *, path: str, evaluate: str | float | None = None, rows: int = 1_000_000, cache: str | None = None
) -> DataSet:
    """Reads {numbers: float32 [13], ids: int32 [26]}, labels float32 [1]; files are converted once, to arrays.

    A number x becomes log(1 + x), and 0 where it is missing or negative. An id becomes 1 + id % (rows - 1), and 0 where
    it is missing.

    Args:
        path: pattern of the files to train on: lines of label, numbers and ids, separated by tabs; plain or gzip.
        evaluate: pattern of the files to evaluate on, or the share of the lines, which are the last ones; None: 0.2.
        rows: ids of each field.
        cache: folder for the arrays, 160 bytes a line, which are mapped into memory: one copy for all tasks of a
            machine; None: the folder of the files.
    """
    if rows < 2:
        raise DataError(f"data.options.rows={rows}, but a field needs at least 2: one is for missing ids")
    evaluate = SHARE if evaluate is None else evaluate
    arrays = _arrays(find_files(path, option="data.options.path"), rows, cache)
    count = len(arrays["labels"])
    if is_fraction(evaluate):
        first = count - round(count * float(evaluate))
        if not 0 < first < count:
            raise DataError(f"{path}: too few lines ({count}) to split; change data.options.evaluate={evaluate}")
        train, test = _batch(arrays, slice(0, first)), _batch(arrays, slice(first, count))
    else:
        others = _arrays(find_files(str(evaluate), option="data.options.evaluate"), rows, cache)
        train, test = _batch(arrays, slice(0, count)), _batch(others, slice(0, len(others["labels"])))
    return from_arrays(train, test, source=path, ids={"ids": rows})


def _batch(arrays: Arrays, lines: slice) -> tuple[Nest, Nest]:
    return {name: arrays[name][lines] for name in ("numbers", "ids")}, arrays["labels"][lines]


def _arrays(files: list[Path], rows: int, cache: str | None) -> Arrays:
    """Returns the arrays of files, converting them unless that was done before."""
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(repr((FORMAT, facts, rows)).encode()).hexdigest()[:16]
    folder = Path(cache).expanduser() if cache else files[0].parent
    target = folder / f"criteo-{key}"
    try:
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _convert(files, rows, target)
        return {name: np.load(target / f"{name}.npy", mmap_mode="r") for name in DTYPES}
    except OSError as error:
        raise DataError(
            f"{target}: cannot be written or read ({error}); type data.options.cache=FOLDER, one that all tasks share"
        ) from error


def _convert(files: list[Path], rows: int, target: Path) -> None:
    """Writes the arrays of files; `target` appears when it is complete."""
    count = sum(_count_lines(file) for file in files)
    part = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
    part.chmod(0o755)
    try:
        arrays = {
            name: np.lib.format.open_memmap(part / f"{name}.npy", "w+", dtype, (count, width))
            for name, (dtype, width) in DTYPES.items()
        }
        begin = 0
        for file in files:
            for block in _blocks(file, rows):
                end = begin + len(block["labels"])
                for name, array in arrays.items():
                    array[begin:end] = block[name]
                begin = end
        for array in arrays.values():
            array.flush()
        part.rename(target)
    except OSError:
        if not target.exists():  # else another process has made it meanwhile
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _count_lines(file: Path) -> int:
    with _reading(file) as content:
        return sum(1 for _ in content)


@contextmanager
def _reading(file: Path) -> Iterator[IO[bytes]]:
    try:
        with open_bytes(file) as content:
            yield content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{file}: cannot be unpacked ({error}); copy it again") from error


def _blocks(file: Path, rows: int) -> Iterator[Arrays]:
    """Yields the arrays of blocks of lines."""
    first = 1
    with _reading(file) as content:
        while lines := list(islice(content, LINES)):
            yield _parsed([line.rstrip(b"\r\n").split(b"\t") for line in lines], f"{file}", first, rows)
            first += len(lines)


def _parsed(lines: list[list[bytes]], source: str, first: int, rows: int) -> Arrays:
    for number, line in enumerate(lines, first):
        if len(line) != 1 + NUMBERS + FIELDS:
            raise DataError(
                f"{source}, line {number}: has {len(line)} values, separated by tabs; a label, {NUMBERS} numbers and "
                f"{FIELDS} ids are needed"
            )
    columns = [np.array(column) for column in zip(*lines, strict=True)]
    try:
        numbers = np.stack([np.where(one == b"", b"0", one).astype(np.float32) for one in columns[: 1 + NUMBERS]], 1)
        ids = np.stack([_ids(column, rows) for column in columns[1 + NUMBERS :]], 1)
    except ValueError as error:
        raise DataError(f"{source}, lines {first} to {first + len(lines) - 1}: {error}; correct the line") from error
    return {"labels": numbers[:, :1], "numbers": np.log1p(np.maximum(numbers[:, 1:], 0)), "ids": ids}


def _ids(column: np.ndarray, rows: int) -> np.ndarray:
    """Returns [n] of int32, from hexadecimal digits."""
    return np.array([1 + int(one, 16) % (rows - 1) if one else 0 for one in column.tolist()], np.int32)
