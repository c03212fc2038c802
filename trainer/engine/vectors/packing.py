"""Packs named tensors into the flat vectors of shards and unpacks them; plan/layout.py has the layout."""

from collections.abc import Iterable, Mapping, Sequence
from operator import add
from typing import NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from trainer.plan.layout import LANES, METRICS, TAGS, Shard, Slice
from trainer.plan.spans import Span, all_of, each_alone

GENERATION_STRIDE = 2**32  # a tag is generation * stride + step, or another number that grows within the generation

Tensors = Mapping[str, tf.Tensor]  # by parameter path
Arrays = Mapping[str, np.ndarray]
Vector = TypeVar("Vector", tf.Tensor, np.ndarray)


class TrainableAndRest(NamedTuple):
    """The two regions of a vector."""

    trainable: tf.Tensor  # [trainable_size]
    rest: tf.Tensor  # [size - trainable_size]: state, metrics, header


def halves(flat: tf.Tensor, shard: Shard) -> TrainableAndRest:
    """Returns both regions, which are views on a CPU: they begin at a multiple of 64 bytes."""
    size = shard.trainable_size
    return TrainableAndRest(tf.slice(flat, [0], [size]), tf.slice(flat, [size], [shard.size - size]))


def unpack(
    vectors: Sequence[TrainableAndRest], shards: Sequence[Shard]
) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
    """Cuts the shards' vectors into (parameters, state) by path, each parameter whole."""
    trainable = [(shard.trainable, vector.trainable) for shard, vector in zip(shards, vectors, strict=True)]
    state = [
        ([piece._replace(offset=piece.offset - shard.trainable_size) for piece in shard.state], vector.rest)
        for shard, vector in zip(shards, vectors, strict=True)
    ]
    return (
        {path: _restore(parts) for path, parts in _by_path(trainable).items()},
        {path: _restore(parts) for path, parts in _by_path(state).items()},
    )


