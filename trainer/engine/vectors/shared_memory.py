"""Implements the wire of tasks on one machine: vectors stay in memory that all tasks map; messages only say where.

    host    writes the new vector into a place, then says which to a worker, with its token
    worker  takes its token and that message; computes on the vector where it lies
            writes its gradients into a place of its own, then pushes
    host    takes a worker's push, and averages the gradients where they lie

The messages are those of other wires, in the same order and with the same tags, but without the vector. No task reads a
place before a message has announced it.

A worker writes when it has its token, which means that its gradients were taken. Under sync a host writes when every
worker has pushed, and so has read: one place is enough. Under async and backup it writes where no worker reads: a
worker keeps its place until a message names another. The successor of a worker that died computes the same gradients
under sync, and writes the same bits; otherwise it gets no token while a gradient of its predecessor is not averaged.

TensorFlow may write the result of an operation over an input that no other operation still has to read. So what a
vector was computed on is an input of the operation that writes it. Vectors are mapped read-only for reading: a mistake
there would end the process instead of changing them.
"""

import mmap
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from trainer.engine.vectors import packing
from trainer.engine.vectors.packing import TrainableAndRest, halves
from trainer.engine.vectors.wire import Pieces, Place, VectorWire
from trainer.plan.layout import TAGS, Shard
from trainer.plan.shared_memory import nbytes, places, vectors_of
from trainer.plan.strategy import Strategy


class MemoryWire(VectorWire):
    """Places for the vectors of every shard, and one for each push of gradients that an update takes.

    A message is [tags, place] for parameters, [tags, whether the worker asks to stop] for gradients.
    """

    name = "memory"
    dtype = tf.int32
    has_messages = True
    is_shared = True

    def __init__(self, path: str, shards: Sequence[Shard], strategy: Strategy, pushes: int) -> None:
        """Maps the file at `path`, the same for all tasks."""
        self._vectors = vectors_of(strategy, pushes)
        self.is_per_worker = self._vectors > 1
        total = nbytes(shards, strategy, pushes)
        with open(path, "r+b") as file:
            written = mmap.mmap(file.fileno(), total)
            read = mmap.mmap(file.fileno(), total, access=mmap.ACCESS_READ)
        self._written, self._read = (_cut(memory, shards, strategy, pushes) for memory in (written, read))
        self._fed: dict[int, np.ndarray] = {}  # by shard: what is read next, once, instead of its vector

    def push_shape(self, shard: Shard, vectors: int) -> list[int]:
        return self.shape(shard)

    def tags_of(self, message: tf.Tensor, shard: Shard) -> tf.Tensor:
        return message[:TAGS]

    def asks_to_stop(self, message: tf.Tensor, shard: Shard) -> tf.Tensor:
        return message[TAGS] > 0

    def write_parameters(self, flat: tf.Tensor, shard: Shard, place: Place, *, computed_on: Pieces) -> tf.Tensor | None:
        with tf.control_dependencies([self.put([flat], shard, place, computed_on=computed_on)]):
            return message_of(packing.tags_of(flat, shard), place)

    def read_parameters(self, message: tf.Tensor, shard: Shard) -> TrainableAndRest:
        trainable, rest = halves(self.get_vector(message, shard), shard)
        # A step hands out what it fetched after its push, when the next vector may already be there.
        rest = tf.raw_ops.DeepCopy(x=rest)
        with tf.control_dependencies([rest]):
            return TrainableAndRest(tf.identity(trainable), rest)

    def write_gradients(
        self, trainable: Pieces, rest: Pieces, shard: Shard, *, push: int, computed_on: Pieces
    ) -> tf.Tensor:
        return self.put([*trainable, *rest], shard, self.place_of(push), computed_on=computed_on)

    def writes_on(self, device: str | None, *, jit: bool) -> bool:
        return not jit and device is not None and "cpu" in device.lower()

    def announce(self, vectors: Sequence[tf.Tensor], shard: Shard) -> tf.Tensor:
        with tf.control_dependencies(vectors):
            return message_of(packing.tags_of(vectors[0], shard), super().asks_to_stop(vectors[0], shard))

    def read_gradients(self, message: tf.Tensor, shard: Shard, pushes: Sequence[int]) -> list[tf.Tensor]:
        gradients = [self._read[shard.index][self.place_of(push)] for push in pushes]
        # The message is an input because a control dependency would wait for every message of the update.
        read = tf.numpy_function(lambda message: gradients, [message], [tf.float32] * len(pushes))
        return [self._shaped(vector, shard) for vector in tf.nest.flatten(read)]

    def feed(self, vectors: Sequence[np.ndarray], shards: Sequence[Shard]) -> Sequence[np.ndarray]:
        self._fed = {shard.index: vector for shard, vector in zip(shards, vectors, strict=True)}
        tags = [packing.tags_in(vector, shard) for shard, vector in zip(shards, vectors, strict=True)]
        return [np.append(one, np.int32(0)) for one in tags]

    def place_of(self, push: int) -> int:
        return self._vectors + push

    def put(self, pieces: Pieces, shard: Shard, place: Place, *, computed_on: Pieces = ()) -> tf.Tensor:
        """Writes a vector into a place of a shard, on the task that runs the operation.

        Args:
            computed_on: everything in shared memory that the pieces were computed on.

        Returns:
            [size] float32, where it lies.
        """
        written, read = self._written[shard.index], self._read[shard.index]
        count = len(pieces)

        def write(place: np.ndarray, *inputs: np.ndarray) -> np.ndarray:
            offset = 0
            for piece in inputs[:count]:
                written[place][offset : offset + piece.size] = piece
                offset += piece.size
            return read[place]

        return self._shaped(tf.numpy_function(write, [place, *pieces, *computed_on], tf.float32), shard)

    def get_vector(self, message: tf.Tensor, shard: Shard) -> tf.Tensor:
        """Returns the vector that a message names, [size] float32, without a copy."""
        read = self._read[shard.index]

        def find(place: np.ndarray) -> np.ndarray:
            return self._fed.pop(shard.index, read[place])

        return self._shaped(tf.numpy_function(find, [message[TAGS]], tf.float32), shard)

    def _shaped(self, vector: tf.Tensor, shard: Shard) -> tf.Tensor:
        vector.set_shape([shard.size])
        return vector


def message_of(tags: tf.Tensor, place: Place) -> tf.Tensor:
    """Returns the message about a vector with these tags [2]: its place; for gradients, whether to stop."""
    return tf.concat([tags, [tf.cast(place, tf.int32)]], 0)


def _cut(memory: mmap.mmap, shards: Sequence[Shard], strategy: Strategy, pushes: int) -> dict[int, list[np.ndarray]]:
    cut: dict[int, list[np.ndarray]] = {shard.index: [] for shard in shards}
    for shard, offset in places(shards, strategy, pushes):
        cut[shard.index].append(np.frombuffer(memory, np.float32, shard.size, offset))
    return cut
