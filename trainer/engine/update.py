"""Updates a shard: averages the gradients in the order of plan/spans.py, and applies the optimizer."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from trainer.config.schema import OptimizerConfig
from trainer.engine import optimizers
from trainer.engine.optimizers import Tensor
from trainer.engine.stages import is_in_stages, make_apply
from trainer.engine.vectors import packing
from trainer.engine.vectors.packing import TrainableAndRest, mean_of
from trainer.engine.vectors.wire import FLOAT32, VectorWire
from trainer.plan.layout import METRICS, Shard
from trainer.plan.spans import Span
from trainer.workload import loss_scale

Slots = dict[str, Tensor]
Updated = tuple[Tensor, Slots]  # the vector [size] and its slots after an update
# (flat [size], slots, messages pushed, generation, step, which were chosen [pushed] bool or None for all)
Update = Callable[[Tensor, Slots, Sequence[Tensor], Tensor, Tensor, Tensor | None], Updated]
# squares [k] of this shard's parameters -> squares [K] of all, in path order
Exchange = Callable[[Tensor], Tensor]

LOSS, STOP, OVERFLOW, BAD, REDUCTIONS, DIVISOR = (
    METRICS.index(name) for name in ("loss", "stop", "overflow", "bad", "reductions", "divisor")
)


def make_update(
    shard: Shard,
    config: OptimizerConfig,
    exchange: Exchange,
    *,
    scaled: bool = False,
    wire: VectorWire = FLOAT32,
    spans: Sequence[Span] | None = None,
) -> Update:
    """Builds the update of one shard, compiled by XLA into one pass over its vectors if the optimizer allows it.

    The result is a new buffer, so the previous vector stays unchanged for its readers. If a replica's loss or gradients
    are not finite, every shard skips the update: the step counts, and nothing else changes.

    Args:
        exchange: brings together the squared norms of all shards; called only when gradients are clipped.
        scaled: also skips updates whose gradients overflowed, and adjusts the loss scale.
        wire: for which the gradients were packed.
        spans: the replicas that each push is the sum of; by default one each.
    """

    @tf.function(jit_compile=True, autograph=False)
    def squares_of(gradient: Tensor) -> Tensor:
        return optimizers.square_sums(gradient, [(piece.offset, piece.padded) for piece in shard.trainable])

    apply_optimizer, in_stages = make_apply(config, shard), is_in_stages(config, shard)

    def in_one_pass(function: Callable[..., Any]) -> Callable[..., Any]:
        return function if in_stages else tf.function(function, jit_compile=True, autograph=False)

    @in_one_pass
    def apply(
        flat: Tensor, slots: Slots, pushed: TrainableAndRest, scale: Tensor | None, generation: Tensor, step: Tensor
    ) -> Updated:
        gradient = pushed.trainable if scale is None else pushed.trainable * scale
        before, now = (packing.metrics_of(vector, shard) for vector in (flat, pushed))
        reductions = _reductions(before, now)
        parameters, moved = apply_optimizer(flat[: shard.trainable_size], slots, gradient, step, reductions)
        sums = _sums(shard, before, step) + now[len(METRICS) :]
        metrics, state = _metrics(before, now, sums, bad=before[BAD]), _state(shard, flat, pushed.rest, made=True)
        return tf.concat([parameters, state, metrics, packing.header(generation, step + 1)], 0), moved

    def mean(packed: Sequence[Tensor], chosen: Tensor | None) -> TrainableAndRest:
        return divided(wire.average(packed, shard, chosen, spans), shard)

    average = tf.function(mean, jit_compile=True, autograph=False)

    @tf.function(jit_compile=True, autograph=False)
    def average_rest(packed: Sequence[Tensor], chosen: Tensor | None) -> Tensor:
        # Compiled although it is small: TensorFlow itself would change the order of a chain of sums.
        rest = mean_of([wire.unpack(vector, shard).rest for vector in packed], chosen, spans)
        return divided(TrainableAndRest(tf.zeros([0]), rest), shard).rest

    @in_one_pass
    def average_and_apply(
        flat: Tensor, slots: Slots, packed: Sequence[Tensor], generation: Tensor, step: Tensor, chosen: Tensor | None
    ) -> Updated:
        pushed = average(packed, chosen) if in_stages else mean(packed, chosen)
        return apply(flat, slots, pushed, None, generation, step)

    def leave_out(flat: Tensor, slots: Slots, rest: Tensor, generation: Tensor, step: Tensor) -> Updated:
        parameters, unmoved = flat[: shard.trainable_size], dict(slots)
        if config.ema is not None:  # the next update would start the average from zeros
            unmoved[optimizers.EMA] = tf.where(step > 0, slots[optimizers.EMA], parameters)
        before, now = packing.metrics_of(flat, shard), packing.metrics_of(TrainableAndRest(parameters, rest), shard)
        bad = tf.where(now[BAD] > 0, tf.cast(step + 1, tf.float32), before[BAD])
        loss = tf.where(tf.math.is_finite(now[LOSS]), now[LOSS], before[LOSS])  # its readers expect a number
        metrics = _metrics(before, tf.concat([[loss], now[LOSS + 1 :]], 0), _sums(shard, before, step), bad=bad)
        state = _state(shard, flat, rest, made=False)
        return tf.concat([parameters, state, metrics, packing.header(generation, step + 1)], 0), unmoved

    def update(
        flat: Tensor,
        slots: Slots,
        packed: Sequence[Tensor],
        generation: Tensor,
        step: Tensor,
        chosen: Tensor | None = None,
    ) -> Updated:
        rest = average_rest(packed, chosen)
        if config.clip_norm is None:
            make = partial(average_and_apply, flat, slots, packed, generation, step, chosen)
        else:
            pushed = average(packed, chosen)
            scale = optimizers.clip_scale(config, exchange(squares_of(pushed.trainable)))
            make = partial(apply, flat, slots, pushed, scale, generation, step)
        metrics = packing.metrics_of(TrainableAndRest(flat, rest), shard)
        is_bad = metrics[BAD] + metrics[OVERFLOW] > 0 if scaled else metrics[BAD] > 0
        # A condition around what XLA compiles: a choice within it makes XLA contract other sums, with other bits.
        return tf.cond(is_bad, partial(leave_out, flat, slots, rest, generation, step), make)

    return update


def divided(mean: TrainableAndRest, shard: Shard) -> TrainableAndRest:
    """Returns the mean of the replicas' pushes; if the shard is counted, divided by the mean divisor."""
    if not shard.is_counted:
        return mean
    begin = shard.metrics_offset - shard.trainable_size
    loss, divisor = begin + LOSS, mean.rest[begin + DIVISOR]
    parts = [mean.rest[:loss], mean.rest[loss : loss + 1] / divisor, mean.rest[loss + 1 : begin + DIVISOR], [1.0]]
    return TrainableAndRest(mean.trainable / divisor, tf.concat([*parts, mean.rest[begin + DIVISOR + 1 :]], 0))