def pieces_of(
    shard: Shard, gradients: Tensors, state: Tensors, metrics: tf.Tensor, header: tf.Tensor
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns a replica's push to one shard in pieces: those of the trainable region, and the rest; float32.

    Args:
        gradients, state: by path, whole; only the shard's own parts are read.
        metrics: [k] layout.METRICS, then the sums of the first shard; other shards get the former alone.
        header: [LANES], as pulled.
    """
    trainable = [_pad(gradients[piece.path], piece) for piece in shard.trainable]
    rest = [_pad(state[piece.path], piece) for piece in shard.state]
    metrics = metrics[: len(METRICS) + shard.sums]
    return trainable, [*rest, tf.pad(metrics, [[0, shard.metrics_size - metrics.shape[0]]]), header]


def pack(shard: Shard, gradients: Tensors, state: Tensors, metrics: tf.Tensor, header: tf.Tensor) -> tf.Tensor:
    """Returns the `pieces_of` a shard as one vector: [size]."""
    trainable, rest = pieces_of(shard, gradients, state, metrics, header)
    return tf.concat([*trainable, *rest], 0)


def mean_of(
    packed: Sequence[tf.Tensor], chosen: tf.Tensor | None = None, spans: Sequence[Span] | None = None
) -> tf.Tensor:
    """Returns [size], the mean over the replicas of all pushes, or of the chosen ones.

    Summed in the order of plan/spans.py: the bits of the sum depend on nothing else.

    Args:
        spans: the replicas that each push is the sum of; by default one each.
    """
    if chosen is not None:
        packed = [tf.where(chosen[number], vector, 0.0) for number, vector in enumerate(packed)]
    spans = spans or each_alone(len(packed))
    total = all_of(spans).sum(dict(zip(spans, packed, strict=True)), add)
    return total / (all_of(spans).size if chosen is None else tf.reduce_sum(tf.cast(chosen, tf.float32)))


def header(generation: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """Returns [LANES] float32 whose first bits are the int32 generation and step; never to be computed with."""
    tags = tf.cast(tf.stack([generation, step]), tf.int32)
    return tf.bitcast(tf.pad(tags, [[0, LANES - TAGS]]), tf.float32)


def header_of(vector: tf.Tensor | TrainableAndRest, shard: Shard) -> tf.Tensor:
    return _region(vector, shard, shard.header_offset, LANES)


def tags_of(vector: tf.Tensor | TrainableAndRest, shard: Shard) -> tf.Tensor:
    """Returns [2] int32: the generation and step that a vector belongs to."""
    return tf.bitcast(header_of(vector, shard), tf.int32)[:TAGS]


def tags_in(vector: np.ndarray, shard: Shard) -> np.ndarray:
    """`tags_of` a vector that was fetched."""
    return vector.view(np.int32)[shard.header_offset : shard.header_offset + TAGS]


def metrics_of(vector: tf.Tensor | TrainableAndRest, shard: Shard) -> tf.Tensor:
    """Returns the metrics [metrics_size] of a vector."""
    return _region(vector, shard, shard.metrics_offset, shard.metrics_size)


def sums_in(vector: np.ndarray, shard: Shard) -> np.ndarray:
    """Returns [sums] of a vector that was fetched; a view."""
    offset = shard.metrics_offset + len(METRICS)
    return vector[offset : offset + shard.sums]


def to_flat(shard: Shard, values: Arrays, *, generation: int, step: int) -> np.ndarray:
    """Returns [size] float32 with the parameters and state of a shard, tagged; the metrics are zero."""
    flat = np.zeros(shard.size, np.float32)
    for piece in (*shard.trainable, *shard.state):
        flat[piece.offset : piece.offset + piece.size] = _part(values, piece)
    tags_in(flat, shard)[:] = generation, step
    return flat


def to_slot(shard: Shard, name: str, values: Arrays | None, fill: float) -> np.ndarray:
    """Returns [slot_size] float32: an optimizer slot, from its values by path or at its first value."""
    slot = np.full(shard.slot_size(name), fill, np.float32)
    if values is not None:
        for piece in shard.slot_pieces(name):
            slot[piece.offset : piece.offset + piece.size] = _part(values, piece)
    return slot


def join(pieces_and_flats: Iterable[tuple[Sequence[Slice], np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the named arrays in flat vectors or slots; a whole array is a view.

    Args:
        pieces_and_flats: pieces with the vector that holds them; together they must have all parts of each parameter.
    """
    joined = {}
    for path, parts in _by_path(pieces_and_flats).items():
        cuts = [flat[piece.offset : piece.offset + piece.size] for piece, flat in parts]
        joined[path] = (np.concatenate(cuts) if len(cuts) > 1 else cuts[0]).reshape(parts[0][0].shape)
    return joined


def from_flat(pieces: Sequence[Slice], flat: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the named arrays in the one flat vector or slot that holds them all."""
    return join([(pieces, flat)])


def _region(vector: tf.Tensor | TrainableAndRest, shard: Shard, offset: int, size: int) -> tf.Tensor:
    """Returns the region [size] at an offset behind the trainable region."""
    if isinstance(vector, TrainableAndRest):
        return tf.slice(vector.rest, [offset - shard.trainable_size], [size])
    return tf.slice(vector, [offset], [size])


def _by_path(pieces_and_flats: Iterable[tuple[Sequence[Slice], Vector]]) -> dict[str, list[tuple[Slice, Vector]]]:
    """Returns the parts of every parameter in order, with the vectors that hold them."""
    by_path: dict[str, list[tuple[Slice, Vector]]] = {}
    for pieces, flat in pieces_and_flats:
        for piece in pieces:
            by_path.setdefault(piece.path, []).append((piece, flat))
    return {path: sorted(parts, key=lambda part: part[0].begin) for path, parts in by_path.items()}


def _restore(parts: Sequence[tuple[Slice, tf.Tensor]]) -> tf.Tensor:
    """Returns a parameter from its parts; a whole one stays a view, without a concat."""
    cuts = [_cut(flat, piece) for piece, flat in parts]
    return tf.reshape(tf.concat(cuts, 0) if len(cuts) > 1 else cuts[0], parts[0][0].shape)


def _cut(flat: tf.Tensor, piece: Slice) -> tf.Tensor:
    padded = tf.slice(flat, [piece.offset], [piece.padded])  # 64-byte aligned at both ends: a view on a CPU
    return padded if piece.size == piece.padded else padded[: piece.size]


def _part(values: Arrays, piece: Slice) -> np.ndarray:
    return np.ravel(values[piece.path])[piece.begin : piece.begin + piece.size]


def _pad(value: tf.Tensor, piece: Slice) -> tf.Tensor:
    flat = tf.reshape(tf.cast(value, tf.float32), [-1])
    if piece.is_part:
        flat = tf.slice(flat, [piece.begin], [piece.size])
    return flat if piece.size == piece.padded else tf.pad(flat, [[0, piece.padded - piece.size]])
