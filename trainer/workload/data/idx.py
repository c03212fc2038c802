"""Reads IDX files, and the handwritten digits that are part of the package."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from trainer.workload.data.arrays import from_arrays
from trainer.workload.data.errors import DataError
from trainer.workload.data.examples import DataSet
from trainer.workload.data.files import check_file

SHIPPED = Path(__file__).parent / "mnist_10k"
AGAIN = "copy the file again from the project's repository"
BYTES = 0x08  # the only element type of MNIST


def mnist_10k() -> DataSet:
    """Reads the 10,000 images of the MNIST test set, [28, 28, 1]: every fifth to evaluate on, 8,000 to train on.

    It takes every fifth, because the halves of the file differ in difficulty (see mnist_10k/README.md).
    """
    images = read_idx(SHIPPED / "t10k-images-idx3-ubyte.gz", dimensions=3)[..., None]
    labels = read_idx(SHIPPED / "t10k-labels-idx1-ubyte.gz", dimensions=1)
    fifth = np.arange(len(images)) % 5 == 4
    return from_arrays(
        (images[~fifth], labels[~fifth]), (images[fifth], labels[fifth]), source="mnist_10k", scale=1 / 255, classes=10
    )


def read_idx(path: Path, *, dimensions: int) -> np.ndarray:
    """Reads a gzipped IDX file: two zeros, the type, the number of dimensions, the sizes (big endian), the data.

    Returns:
        An array of uint8 with `dimensions` dimensions.
    """
    content = _unpack(path)
    header = 4 + 4 * dimensions
    if len(content) < header or content[:4] != bytes([0, 0, BYTES, dimensions]):
        raise DataError(
            f"{path}: starts with {content[:4].hex(' ')}, but an IDX file of bytes with {dimensions} dimensions starts "
            f"with 00 00 {BYTES:02x} {dimensions:02x}; {AGAIN}"
        )
    sizes = struct.unpack_from(f">{dimensions}I", content, 4)
    if len(content) != header + math.prod(sizes):
        raise DataError(
            f"{path}: holds {len(content) - header} bytes of data, but its header {list(sizes)} says "
            f"{math.prod(sizes)}; {AGAIN}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)


def _unpack(path: Path) -> bytes:
    try:
        with gzip.open(check_file(path, option="data")) as file:
            return file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: is not a complete gzip file ({error}); {AGAIN}") from error
