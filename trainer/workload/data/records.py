"""Reads TFRecord files at any record.

A record is: its length (8 bytes, little endian), a checksum of the length (4), the data, a checksum of the data (4).
A checksum is a CRC-32C, rotated right by 15 bits, plus a constant
(https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details).
"""

import functools
import mmap
import os
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainer.workload.data.errors import DataError

HEADER = struct.Struct("<Q4s")  # length of the data, its checksum
FOOTER_BYTES = 4
OPEN_FILES = 64
AGAIN = "copy or write the file again"


def index_records(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Finds the offsets [N] and lengths [N] of the records' data, in bytes, from their lengths alone; both int64.

    Raises:
        DataError: if a length is damaged, or the file ends within a record.
    """
    starts, headers, size = [], [], path.stat().st_size
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = 0
        while start + HEADER.size <= size:
            headers.append(content[start : start + HEADER.size])
            starts.append(start)
            start += HEADER.size + HEADER.unpack(headers[-1])[0] + FOOTER_BYTES
        _check_headers(path, headers, first_bytes=content[:2])
    if start != size:
        last = len(starts) - 1 if start > size else len(starts)
        raise DataError(f"{path}, record {last}: the file ends within it, at byte {size}; {AGAIN}")
    lengths = np.array([HEADER.unpack(header)[0] for header in headers], np.int64)
    return np.array(starts, np.int64) + HEADER.size, lengths


def _check_headers(path: Path, headers: list[bytes], first_bytes: bytes) -> None:
    """Raises DataError at the first length with a wrong checksum."""
    rows = np.frombuffer(b"".join(headers), np.uint8).reshape(-1, HEADER.size)
    stored = np.ascontiguousarray(rows[:, 8:]).view("<u4")[:, 0]
    wrong = masked_crc32c(rows[:, :8]) != stored
    if len(headers) and not wrong.any():
        return
    if first_bytes == b"\x1f\x8b":
        raise DataError(f"{path}: is compressed with gzip, but only uncompressed files have random access; gunzip it")
    if not len(headers) or wrong[0]:
        raise DataError(f"{path}: is not a TFRecord file (its first bytes are not a record); {AGAIN}")
    raise DataError(f"{path}, record {int(wrong.argmax())}: the checksum of its length is wrong; {AGAIN}")


def masked_crc32c(rows: np.ndarray) -> np.ndarray:
    """Returns the checksum of each row of bytes: [N, B] of uint8 -> [N] of uint32."""
    table, crc = _crc32c_table(), np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in rows.T:
        crc = table[(crc ^ column) & 0xFF] ^ (crc >> np.uint32(8))
    return ((~crc >> np.uint32(15)) | (~crc << np.uint32(17))) + np.uint32(0xA282EAD8)


@functools.cache
def _crc32c_table() -> np.ndarray:
    """Returns [256] of uint32: the remainders of single bytes, for the reversed Castagnoli polynomial."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> np.uint32(1)) ^ np.uint32(0x82F63B78), table >> np.uint32(1))
    return table


def read_in_order(path: Path) -> Iterator[bytes]:
    """Yields every record of a file, verifying its checksum."""
    import tensorflow as tf

    number = 0
    try:
        for record in _iterate(path):
            yield record
            number += 1
    except tf.errors.DataLossError as error:
        raise DataError(f"{path}, record {number}: the checksum of its data is wrong; {AGAIN}") from error


def _iterate(path: Path) -> Iterator[bytes]:
    """Yields from TensorFlow's reader without its warning: tf.data would initialize devices before the server."""
    import tensorflow as tf

    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        return tf.compat.v1.io.tf_record_iterator(str(path))
    finally:
        logger.setLevel(level)


def read_at(
    paths: list[Path], files: np.ndarray, offsets: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the records at [B] places, and their names for messages, both [B] of bytes."""
    records, names = np.empty(len(files), object), np.empty(len(files), object)
    for row, (file, offset, length) in enumerate(zip(files.tolist(), offsets.tolist(), lengths.tolist(), strict=True)):
        opened = _open(paths[file])  # a reference, because another reader may evict it from the cache
        records[row] = os.pread(opened.descriptor, length, offset)
        names[row] = f"{paths[file]}, byte {offset}".encode()
        if len(records[row]) != length:
            raise DataError(f"{paths[file]}, byte {offset}: the file became shorter during the run; {AGAIN}")
    return records, names


class _OpenFile:
    """A file that stays open as long as the cache or a reader has this object."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)


_open = functools.lru_cache(maxsize=OPEN_FILES)(_OpenFile)
