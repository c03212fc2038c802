"""How the vector of a shard travels between its host and a worker.

    float32     the vector as it is
    bfloat16    its trainable region rounded to the nearest bfloat16, ties to even: half the bytes
    memory      not at all: a message says what lies where in shared memory (engine/memory.py)

A message of bfloat16 is [numbers] uint16: one for each float of the trainable region, two for each of the others,
whose bits are kept (metrics, BatchNorm's statistics, the header). Whole numbers, so that nothing on the way computes
with them. What is kept, and what is summed, is float32; only parameters on their way to a worker and gradients on their
way to a host are rounded, those of a shard on the same task too: the result does not depend on where shards lie.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from trainer.engine.vectors import packing
from trainer.engine.vectors.packing import TrainableAndRest, halves
from trainer.plan.layout import LANES, METRICS, TAGS, WIRES, Shard

FLOAT32, BFLOAT16, MEMORY = "float32", "bfloat16", "memory"
_DTYPES = {FLOAT32: tf.float32, BFLOAT16: tf.uint16, MEMORY: tf.int32}


def dtype(wire: str) -> tf.DType:
    return _DTYPES[wire]


def shape(shard: Shard, wire: str) -> list[int]:
    return [WIRES[wire].numbers(shard)]


def join(trainable: Sequence[tf.Tensor], rest: Sequence[tf.Tensor], wire: str) -> tf.Tensor:
    """A message from the pieces of a vector, [k] float32 each, in their order."""
    if wire == FLOAT32:
        return tf.concat([*trainable, *rest], 0)
    rounded = [tf.bitcast(tf.cast(one, tf.bfloat16), tf.uint16) for one in trainable]
    return tf.concat([*rounded, *(tf.reshape(tf.bitcast(one, tf.uint16), [-1]) for one in rest)], 0)


def send(flat: tf.Tensor, shard: Shard, wire: str) -> tf.Tensor:
    """The message that a vector travels as."""
    if wire == FLOAT32:
        return flat
    trainable, rest = halves(flat, shard)
    return join([trainable], [rest], wire)


def receive(message: tf.Tensor, shard: Shard, wire: str) -> TrainableAndRest:
    """What a message says, in float32."""
    if wire == FLOAT32:
        return halves(message, shard)
    size = shard.trainable_size
    trainable = tf.bitcast(tf.slice(message, [0], [size]), tf.bfloat16)
    return TrainableAndRest(
        tf.cast(trainable, tf.float32), _exact(tf.slice(message, [size], [2 * (shard.size - size)]))
    )


def tell(tags: tf.Tensor, more: tf.Tensor | int) -> tf.Tensor:
    """The message of a vector that does not travel.

    Args:
        tags: [2] int32: its generation and step.
        more: the place of a shard's vector; of gradients, whether their worker asks to stop.
    """
    return tf.concat([tags, [tf.cast(more, tf.int32)]], 0)


def place_in(message: tf.Tensor) -> tf.Tensor:
    """Where the vector lies that a message of `memory` tells of."""
    return message[TAGS]


def tags_of(message: tf.Tensor, shard: Shard, wire: str) -> tf.Tensor:
    """[2] int32: the generation and step that a message belongs to."""
    if wire == MEMORY:
        return message[:TAGS]
    if wire == FLOAT32:
        return packing.tags_of(message, shard)
    return tf.bitcast(_lanes(message, shard, shard.header_offset), tf.int32)[:2]


def asks_to_stop(message: tf.Tensor, shard: Shard, wire: str) -> tf.Tensor:
    """Whether gradients are of a worker that asks all to stop."""
    return message[TAGS] > 0 if wire == MEMORY else metrics_of(message, shard, wire)[METRICS.index("stop")] > 0


def metrics_of(message: tf.Tensor, shard: Shard, wire: str) -> tf.Tensor:
    """[LANES] float32."""
    if wire == FLOAT32:
        return packing.metrics_of(message, shard)
    return _lanes(message, shard, shard.metrics_offset)


def trainable_of(message: np.ndarray, shard: Shard) -> np.ndarray:
    """[trainable_size] float32 of a message that was fetched."""
    if message.dtype == np.float32:
        return message[: shard.trainable_size]
    return (message[: shard.trainable_size].astype(np.uint32) << 16).view(np.float32)


def _lanes(message: tf.Tensor, shard: Shard, offset: int) -> tf.Tensor:
    """[LANES] float32 that stand at an offset of the vector, behind its trainable region."""
    return _exact(tf.slice(message, [2 * offset - shard.trainable_size], [2 * LANES]))


def _exact(bits: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tf.reshape(bits, [-1, 2]), tf.float32)
