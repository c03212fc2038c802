"""One update of a shard: average what was pushed, in the order of who pushed it, and apply the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from trainer import loss_scale, optimizers
from trainer.config import OptimizerConfig
from trainer.engine import packing
from trainer.placement import METRICS, Shard

Slots = dict[str, tf.Tensor]
# (flat [size], slots, pushed [size] each, generation, step, which were chosen [pushed] bool or None for all)
#     -> (flat', slots')
Update = Callable[
    [tf.Tensor, Slots, Sequence[tf.Tensor], tf.Tensor, tf.Tensor, tf.Tensor | None], tuple[tf.Tensor, Slots]
]
# squares [k] of this shard's parameters -> squares [K] of all, in path order
Exchange = Callable[[tf.Tensor], tf.Tensor]

STOP, OVERFLOW = METRICS.index("stop"), METRICS.index("overflow")


def make_update(shard: Shard, config: OptimizerConfig, exchange: Exchange, *, scaled: bool = False) -> Update:
    """Builds the update of one shard, compiled by XLA into one pass over its vectors.

    The result is out of place, so whoever still reads the previous vector keeps it unchanged.

    Args:
        exchange: brings together the squared norms of all shards; called only when gradients are clipped.
        scaled: leaves out updates whose gradients overflowed, and moves the loss scale.
    """

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
        state = mean[size : shard.metrics_offset]
        if scaled:
            overflow = mean[shard.metrics_offset + OVERFLOW] > 0
            parameters = tf.where(overflow, flat[:size], parameters)
            kept = dict(slots)
            if config.ema is not None:  # the next update would start the average from zeros
                kept["ema"] = tf.where(step > 0, slots["ema"], flat[:size])
            moved = {name: tf.where(overflow, kept[name], slot) for name, slot in moved.items()}
            state = _scaled_state(shard, flat, state, overflow)
        tags = packing.header(generation, step + 1)
        return tf.concat([parameters, state, _metrics(shard, flat, mean), tags], 0), moved

    @tf.function(jit_compile=True, autograph=False)
    def average(packed: Sequence[tf.Tensor], chosen: tf.Tensor | None) -> tf.Tensor:
        return mean_of(packed, chosen)

    def clipped(
        flat: tf.Tensor,
        slots: Slots,
        packed: Sequence[tf.Tensor],
        generation: tf.Tensor,
        step: tf.Tensor,
        chosen: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, Slots]:
        mean = average(packed, chosen)
        scale = optimizers.clip_scale(config, exchange(squares_of(mean)))
        return apply(flat, slots, mean, scale, generation, step)

    @tf.function(jit_compile=True, autograph=False)
    def unclipped(
        flat: tf.Tensor,
        slots: Slots,
        packed: Sequence[tf.Tensor],
        generation: tf.Tensor,
        step: tf.Tensor,
        chosen: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, Slots]:
        return apply(flat, slots, mean_of(packed, chosen), None, generation, step)

    return unclipped if config.clip_norm is None else clipped


def mean_of(packed: Sequence[tf.Tensor], chosen: tf.Tensor | None = None) -> tf.Tensor:
    """[size] The mean of what was pushed; of the chosen only, where that is given.

    Summed one by one in the order given: the bits of the sum depend on nothing else.
    """
    if chosen is not None:
        packed = [tf.where(chosen[number], one, 0.0) for number, one in enumerate(packed)]
    total = packed[0]
    for one in packed[1:]:
        total = total + one
    return total / (len(packed) if chosen is None else tf.reduce_sum(tf.cast(chosen, tf.float32)))


def squares_order(shards: Sequence[Shard]) -> list[int]:
    """Where each square stands when the shards' are laid end to end; in path order, parts as they follow each other."""
    parts = [(piece.path, piece.begin) for shard in shards for piece in shard.trainable]
    return sorted(range(len(parts)), key=parts.__getitem__)


def is_scaled(shards: Sequence[Shard]) -> bool:
    """Whether a run has a loss scale; one of its shards holds it."""
    return any(piece.path == loss_scale.PARAMETER.path for shard in shards for piece in shard.state)


def _metrics(shard: Shard, flat: tf.Tensor, mean: tf.Tensor) -> tf.Tensor:
    """The metrics after an update. Once a replica has asked to stop that stays, for those who did not see it yet."""
    before, now = (v[shard.metrics_offset : shard.header_offset] for v in (flat, mean))
    stop = tf.maximum(before[STOP], now[STOP])
    return tf.concat([now[:STOP], [stop], now[STOP + 1 :]], 0)


def _scaled_state(shard: Shard, flat: tf.Tensor, state: tf.Tensor, overflow: tf.Tensor) -> tf.Tensor:
    """The state after an update that may have been left out, with the loss scale moved, if it is held here."""
    before = flat[shard.trainable_size : shard.metrics_offset]
    after = tf.where(overflow, before, state)
    for piece in shard.state:
        if piece.path == loss_scale.PARAMETER.path:
            begin = piece.offset - shard.trainable_size
            end = begin + piece.size
            after = tf.concat(
                [after[:begin], loss_scale.moved(before[begin:end], overflow, state[begin]), after[end:]], 0
            )
    return after
