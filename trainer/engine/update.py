"""One update of a shard: average what the replicas pushed, in replica order, and apply the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from trainer import optimizers
from trainer.config import OptimizerConfig
from trainer.engine import packing
from trainer.placement import Shard

Slots = dict[str, tf.Tensor]
# (flat [size], slots, packed of every replica [size], generation, step) -> (flat', slots')
Update = Callable[[tf.Tensor, Slots, Sequence[tf.Tensor], tf.Tensor, tf.Tensor], tuple[tf.Tensor, Slots]]
# squares [k] of this shard's parameters -> squares [K] of all, in path order
Exchange = Callable[[tf.Tensor], tf.Tensor]


def make_update(shard: Shard, config: OptimizerConfig, exchange: Exchange) -> Update:
    """Builds the update of one shard, compiled by XLA into one pass over its vectors.

    The result is out of place, so whoever still reads the previous vector keeps it unchanged.

    Args:
        exchange: brings together the squared norms of all shards; called only when gradients are clipped.
    """

    @tf.function(jit_compile=True, autograph=False)
    def average(packed: Sequence[tf.Tensor]) -> tf.Tensor:
        total = packed[0]
        for one in packed[1:]:  # replica order, one by one: the sum's bits depend on nothing else
            total = total + one
        return total / len(packed)

    @tf.function(jit_compile=True, autograph=False)
    def squares_of(mean: tf.Tensor) -> tf.Tensor:
        return optimizers.square_sums(mean, [(piece.offset, piece.padded) for piece in shard.trainable])

    @tf.function(jit_compile=True, autograph=False)
    def apply(
        flat: tf.Tensor, slots: Slots, mean: tf.Tensor, scale: tf.Tensor | None, generation: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, Slots]:
        size = shard.trainable_size
        gradient = mean[:size] if scale is None else mean[:size] * scale
        parameters, moved = optimizers.apply(config, flat[:size], slots, gradient, step)
        tags = packing.header(generation, step + 1)
        return tf.concat([parameters, mean[size : shard.header_offset], tags], 0), moved

    def clipped(
        flat: tf.Tensor, slots: Slots, packed: Sequence[tf.Tensor], generation: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, Slots]:
        mean = average(packed)
        scale = optimizers.clip_scale(config, exchange(squares_of(mean)))
        return apply(flat, slots, mean, scale, generation, step)

    @tf.function(jit_compile=True, autograph=False)
    def unclipped(
        flat: tf.Tensor, slots: Slots, packed: Sequence[tf.Tensor], generation: tf.Tensor, step: tf.Tensor
    ) -> tuple[tf.Tensor, Slots]:
        return apply(flat, slots, average(packed), None, generation, step)

    return unclipped if config.clip_norm is None else clipped


def squares_order(shards: Sequence[Shard]) -> list[int]:
    """Where each parameter's square stands when the shards' squares are laid end to end, parameters in path order."""
    paths = [piece.path for shard in shards for piece in shard.trainable]
    return sorted(range(len(paths)), key=paths.__getitem__)
