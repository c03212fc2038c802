"""Vectors in memory that all tasks of one machine share: what a pull and a push carry does not travel at all.

    host    writes the new vector into a place, then says which to a worker, with its token
    worker  takes its token and what was said; computes on the vector where it lies
            writes its gradients into a place of its own, then pushes
    host    takes a worker's push, and averages the gradients where they lie

The messages stay what they are, in the same order, of the same tags; only the vector is left out. Who reads a place has
been told by a message that it is written.

A worker writes when it has its token, and so its gradients were taken. Under sync a host writes when every worker has
pushed, and so has read: one place is enough. Elsewhere it writes where no worker reads: a worker keeps the place it was
told of until it is told of another. Whoever replaces a worker that was ended computes the same gradients under sync,
and writes the same bits; elsewhere it gets no token while a gradient of its predecessor is still to be averaged.

TensorFlow lets an operation write its result over an input that nobody else will read. So what was computed on vectors
in shared memory is put with them as further inputs: until then they are still to be read. They are mapped for reading
only, so that a mistake there would end the process, and could not change them.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from trainer.engine.vectors import wire
from trainer.plan.layout import Shard
from trainer.plan.shared_memory import nbytes, places, vectors_of
from trainer.plan.strategy import Strategy


class Memory:
    """Places for the vectors of every shard, and one for the gradients that each worker pushes to it."""

    def __init__(self, path: str, shards: Sequence[Shard], strategy: Strategy, workers: int) -> None:
        """Maps it.

        Args:
            path: of the file, the same for all tasks.
            strategy: of the run.
        """
        self._vectors = vectors_of(strategy, workers)
        total = nbytes(shards, strategy, workers)
        with open(path, "r+b") as file:
            written = mmap.mmap(file.fileno(), total)
            read = mmap.mmap(file.fileno(), total, access=mmap.ACCESS_READ)
        self._written, self._read = (_cut(memory, shards, strategy, workers) for memory in (written, read))
        self.instead: dict[int, np.ndarray] = {}  # by shard: what is read next, once, instead of its vector

    def place_of(self, worker: int) -> int:
        """Where a worker's gradients lie."""
        return self._vectors + worker

    def put(
        self,
        pieces: Sequence[tf.Tensor],
        shard: Shard,
        place: tf.Tensor | int,
        *,
        computed_on: Sequence[tf.Tensor] = (),
    ) -> tf.Tensor:
        """Writes a vector into a place of a shard; on the task that runs it.

        Args:
            pieces: of the vector, [k] float32 each, in their order.
            computed_on: all that lies in shared memory and that the pieces are computed on.

        Returns:
            [size] float32, where it lies.
        """
        written, read = self._written[shard.index], self._read[shard.index]
        count = len(pieces)

        def write(place: np.ndarray, *given: np.ndarray) -> np.ndarray:
            offset = 0
            for piece in given[:count]:
                written[place][offset : offset + piece.size] = piece
                offset += piece.size
            return read[place]

        return self._shaped(tf.numpy_function(write, [place, *pieces, *computed_on], tf.float32), shard)

    def get_vector(self, message: tf.Tensor, shard: Shard) -> tf.Tensor:
        """The vector that a message tells of, [size] float32, without a copy."""
        read = self._read[shard.index]

        def find(place: np.ndarray) -> np.ndarray:
            return self.instead.pop(shard.index, read[place])

        return self._shaped(tf.numpy_function(find, [wire.place_in(message)], tf.float32), shard)

    def get_gradients(self, told: tf.Tensor, shard: Shard, worker: int) -> tf.Tensor:
        """The gradients of a worker, [size] float32, without a copy.

        Args:
            told: the message that they are written. An input: nothing else must be waited for.
        """
        gradients = self._read[shard.index][self.place_of(worker)]
        return self._shaped(tf.numpy_function(lambda told: gradients, [told], tf.float32), shard)

    def _shaped(self, vector: tf.Tensor, shard: Shard) -> tf.Tensor:
        vector.set_shape([shard.size])
        return vector


def _cut(memory: mmap.mmap, shards: Sequence[Shard], strategy: Strategy, workers: int) -> dict[int, list[np.ndarray]]:
    cut: dict[int, list[np.ndarray]] = {shard.index: [] for shard in shards}
    for shard, offset in places(shards, strategy, workers):
        cut[shard.index].append(np.frombuffer(memory, np.float32, shard.size, offset))
    return cut
