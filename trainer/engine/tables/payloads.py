"""Packs rows behind the vectors of messages, if they do not stay in shared memory.

A worker's push has, for its host, the rows of each block that it touched, with their gradients, and which rows its
replicas need for their next step. What it pulls has these rows. All of it is bits, which are sent as numbers of the
message's type; nothing on the way computes with them.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16

from trainer.engine.tables.memory import Pushed, cuts_of
from trainer.engine.vectors.wire import BFLOAT16, VectorWire
from trainer.plan.table_layout import TableLayout
from trainer.plan.tables import Block
from trainer.workload.data.errors import DataError

Places = Sequence[Sequence[np.ndarray]]  # by replica and block: [n] int64, sorted and each once
ALIGNED = 4  # bytes; an array begins at a multiple of it
PUSH, ROWS = range(2)  # kinds of payloads: of a worker for a host, of a host for a worker


class Mailboxes:
    """Buffers for payloads in memory that tasks share; messages then only say how long they are.

    A worker writes what it pushes once it has its token: its last push was taken and used. A host writes what a worker
    needs before it hands out a token, for which the worker waits.
    """

    def __init__(self, path: str, layout: TableLayout, offset: int) -> None:
        """Maps the mailboxes in a file, from an offset on."""
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), offset + layout.mailboxes_nbytes)
        self._layout, self._offset = layout, offset

    def put(self, kind: int, worker: int, host: int, payload: np.ndarray) -> np.ndarray:
        """Writes [n] int32, and returns the message about it."""
        self._box(kind, worker, host)[: len(payload)] = payload
        return np.array([len(payload)], np.int32)

    def get(self, kind: int, worker: int, host: int, message: np.ndarray) -> np.ndarray:
        """Returns a view of the payload that a message announces."""
        (size,) = message if len(message) else (0,)  # a worker that joins pulls none
        return self._box(kind, worker, host)[:size]

    def _box(self, kind: int, worker: int, host: int) -> np.ndarray:
        sizes, hosts = self._layout.mailbox_nbytes, self._layout.blocks[0].hosts
        begin = self._offset + (worker * hosts + host) * sum(sizes) + kind * sizes[0]
        return np.frombuffer(self._memory, np.int32, sizes[kind] // 4, begin)


class Payloads(NamedTuple):
    """Writes rows into messages, and reads them."""

    blocks: Sequence[Block]
    numbers: Any  # dtype of messages
    is_rounded: bool  # whether floats of rows are sent as the nearest bfloat16
    boxes: Mailboxes | None = None  # where they are instead of in the messages

    @classmethod
    def of(cls, blocks: Sequence[Block], wire: VectorWire, boxes: Mailboxes | None = None) -> Payloads:
        """Returns the payloads behind the vectors of a wire; with bfloat16, rows are rounded too."""
        return cls(blocks, wire.dtype.as_numpy_dtype, wire is BFLOAT16, boxes)

    def exact(self) -> Payloads:
        """Returns the same as bytes, without rounding."""
        return Payloads(self.blocks, np.uint8, is_rounded=False)

    def send(self, kind: int, worker: int, host: int, payload: np.ndarray) -> np.ndarray:
        """Returns what to send behind a vector: the payload, or its location."""
        return payload if self.boxes is None else self.boxes.put(kind, worker, host, payload)

    def receive(self, kind: int, worker: int, host: int, message: np.ndarray) -> np.ndarray:
        """Returns the payload that was sent."""
        return message if self.boxes is None else self.boxes.get(kind, worker, host, message)

    def write_push(self, pushed: Sequence[Sequence[Pushed]], asked: Places) -> list[np.ndarray]:
        """Returns what to send to each host: gradients by push and block, and the rows of all hosts needed next."""
        return [
            self._joined(
                [
                    np.array([len(pushed), len(asked)], np.int32),
                    *(part for of_blocks in pushed for own in self._own(of_blocks, host) for part in own),
                    *(part for replica in asked for places in self._places(replica, host) for part in places),
                ]
            )
            for host in range(self.blocks[0].hosts)
        ]

    def read_push(self, payload: np.ndarray) -> tuple[list[list[Pushed]], Places]:
        """Returns what a host received: gradients by push and block, and the places of its rows needed next."""
        reader = _Reader(payload)
        pushes, replicas = (int(count) for count in reader.next(np.int32, 2))
        pushed = [[self._read_pushed(reader, block) for block in self.blocks] for _ in range(pushes)]
        return pushed, [[self._read_places(reader, block) for block in self.blocks] for _ in range(replicas)]

    def write_rows(self, asked: Places, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Returns what a host sends: the rows [n, width] of each replica and block, with a checksum of their places."""
        all_places = [places for replica in asked for places in replica]
        parts = [(_checksum(places), self._rounded(one)) for places, one in zip(all_places, rows, strict=True)]
        return self._joined([one for pair in parts for one in pair])

    def read_rows(self, payloads: Sequence[np.ndarray], asked: Places) -> list[np.ndarray]:
        """Returns rows [n, width] by replica and block, from what each host has sent.

        Raises:
            DataError: if the rows belong to other places.
        """
        readers, found = [_Reader(one) for one in payloads], []
        for replica in asked:
            for block, places in zip(self.blocks, replica, strict=True):
                cuts, parts = cuts_of(places, block), []
                for reader, begin, end in zip(readers, cuts, cuts[1:], strict=False):
                    if not np.array_equal(reader.next(np.uint32, 1), _checksum(places[begin:end])):
                        raise DataError(
                            "a batch has different ids than were announced one step earlier; the data must give the "
                            "same batches every time it is opened"
                        )
                    parts.append(self._read_rows(reader, int(end - begin), block))
                found.append(np.concatenate(parts))
        return found

    def _own(self, pushed: Sequence[Pushed], host: int) -> list[list[np.ndarray]]:
        found = []
        for block, (places, rows) in zip(self.blocks, pushed, strict=True):
            begin, end = cuts_of(places, block)[host : host + 2]
            found.append([*_listed(places[begin:end], block), self._rounded(rows[begin:end])])
        return found

    def _places(self, of_blocks: Sequence[np.ndarray], host: int) -> list[list[np.ndarray]]:
        found = []
        for block, places in zip(self.blocks, of_blocks, strict=True):
            begin, end = cuts_of(places, block)[host : host + 2]
            found.append(_listed(places[begin:end], block))
        return found

    def _rounded(self, rows: np.ndarray) -> np.ndarray:
        return rows.astype(bfloat16) if self.is_rounded else np.ascontiguousarray(rows, np.float32)

    def _joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        sizes = [one.nbytes + -one.nbytes % ALIGNED for one in parts]
        joined, at = np.zeros(sum(sizes), np.uint8), 0
        for one, size in zip(parts, sizes, strict=True):
            joined[at : at + one.nbytes] = np.ascontiguousarray(one).view(np.uint8).ravel()
            at += size
        return joined.view(self.numbers)

    def _read_pushed(self, reader: _Reader, block: Block) -> Pushed:
        places = self._read_places(reader, block)
        rows = self._read_rows(reader, len(places), block)
        return places, rows.copy() if self.boxes is None else rows  # a message does not outlive the call

    def _read_places(self, reader: _Reader, block: Block) -> np.ndarray:
        (count,) = reader.next(np.int64, 1)
        return reader.next(_kind(block), int(count)).astype(np.int64)

    def _read_rows(self, reader: _Reader, count: int, block: Block) -> np.ndarray:
        rows = reader.next(bfloat16 if self.is_rounded else np.float32, count * block.width)
        return rows.astype(np.float32, copy=False).reshape(count, block.width)


class _Reader:
    """Reads arrays, one after the other."""

    def __init__(self, payload: np.ndarray) -> None:
        self._bytes, self._at = np.ascontiguousarray(payload).view(np.uint8), 0

    def next(self, dtype: Any, count: int) -> np.ndarray:
        nbytes = count * np.dtype(dtype).itemsize
        array = self._bytes[self._at : self._at + nbytes].view(dtype)
        self._at += nbytes + -nbytes % ALIGNED
        return array


def _checksum(places: np.ndarray) -> np.ndarray:
    return np.array([zlib.crc32(np.ascontiguousarray(places, np.int64).tobytes())], np.uint32)


def _listed(places: np.ndarray, block: Block) -> list[np.ndarray]:
    return [np.array([len(places)], np.int64), places.astype(_kind(block))]


def _kind(block: Block) -> Any:
    """Returns the type of places in messages: 4 bytes, unless the block has too many, or grows."""
    return np.int32 if block.growing is None and block.hosts * block.held < 2**31 else np.int64
