"""Defines how the vector of a shard is sent between its host and a worker.

    float32     the vector as it is
    bfloat16    its trainable region rounded to the nearest bfloat16, ties to even: half the bytes
    memory      not at all: a message says where it lies in shared memory (shared_memory.py)

A bfloat16 message is [numbers] uint16: one number for each float of the trainable region, two for each of the
others, whose bits stay as they are (state, metrics, header). Whole numbers, so that nothing on the way computes with
them. Hosts hold and sum float32; only parameters on their way to a worker and gradients on their way to a host are
rounded, also between a host and a worker in the same task: the result does not depend on where the shards are.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from trainer.engine.vectors import packing
from trainer.engine.vectors.packing import TrainableAndRest, halves, mean_of
from trainer.plan.layout import LANES, METRICS, TAGS, WIRES, Shard
from trainer.plan.spans import Span

Pieces = Sequence[tf.Tensor]  # of vectors: whole, their regions, or parts [k] float32 in their order
Place: TypeAlias = tf.Tensor | int  # of a vector in shared memory


class VectorWire:
    """The float32 wire, and the protocol of all: every method that another wire does differently is overridden there.

    A *vector* is one shard's parameters or gradients, packed; a *message* is what crosses between the tasks.
    """

    name = "float32"
    dtype = tf.float32  # of messages
    has_messages = False  # whether a host writes messages for its workers to pull; otherwise they pull its vector
    is_shared = False  # whether vectors, and rows of tables, stay in memory that all tasks map
    is_per_worker = False  # whether each worker has its own message, written with its token

    def shape(self, shard: Shard) -> list[int]:
        """Returns the shape of a message."""
        return [WIRES[self.name].numbers(shard)]

    def push_shape(self, shard: Shard, vectors: int) -> list[int]:
        """Returns the shape of a message that pushes several vectors."""
        return [vectors * size for size in self.shape(shard)]

    def pack(self, trainable: Pieces, rest: Pieces) -> tf.Tensor:
        return tf.concat([*trainable, *rest], 0)

    def pack_flat(self, flat: tf.Tensor, shard: Shard) -> tf.Tensor:
        """Packs a whole vector [size] float32."""
        return flat

    def unpack(self, vector: tf.Tensor, shard: Shard) -> TrainableAndRest:
        """Returns a packed vector in float32."""
        return halves(vector, shard)

    def average(
        self, vectors: Sequence[tf.Tensor], shard: Shard, chosen: tf.Tensor | None, spans: Sequence[Span] | None
    ) -> TrainableAndRest:
        """Returns the mean of packed vectors, in float32; see `mean_of`."""
        mean = mean_of(vectors, chosen, spans)
        return halves(mean, shard)  # cut after the mean: else XLA folds its division into the rate

    def trainable_in(self, vector: np.ndarray, shard: Shard) -> np.ndarray:
        """Returns [trainable_size] float32 of a packed vector that was fetched."""
        return vector[: shard.trainable_size]

    def tags_of(self, message: tf.Tensor, shard: Shard) -> tf.Tensor:
        """Returns [2] int32: the generation and step that a message belongs to."""
        return packing.tags_of(message, shard)

    def metrics_of(self, vector: tf.Tensor, shard: Shard) -> tf.Tensor:
        """Returns [metrics_size] float32 of a packed vector."""
        return packing.metrics_of(vector, shard)

    def asks_to_stop(self, message: tf.Tensor, shard: Shard) -> tf.Tensor:
        """Whether the gradients of a message come from a worker that asks all to stop."""
        return self.metrics_of(message, shard)[METRICS.index("stop")] > 0

    def write_parameters(self, flat: tf.Tensor, shard: Shard, place: Place, *, computed_on: Pieces) -> tf.Tensor | None:
        """Writes a host's new vector where workers will read it; returns the message for them, if there are messages.

        Args:
            computed_on: the gradients that the vector was computed on.
        """
        return None

    def read_parameters(self, message: tf.Tensor, shard: Shard) -> TrainableAndRest:
        return self.unpack(message, shard)

    def write_gradients(
        self, trainable: Pieces, rest: Pieces, shard: Shard, *, push: int, computed_on: Pieces
    ) -> tf.Tensor:
        """Packs a worker's push where its host will read it; returns the packed vector.

        Args:
            push: its number among those that an update takes.
            computed_on: the trainable regions that the gradients were computed on.
        """
        return self.pack(trainable, rest)

    def writes_on(self, device: str | None, *, jit: bool) -> bool:
        """Whether gradients can be written from within a replica step on that device."""
        return True

    def announce(self, vectors: Sequence[tf.Tensor], shard: Shard) -> tf.Tensor:
        """Returns the message that pushes the vectors that `write_gradients` returned."""
        return tf.concat(vectors, 0) if len(vectors) > 1 else vectors[0]

    def read_gradients(self, message: tf.Tensor, shard: Shard, pushes: Sequence[int]) -> list[tf.Tensor]:
        """Returns the packed vectors with these numbers that a worker pushed."""
        return tf.split(message, len(pushes)) if len(pushes) > 1 else [tf.identity(message)]

    def feed(self, vectors: Sequence[np.ndarray], shards: Sequence[Shard]) -> Sequence[np.ndarray]:
        """Returns the messages to feed to a step that computes on fetched packed vectors."""
        return vectors


class BFloat16(VectorWire):
    """Sends the trainable region as bfloat16."""

    name = "bfloat16"
    dtype = tf.uint16
    has_messages = True

    def pack(self, trainable: Pieces, rest: Pieces) -> tf.Tensor:
        rounded = [tf.bitcast(tf.cast(one, tf.bfloat16), tf.uint16) for one in trainable]
        return tf.concat([*rounded, *(tf.reshape(tf.bitcast(one, tf.uint16), [-1]) for one in rest)], 0)

    def pack_flat(self, flat: tf.Tensor, shard: Shard) -> tf.Tensor:
        trainable, rest = halves(flat, shard)
        return self.pack([trainable], [rest])

    def unpack(self, vector: tf.Tensor, shard: Shard) -> TrainableAndRest:
        size = shard.trainable_size
        trainable = tf.bitcast(tf.slice(vector, [0], [size]), tf.bfloat16)
        return TrainableAndRest(
            tf.cast(trainable, tf.float32), _exact(tf.slice(vector, [size], [2 * (shard.size - size)]))
        )

    def average(
        self, vectors: Sequence[tf.Tensor], shard: Shard, chosen: tf.Tensor | None, spans: Sequence[Span] | None
    ) -> TrainableAndRest:
        regions = zip(*(self.unpack(vector, shard) for vector in vectors), strict=True)
        return TrainableAndRest(*(mean_of(region, chosen, spans) for region in regions))

    def trainable_in(self, vector: np.ndarray, shard: Shard) -> np.ndarray:
        return (vector[: shard.trainable_size].astype(np.uint32) << 16).view(np.float32)

    def tags_of(self, message: tf.Tensor, shard: Shard) -> tf.Tensor:
        return tf.bitcast(_region(message, shard, shard.header_offset, LANES), tf.int32)[:TAGS]

    def metrics_of(self, vector: tf.Tensor, shard: Shard) -> tf.Tensor:
        return _region(vector, shard, shard.metrics_offset, shard.metrics_size)

    def write_parameters(self, flat: tf.Tensor, shard: Shard, place: Place, *, computed_on: Pieces) -> tf.Tensor | None:
        return _pack_compiled(flat, shard)


FLOAT32, BFLOAT16 = VectorWire(), BFloat16()
_pack_compiled = tf.function(BFLOAT16.pack_flat, jit_compile=True, autograph=False)
MESSAGE_WIRES: Mapping[str, VectorWire] = {wire.name: wire for wire in (FLOAT32, BFLOAT16)}  # that send vectors


def _region(vector: tf.Tensor, shard: Shard, offset: int, size: int) -> tf.Tensor:
    """Returns the region [size] float32 at an offset behind the trainable region of a bfloat16 vector."""
    return _exact(tf.slice(vector, [2 * offset - shard.trainable_size], [2 * size]))


def _exact(bits: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tf.reshape(bits, [-1, 2]), tf.float32)