def judge(
    flat: Tensor,
    packed: Sequence[Tensor],
    shard: Shard,
    wire: VectorWire,
    *,
    scaled: bool,
    chosen: Tensor | None = None,
    spans: Sequence[Span] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns whether all shards skip the update, the learning rate reductions from then on, and the divisor."""
    now = mean_of([wire.metrics_of(vector, shard) for vector in packed], chosen, spans)
    is_bad = now[BAD] + now[OVERFLOW] > 0 if scaled else now[BAD] > 0
    divisor = now[DIVISOR] if shard.is_counted else tf.constant(1.0)
    return is_bad, _reductions(packing.metrics_of(flat, shard), now), divisor


def squares_order(shards: Sequence[Shard]) -> list[int]:
    """Returns the indices, in path order and part by part, of the squares of all shards laid end to end."""
    parts = [(piece.path, piece.begin) for shard in shards for piece in shard.trainable]
    return sorted(range(len(parts)), key=parts.__getitem__)


def is_scaled(shards: Sequence[Shard]) -> bool:
    """Whether a run has a loss scale; one of its shards holds it."""
    return any(piece.path == loss_scale.PARAMETER.path for shard in shards for piece in shard.state)


def _metrics(before: Tensor, now: Tensor, sums: Tensor, *, bad: Tensor) -> Tensor:
    """Returns metrics [metrics_size] after an update. A request to stop grows by 1: after 2 all have stopped."""
    stop = tf.maximum(before[STOP] + tf.sign(before[STOP]), now[STOP])
    return tf.concat([now[:STOP], [stop], now[STOP + 1 : BAD], [bad, _reductions(before, now), now[DIVISOR]], sums], 0)


def _reductions(before: Tensor, now: Tensor) -> Tensor:
    """Returns the reductions [] of the learning rate from this update on, pushed by the chief; they never decrease."""
    return tf.maximum(before[REDUCTIONS], tf.round(now[REDUCTIONS]))  # a mean may be off by one bit


def _sums(shard: Shard, before: Tensor, step: Tensor) -> Tensor:
    """Returns the sums of metrics that an update adds to: those since the last multiple of `sums_every` steps."""
    sums = before[len(METRICS) :]
    return tf.where(tf.equal(step % shard.sums_every, 0), tf.zeros_like(sums), sums)


def _state(shard: Shard, flat: Tensor, rest: Tensor, *, made: bool) -> Tensor:
    """Returns the state after an update, made or skipped, with the loss scale adjusted, if it is held here."""
    before = flat[shard.trainable_size : shard.metrics_offset]
    pushed = rest[: shard.metrics_offset - shard.trainable_size]
    after = pushed if made else before
    for piece in shard.state:
        if piece.path == loss_scale.PARAMETER.path:
            begin = piece.offset - shard.trainable_size
            end = begin + piece.size
            scale = loss_scale.moved(before[begin:end], tf.constant(not made), pushed[begin])
            after = tf.concat([after[:begin], scale, after[end:]], 0)
    return after
