"""Combines what the replicas of a worker have computed into what it pushes."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import add

import tensorflow as tf

from trainer.config.schema import OptimizerConfig
from trainer.engine import optimizers
from trainer.engine.compute import Computed, Write, pack_float32
from trainer.engine.update import DIVISOR, squares_order
from trainer.engine.vectors.packing import halves, mean_of
from trainer.plan.layout import Shard
from trainer.plan.spans import Span

WriteSum = Callable[..., tf.Tensor]  # like `Write`, and `push`: which of a worker's sums it is


def mean_computed(computed: Sequence[Computed]) -> Computed:
    """Returns the mean over a worker's replicas, in their order."""
    if len(computed) == 1:
        return computed[0]
    mean = tf.nest.map_structure(lambda *values: mean_of(values), *computed)
    assert isinstance(mean, Computed)
    return mean


def sums_over_replicas(
    packed: Sequence[Sequence[tf.Tensor]],
    headers: Sequence[tf.Tensor],
    shards: Sequence[Shard],
    spans: Sequence[Span],
    write: WriteSum,
) -> list[list[tf.Tensor]]:
    """Packs the sums of spans of a worker's replicas, by span and shard; for updates that wait for all.

    Args:
        packed: by replica and shard, in float32.
        headers: [LANES] the tags of a push to each shard; to be copied, never computed with.
        spans: of this worker's replicas, in order.
    """

    @tf.function(jit_compile=True, autograph=False)
    def combine(packed: Sequence[Sequence[tf.Tensor]]) -> list[list[tf.Tensor]]:
        by_replica = {Span(spans[0].first + number, 1): list(vectors) for number, vectors in enumerate(packed)}
        return [span.sum(by_replica, lambda first, rest: list(map(add, first, rest))) for span in spans]

    sums = [list(vectors) for vectors in packed]
    if len(spans) < len(packed):
        sums = combine(sums)
    return [
        [
            _write_headed(vector, header, shard, partial(write, push=number))
            for vector, header, shard in zip(vectors, headers, shards, strict=True)
        ]
        for number, vectors in enumerate(sums)
    ]


def mean_over_replicas(
    packed: Sequence[Sequence[tf.Tensor]],
    headers: Sequence[tf.Tensor],
    shards: Sequence[Shard],
    *,
    clip: OptimizerConfig | None = None,
    write: Write = pack_float32,
    rows: Sequence[tf.Tensor] = (),
) -> tuple[list[tf.Tensor], tf.Tensor | None]:
    """Packs the mean over a worker's replicas for each shard; for updates that do not wait for all.

    Args:
        packed: by replica and shard, in float32.
        headers: [LANES] the tags of a push to each shard; to be copied, never computed with.
        clip: limits the norm of this worker's own gradient, where each gradient is an update of its own.
        rows: mean gradients of rows of tables, which count in the norm too.

    Returns:
        The vectors, and the factor of clipping.
    """
    if len(packed) == 1 and clip is None:
        regions = [halves(vector, shard) for vector, shard in zip(packed[0], shards, strict=True)]
        return [write([one.trainable], [one.rest], shard) for one, shard in zip(regions, shards, strict=True)], None
    square = tf.add_n([tf.reduce_sum(tf.square(one)) for one in rows]) if clip is not None and rows else None

    @tf.function(jit_compile=True, autograph=False)
    def combine(
        packed: Sequence[Sequence[tf.Tensor]], square: tf.Tensor | None
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        means = [mean_of([one[i] for one in packed]) for i, _ in enumerate(shards)]
        return (means, None) if clip is None else _clipped(means, shards, clip, square)

    means, scale = combine([list(one) for one in packed], square)
    return [_write_headed(*parts, write) for parts in zip(means, headers, shards, strict=True)], scale


def _write_headed(vector: tf.Tensor, header: tf.Tensor, shard: Shard, write: Write) -> tf.Tensor:
    """Writes a vector with this header in the place of the one that was computed."""
    state = vector[shard.trainable_size : shard.header_offset]
    return write([vector[: shard.trainable_size]], [state, header], shard)


def _clipped(
    means: Sequence[tf.Tensor], shards: Sequence[Shard], config: OptimizerConfig, square: tf.Tensor | None
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns the clipped means, and their factor; `square` [] is that of other gradients in the norm."""
    squares = [
        optimizers.square_sums(mean, [(piece.offset, piece.padded) for piece in shard.trainable])
        for mean, shard in zip(means, shards, strict=True)
    ]
    all_squares = tf.gather(tf.concat(squares, 0), squares_order(shards))
    if square is not None:
        all_squares = tf.concat([all_squares, tf.reshape(square, [1])], 0)
    if shards[0].is_counted:  # the host will divide by it
        all_squares /= tf.square(means[0][shards[0].metrics_offset + DIVISOR])
    scale = optimizers.clip_scale(config, all_squares)
    return [
        tf.concat([mean[: shard.trainable_size] * scale, mean[shard.trainable_size :]], 0)
        for mean, shard in zip(means, shards, strict=True)
    ], scale
