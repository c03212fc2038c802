"""Vectors in memory that all tasks of one machine share: what a pull and a push carry does not travel at all.

    host    writes the new vector into its place, then sets `sent`, then hands out tokens
    worker  takes its token and reads `sent`; computes on the vector where it lies
            writes its gradients into a place of its own, then pushes
    host    takes every worker's push, and averages the gradients where they lie

The messages stay what they are, in the same order, of the same tags; only the vector is left out. Tags never come out
of shared memory: who reads a place has been told by a message that it is written. In lockstep one place each is
enough. A host writes when every worker has pushed, and so has read; a worker writes when it has its token, and so its
gradients were taken. Whoever replaces a worker that was ended computes the same gradients and writes the same bits.

TensorFlow lets an operation write its result over an input that nobody else will read. So what was computed on vectors
in shared memory is put with them as further inputs: until then they are still to be read. They are mapped for reading
only, so that a mistake there would end the process, and could not change them.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from trainer.placement import Shard
from trainer.shared_memory import nbytes, places


class Memory:
    """A place for the vector of every shard, and one for the gradients that each worker pushes to it."""

    def __init__(self, path: str, shards: Sequence[Shard], workers: int) -> None:
        """Maps it.

        Args:
            path: of the file, the same for all tasks.
        """
        total = nbytes(shards, workers)
        with open(path, "r+b") as file:
            written = mmap.mmap(file.fileno(), total)
            read = mmap.mmap(file.fileno(), total, access=mmap.ACCESS_READ)
        self._written, self._read = (_cut(memory, shards, workers) for memory in (written, read))
        self.instead: dict[int, np.ndarray] = {}  # by shard: what is read next, once, instead of its vector

    def put(
        self,
        pieces: Sequence[tf.Tensor],
        shard: Shard,
        worker: int | None = None,
        *,
        computed_on: Sequence[tf.Tensor] = (),
    ) -> tf.Tensor:
        """Writes a vector into the place of a shard, or of a worker's gradients for it; on the task that runs it.

        Args:
            pieces: of the vector, [k] float32 each, in their order.
            computed_on: all that lies in shared memory and that the pieces are computed on.

        Returns:
            [size] float32, where it lies.
        """
        place, there = self._written[shard.index, worker], self._read[shard.index, worker]
        count = len(pieces)

        def write(*given: np.ndarray) -> np.ndarray:
            offset = 0
            for piece in given[:count]:
                place[offset : offset + piece.size] = piece
                offset += piece.size
            return there

        return self._shaped(tf.numpy_function(write, [*pieces, *computed_on], tf.float32), shard)

    def get(self, told: tf.Tensor, shard: Shard, worker: int | None = None) -> tf.Tensor:
        """What lies in a place, [size] float32, without a copy.

        Args:
            told: the message that it is written. An input, for where it is fed nothing else must be waited for.
        """
        place = self._read[shard.index, worker]

        def read(told: np.ndarray) -> np.ndarray:
            return place if worker is not None else self.instead.pop(shard.index, place)

        return self._shaped(tf.numpy_function(read, [told], tf.float32), shard)

    def _shaped(self, vector: tf.Tensor, shard: Shard) -> tf.Tensor:
        vector.set_shape([shard.size])
        return vector


def _cut(memory: mmap.mmap, shards: Sequence[Shard], workers: int) -> dict[tuple[int, int | None], np.ndarray]:
    return {
        (shard.index, worker): np.frombuffer(memory, np.float32, shard.size, offset)
        for shard, worker, offset in places(shards, workers)
    }
