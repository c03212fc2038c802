"""The middle of every engine's step: from pulled vectors to packed gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer.engine import packing
from trainer.placement import Shard


@dataclass(frozen=True)
class Replica:
    """What one replica computes, and which one it is."""

    step: Callable[..., Any]  # from replica.make_step
    batches: Callable[[], Any]  # makes its training batches (data.pipeline.Batches) in the default graph
    seed: int
    index: int = 0
    count: int = 1
    device: str | None = None  # of the forward and backward pass; none: where TensorFlow puts it


def compute(
    pulled: Sequence[tf.Tensor], shards: Sequence[Shard], replica: Replica, batches: Any, stop: tf.Tensor
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Runs the replica step on the next batch; returns what to push to each shard, and the time when it was ready.

    Every random draw is a function of (seed, global step, replica), so a restarted replica repeats it.
    """
    global_step = tf.cast(packing.tags_of(pulled[0], shards[0])[1], tf.int64)
    same = tf.debugging.assert_equal(batches.step, global_step, "the batch is of another step than the parameters")
    draw = tf.stack([tf.constant(replica.seed, tf.int64), global_step * replica.count + replica.index])
    step = tf.function(lambda *inputs: replica.step(*inputs), autograph=False)
    with tf.control_dependencies([same]):
        features = tf.identity(batches.features)
    with tf.device(replica.device):  # one copy of each vector there, and one back
        gradients, state, loss, accuracy = step(*packing.unpack(pulled, shards), draw, features, batches.labels)
        metrics = tf.stack([loss, accuracy, stop])
        packed = [
            packing.pack(shard, gradients, state, metrics, packing.header_of(flat, shard))
            for flat, shard in zip(pulled, shards, strict=True)
        ]
    with tf.control_dependencies(packed):
        return packed, tf.timestamp()
